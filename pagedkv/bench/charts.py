"""The figures: one message each, said in the title, labels beside the lines. Needs matplotlib (extra `bench`).

Colours are those of Okabe and Ito, which readers with any kind of colour vision can tell apart.
"""

from collections.abc import Sequence
from pathlib import Path

from .compare import Row
from .peers import PEERS

OURS, OTHER, THIRD, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"
COLOURS = {"paged": OURS, "paged-ungrouped": OTHER, "torch-rows": THIRD}
SHORT = {
    "paged": "pagedkv, prefix read once",
    "paged-ungrouped": "pagedkv, beam by beam",
    "torch-rows": "torch, padded",
}


def draw(results: dict, folder: Path) -> list[Path]:
    """Write every chart that the results have data for, as PNG; returns the files."""
    from matplotlib import pyplot as plt

    sweeps = results["sweeps"]
    figures = {name: DRAWN[name](points) for name, points in sweeps.items() if name in DRAWN and points}
    if {"lengths", "batches"} <= set(sweeps):
        figures["linear"] = linear(sweeps["lengths"], sweeps["batches"])
    for shape in dict.fromkeys(row.shape for row in results["rows"]):
        figures[f"kernels_{shape}"] = kernels([row for row in results["rows"] if row.shape == shape])
    files = []
    for name, figure in figures.items():
        if figure is not None:
            files.append(folder / f"{name}.png")
            figure.savefig(files[-1], dpi=150)
            plt.close(figure)
    return files


def kernels(rows: Sequence[Row]):
    """Bars: milliseconds of one layer, single-threaded float32, with the spread. None if nothing was measured."""
    rows = [r for r in rows if r.samples and r.threads == r.round_of == 1 and r.dtype == "float32"]
    if not rows:
        return None
    rows = sorted(rows, key=lambda r: -r.seconds)
    figure, axes = _axes(height=1.4 + 0.42 * len(rows))
    for i, row in enumerate(rows):
        low, mid, high = (row.percentile(p) * 1e3 for p in (20, 50, 80))
        axes.barh(i, mid, color=OURS if row.peer.startswith("paged") else GREY, height=0.7)
        axes.plot([low, high], [i, i], color="black", lw=1.5)
        axes.text(high, i, f"  {mid:,.0f} ms" if mid >= 1000 else f"  {mid:.3g} ms", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [PEERS[r.peer].about if r.peer in PEERS else r.peer for r in rows])
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.set(
        xlabel="ms for one layer of one step", xlim=(0, 1.15 * max(r.percentile(80) for r in rows) * 1e3)
    )
    times = {row.peer: row.seconds for row in rows}
    message = f"Shape {rows[0].shape}, one layer, one thread"
    if {"paged", "numpy-padded"} <= set(times):
        share = times["paged"] / times["numpy-padded"]
        message += f": pages take {share:.2f} of the time of padded arrays"
    figure.suptitle(message, x=0.01, ha="left")  # over the labels too, where it has room
    return figure


