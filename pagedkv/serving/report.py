"""The report of a replay: what was found, in words, tables, charts and JSON; the answer last."""

import dataclasses
import json
from pathlib import Path

from . import replay as replays
from .replay import Hits, Served, Traffic
from .traces import Trace

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"  # Okabe and Ito's
HIT_FIELDS = (
    "policy", "count", "block_size", "num_blocks", "requests", "too_long", "blocks", "hit_blocks", "tokens",
    "hit_tokens", "rate", "microseconds_per_block",
)  # fmt: skip
COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9")


@dataclasses.dataclass
class Findings:
    """All that was found about a trace."""

    trace: Trace
    traffic: Traffic
    hits: list[Hits] = dataclasses.field(default_factory=list)
    sessions: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    served: list[Served] = dataclasses.field(default_factory=list)
    silent: str = ""  # why nothing was served


# ---- the report -----------------------------------------------------------------------------------------------


def report(found: Findings) -> str:
    """Everything in words and tables; the answer last."""
    parts = [about_the_trace(found)]
    if found.hits:
        parts.append(about_hits(found.hits))
    if found.sessions:
        parts.append(about_sessions(found.sessions))
    if found.served:
        parts.append(about_time(found.served))
    elif found.silent != "Not asked for.":
        parts.append(found.silent)
    parts += [about_waste(found.traffic), answer(found)]
    return "\n\n".join(parts)


def about_the_trace(found: Findings) -> str:
    trace, traffic = found.trace, found.traffic
    n = traffic.requests
    when = "" if not traffic.last else f" in {traffic.last:,.0f} s"
    models = f", {len(traffic.models)} models" if len(traffic.models) > 1 else ""
    lines = [
        f"{trace.path.name} ({trace.format}): {n:,} requests{when}{models}; prompts of {traffic.prompt / n:,.0f} "
        f"tokens on average, answers of {traffic.output / n:,.0f}, the longest of both together {traffic.longest:,}"
    ]
    if trace.skipped:
        lines.append(f"{trace.skipped:,} damaged lines were left out, the first: {trace.first_skipped}")
    return "\n".join(lines)


def about_hits(hits: list[Hits]) -> str:
    how = {"manager": "through the block manager", "lru": "in a plain LRU list, head first"}[hits[0].policy]
    rows = [
        (
            r.block_size,
            r.num_blocks,
            r.num_blocks * r.block_size,
            f"{r.rate:.2%}",
            r.too_long,
            microseconds(r),
        )
        for r in hits
    ]
    head = ("block size", "blocks", "tokens", "found", "too long", "µs per block")
    return f"Found in the prefix cache, {how}, share of the {_unit(hits)}:\n" + table(head, rows)