def linear(by_length: Sequence[dict], by_batch: Sequence[dict]):
    """Time of a step against length and against batch: straight lines."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=False, layout="constrained")
    held = f"batch {by_length[0]['batch']}", f"{by_batch[0]['length']} tokens each"
    for axis, points, key, fixed in zip(axes, (by_length, by_batch), ("length", "batch"), held, strict=True):
        points = [p for p in points if "seconds" in p]
        x, y = [p[key] for p in points], [p["seconds"] * 1e3 for p in points]
        axis.plot(x, y, "o-", color=OURS, lw=2)
        axis.fill_between(
            x, [p["p20"] * 1e3 for p in points], [p["p80"] * 1e3 for p in points], color=OURS, alpha=0.2
        )
        if points:
            axis.annotate(
                f"{points[-1]['ns_per_token']:.0f} ns a cached token", (x[-1], y[-1]), (-8, 4), ha="right",
                textcoords="offset points", color=OURS,
            )  # fmt: skip
        axis.set(xlabel=f"{key} ({fixed})", ylabel="ms for one layer")
        _from_zero(axis)
        _bare(axis)
    costs = [p["ns_per_token"] for p in (*by_length, *by_batch) if "seconds" in p]
    message = (
        f"A cached token costs {min(costs):.0f} to {max(costs):.0f} ns, however many there are"
        if costs
        else ""
    )
    figure.suptitle(message, x=0.01, ha="left")
    return figure


def block_sizes(points: Sequence[dict]):
    """Speed and waste against block size: where both are good."""
    from matplotlib import pyplot as plt

    points = [p for p in points if "seconds" in p]
    figure, (speed, waste) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    x = range(len(points))
    speed.plot(x, [p["ns_per_token"] for p in points], "o-", color=OURS, lw=2)
    low, high = ([p["ns_per_token"] * p[end] / p["seconds"] for p in points] for end in ("p20", "p80"))
    speed.fill_between(x, low, high, color=OURS, alpha=0.2)
    speed.set(ylabel="ns a cached token", ylim=(0, 1.1 * speed.dataLim.y1))
    waste.plot(x, [p["waste"] * 100 for p in points], "o-", color=OTHER, lw=2)
    waste.set(ylabel="slots reserved but empty, %", ylim=(0, 1.1 * waste.dataLim.y1))
    for axis in (speed, waste):
        axis.set_xticks(x, [p["block_size"] for p in points])
        axis.set_xlabel("block size, tokens")
        _bare(axis)
    if points:
        message = f"{_fastest(points)}; those of {points[-1]['block_size']} are "
        figure.suptitle(f"{message}{points[-1]['waste']:.1%} empty", x=0.01, ha="left")
    return figure


def _fastest(points: Sequence[dict]) -> str:
    """Which block size is fastest, or which are and cannot be told apart because their spreads overlap."""
    best = min(points, key=lambda p: p["seconds"])
    sizes = [str(p["block_size"]) for p in points if p is best or p["p20"] <= best["p80"]]
    if len(sizes) == 1:
        return f"Blocks of {sizes[0]} are fastest"
    return f"Blocks of {', '.join(sizes[:-1])} and {sizes[-1]} tie within the spread"


def beam_widths(points: Sequence[dict]):
    """Time of a step against beam width, line by line."""
    figure, axes = _axes(height=3.8)
    for peer in dict.fromkeys(p["peer"] for p in points):
        line = [p for p in points if p["peer"] == peer and "seconds" in p]
        if line:
            x, y = [p["width"] for p in line], [p["seconds"] * 1e3 for p in line]
            colour = COLOURS.get(peer, GREY)
            axes.plot(x, y, "o-", color=colour, lw=2)
            axes.text(x[-1], y[-1], f"  {SHORT.get(peer, peer)}", color=colour, va="center")
    axes.set(xlabel="beams over one prompt", ylabel="ms for one layer")
    _from_zero(axes)
    axes.set_xlim(0, 1.45 * max(p["width"] for p in points))
    widest = {p["peer"]: p for p in points if p["width"] == points[-1]["width"] and "seconds" in p}
    if {"paged", "paged-ungrouped"} <= set(widest):
        gain = widest["paged-ungrouped"]["seconds"] / widest["paged"]["seconds"]
        message = f"{points[-1]['width']} beams of one prompt: {gain:.1f} times as fast when it is read once"
        axes.set_title(message, loc="left")
    return figure


def bookkeeping(points: Sequence[dict]):
    """Time of a step's tables and slots against the batch."""
    figure, axes = _axes(height=3.6)
    x, y = [p["batch"] for p in points], [p["seconds"] * 1e6 for p in points]
    axes.plot(x, y, "o-", color=OURS, lw=2)
    axes.fill_between(
        x, [p["p20"] * 1e6 for p in points], [p["p80"] * 1e6 for p in points], color=OURS, alpha=0.2
    )
    axes.text(x[-1], y[-1], f"{y[-1] / x[-1]:.2f} µs a sequence  ", color=OURS, ha="right", va="bottom")
    axes.set(xlabel="batch", ylabel="µs for slots and block tables")
    _from_zero(axes)
    axes.set_title(
        f"Slots and tables of a step: {y[-1]:.0f} µs for {x[-1]} sequences of any length", loc="left"
    )
    return figure


def head_dims(points: Sequence[dict]):
    """Time per cached token against head dim."""
    points = [p for p in points if "seconds" in p]
    figure, axes = _axes(height=3.6)
    x, y = [p["head_dim"] for p in points], [p["ns_per_token"] for p in points]
    axes.plot(x, y, "o-", color=OURS, lw=2)
    axes.set(xlabel="head dim", ylabel="ns a cached token")
    _from_zero(axes)
    if points:
        growth = f"{x[-1] / x[0]:g} times the head dim, {y[-1] / y[0]:.1f} times the time of a token"
        axes.set_title(growth, loc="left")
    return figure


DRAWN = {
    "block_sizes": block_sizes,
    "beam_widths": beam_widths,
    "bookkeeping": bookkeeping,
    "head_dims": head_dims,
}


def _axes(height: float):
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, height), layout="constrained")
    _bare(axes)
    return figure, axes


def _bare(axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _from_zero(axes, *, room: float = 1.1) -> None:
    """Both axes from 0, with room above the highest point."""
    axes.set(xlim=(0, None), ylim=(0, room * axes.dataLim.y1))