def microseconds(hits: Hits) -> str:
    """Cost of a block in the first and in the last tenth of the trace."""
    costs = hits.microseconds_per_block
    tenth = max(1, len(costs) // 10)
    first, last = sum(costs[:tenth]) / tenth, sum(costs[-tenth:]) / tenth
    return f"{first:.1f} → {last:.1f}"


def about_sessions(sessions: dict[str, tuple[float, float]]) -> str:
    rows = [(name, f"{100 * same:.1f}", f"{100 * ever:.1f}") for name, (ever, same) in sessions.items()]
    head = ("session", "in the request before, %", "in any earlier one, %")
    return "Each session alone, with memory without end (each model's first request left out):\n" + table(
        head, rows
    )


def about_time(served: list[Served]) -> str:
    rows = [
        (
            r.block_size,
            r.num_blocks,
            f"{r.blocks_used / r.num_blocks:.0%}",
            f"{r.most_used / r.num_blocks:.0%}",
            f"{r.running:.1f}",
            f"{r.waiting:.1f}",
            f"{r.ttft[0]:,.2f}",
            f"{r.ttft[2]:,.2f}",
            r.preemptions,
            f"{r.recomputed_tokens / max(r.prefill_tokens, 1):.1%}",
            r.too_long,
        )
        for r in served
    ]
    head = (
        "block size", "blocks", "in use", "at most", "running", "waiting", "first token s", "95 of 100",
        "preempted", "computed again", "too long",
    )  # fmt: skip
    return "On the clock (means over time; seconds to the first token, mean and 95 of 100):\n" + table(
        head, rows
    )


def about_waste(traffic: Traffic) -> str:
    rows = [(size, f"{traffic.paged_waste(size):.2%}") for size in traffic.block_sizes]
    idle = 1 - traffic.reserved(traffic.longest)["tokens"]
    return (
        "Slots in used blocks that hold no token:\n"
        + table(("block size", "wasted"), rows)
        + f"\nWithout pages, with room for the longest request reserved for everyone, {idle:.0%} would lie idle."
    )


def table(head: tuple, rows: list[tuple]) -> str:
    """Columns of equal width, numbers with commas."""
    cells = [[f"{value:,}" if isinstance(value, int) else value for value in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells
    )


def answer(found: Findings) -> str:
    """How many blocks, and of which size, in plain words."""
    lines = ["With this traffic:"]
    if found.hits:
        lines.append(answer_of_hits(found.hits))
    if found.served:
        lines.append(answer_of_time(found.served))
    lines.append(answer_of_size(found))
    return "\n- ".join(lines)


def answer_of_hits(hits: list[Hits]) -> str:
    best = max(result.rate for result in hits)
    if not best:
        return "No pool that was tried finds anything again: prefix caching would not help here."
    enough = replays.enough_for_hits(hits)
    more = " None that was tried is larger: try larger ones." if _is_largest(enough, hits) else ""
    return (
        f"To remember prompts, {enough.num_blocks:,} blocks of {enough.block_size} "
        f"({replays.capacity(enough):,} tokens) are enough: they find {enough.rate:.1%}, and no pool "
        f"tried finds more than {best:.1%}.{more}"
    )


def answer_of_time(served: list[Served]) -> str:
    enough = replays.enough_for_serving(served)
    best = min(served, key=lambda r: r.ttft[0])
    lost = f" {enough.too_long:,} requests are longer than any pool tried." if enough.too_long else ""
    sentence = (
        f"To serve without needless waiting, {enough.num_blocks:,} blocks of {enough.block_size} "
        f"({replays.capacity(enough):,} tokens) are enough: the first token comes after "
        f"{enough.ttft[0]:,.2f} s on average, in the best pool tried after {best.ttft[0]:,.2f} s; "
        f"{enough.preempted:,} of {enough.finished:,} requests are preempted.{lost}"
    )
    sentence += f" At most {enough.most_used:,.0f} blocks were in use."
    if _is_largest(enough, served) and (enough.preempted or enough.waiting > 1):
        sentence += " None that was tried is larger: try larger ones."
    elif enough.waiting > enough.running:
        sentence += (
            f" Even so {enough.waiting:,.0f} requests wait while {enough.running:,.0f} run: more blocks do not help, "
            "steps are too slow for this traffic."
        )
    return sentence


def answer_of_size(found: Findings) -> str:
    traffic = found.traffic
    size = replays.best_block_size(traffic, found.hits)
    waste = f"{traffic.paged_waste(size):.1%} of their slots hold no token"
    if len(traffic.block_sizes) == 1:
        return f"In blocks of {size}, the only size tried, {waste}. --block-size 8,16,32 compares sizes."
    return (
        f"Of the block sizes tried take {size}: {waste}, and larger blocks mean shorter tables. "
        f"(The largest that wastes at most {replays.WASTE:.0%} and finds at most {100 * replays.WORSE:.0f} point "
        "less than the best.)"
    )


def results(found: Findings) -> dict:
    """All numbers, for other programs."""
    traffic, trace = found.traffic, found.trace
    hits = [{name: getattr(result, name) for name in HIT_FIELDS} for result in found.hits]
    chosen = {"block_size": replays.best_block_size(traffic, found.hits)}
    if any(r.rate for r in found.hits):
        chosen["blocks_for_hits"] = pool_named(replays.enough_for_hits(found.hits))
    if found.served:
        chosen["blocks_for_serving"] = pool_named(replays.enough_for_serving(found.served))
    return {
        "trace": trace.path.name,
        "format": trace.format,
        "skipped_lines": trace.skipped,
        "requests": traffic.requests,
        "prompt_tokens": traffic.prompt,
        "output_tokens": traffic.output,
        "longest": traffic.longest,
        "models": sorted(traffic.models),
        "waste": {str(size): traffic.paged_waste(size) for size in traffic.block_sizes},
        "reserved": traffic.reserved(traffic.longest),
        "hits": hits,
        "sessions": {
            name: {"cumulative": ever, "same_model": same} for name, (ever, same) in found.sessions.items()
        },
        "served": [dataclasses.asdict(r) for r in found.served],
        "enough": chosen,
    }


def pool_named(result: Hits | Served) -> dict[str, int]:
    return {"block_size": result.block_size, "num_blocks": result.num_blocks}


def write(found: Findings, folder: Path) -> None:
    """Put the report, the numbers and the charts (PNG) into a folder. The charts need matplotlib (extra `bench`)."""
    (folder / "report.txt").write_text(report(found) + "\n", encoding="utf-8")
    (folder / "results.json").write_text(json.dumps(results(found), indent=1) + "\n", encoding="utf-8")
    for name, figure in charts(found).items():
        figure.savefig(folder / f"{name}.png", dpi=150)


# ---- charts: one message each -----------------------------------------------------------------------------------


def charts(found: Findings) -> dict:
    """Matplotlib figures by name, those that there are numbers for."""
    drawn = {}
    if any(result.rate for result in found.hits):
        drawn["hits"] = chart_of_hits(found.hits)
    if found.hits:
        drawn["cost"] = chart_of_cost(found.hits)
    if found.served:
        drawn["waiting"] = chart_of_waiting(found.served)
        drawn["pool"] = chart_of_pool(replays.enough_for_serving(found.served))
    if len(found.traffic.block_sizes) > 1:
        drawn["waste"] = chart_of_waste(found.traffic)
    return drawn


def chart_of_hits(hits: list[Hits]):
    enough = replays.enough_for_hits(hits)
    title = f"A pool of {replays.capacity(enough):,} tokens finds {enough.rate:.0%} of the {_unit(hits)}"
    if not _is_largest(enough, hits):
        title += ", larger ones hardly more"
    points = [(r.block_size, replays.capacity(r), 100 * r.rate) for r in hits]
    return _lines_by_size(points, "found in the cache, %", title)


def chart_of_waiting(served: list[Served]):
    enough = replays.enough_for_serving(served)
    title = f"With {replays.capacity(enough):,} tokens of pool the first token comes after {enough.ttft[0]:,.1f} s"
    if not _is_largest(enough, served):
        title += ", with more hardly sooner"
    points = [(r.block_size, replays.capacity(r), r.ttft[0]) for r in served]
    return _lines_by_size(points, "seconds to the first token, mean", title)


def chart_of_pool(served: Served):
    figure, axes = _axes("seconds", "blocks")
    curve = served.curve
    axes.fill_between(curve["time"], curve["blocks"], color=BLUE, alpha=0.3, lw=0)
    axes.plot(curve["time"], curve["blocks"], color=BLUE)
    axes.axhline(served.num_blocks, color=GREY, ls="--")
    axes.annotate("the pool", (0, served.num_blocks), color=GREY, va="bottom")
    used = f"{served.blocks_used / served.num_blocks:.0%}"
    axes.set_title(f"Blocks in use: {used} of {served.num_blocks:,} on average", loc="left", color=BLUE)
    axes.set_ylim(0, 1.12 * served.num_blocks)
    return figure


def chart_of_cost(hits: list[Hits]):
    figure, axes = _axes("part of the trace, %", "µs per block of a prompt")
    results = [r for r in hits if r.block_size == hits[0].block_size]
    ends = results[:1] + results[1:][-1:]  # the smallest pool and the largest
    for colour, result, side in zip(COLOURS, ends, ("bottom", "top"), strict=False):
        costs = result.microseconds_per_block
        tenths = [costs[i * len(costs) // 10 : (i + 1) * len(costs) // 10] for i in range(10)]
        points = [(10 * i + 5, sum(part) / len(part)) for i, part in enumerate(tenths) if part]
        axes.plot(*zip(*points, strict=True), "o-", color=colour)
        axes.annotate(f" {result.num_blocks:,} blocks", points[-1], color=colour, va=side)
    axes.set_ylim(bottom=0)
    axes.set_title(
        f"A block costs {microseconds(results[-1])} µs from the trace's start to its end", loc="left"
    )
    return figure


def chart_of_waste(traffic: Traffic):
    figure, axes = _axes("block size, tokens", "slots without a token, %")
    sizes = sorted(traffic.block_sizes)
    axes.plot(sizes, [100 * traffic.paged_waste(size) for size in sizes], "o-", color=BLUE)
    axes.axhline(100 * replays.WASTE, color=GREY, ls="--")
    axes.annotate(f"{replays.WASTE:.0%}", (sizes[0], 100 * replays.WASTE), color=GREY, va="bottom")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, sizes)
    axes.set_ylim(bottom=0)
    axes.set_title("Smaller blocks waste less", loc="left")
    return figure


def _axes(across: str, up: str):
    from matplotlib.figure import Figure  # no pyplot: nothing to close, no window

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=across, ylabel=up)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    return figure, axes


def _lines_by_size(points: list[tuple[int, float, float]], up: str, title: str):
    """A line for each block size; points are block size, tokens of the pool, and what is found there."""
    figure, axes = _axes("tokens that the pool holds", up)
    sizes = dict.fromkeys(size for size, _, _ in points)
    for i, size in enumerate(sizes):
        line = [(across, value) for other, across, value in points if other == size]
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(*zip(*line, strict=True), "o", ls=("-", "--", ":")[i % 3], color=colour)
        axes.annotate(f"blocks of {size}", line[-1], (6, 8), textcoords="offset points", color=colour)
    axes.set_xscale("log", base=2)
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize=11)
    return figure


def _is_largest(chosen: Hits | Served, results: list) -> bool:
    return replays.capacity(chosen) == max(map(replays.capacity, results))


def _unit(hits: list[Hits]) -> str:
    return f"prompts' {'tokens' if hits[0].count == 'tokens' else 'blocks'}"
