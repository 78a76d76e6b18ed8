"""What is written down: results.json, and the same as a Markdown report."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from .compare import Row
from .goals import SLACK, Verdict
from .model import CACHES
from .peers import PEERS

FORMAT = 2  # of results.json; grows when a reader of the old one would go wrong


def as_json(results: dict) -> dict:
    """Results as plain values, rows included."""
    return {"format": FORMAT} | results | {"rows": [row.as_dict() for row in results["rows"]]}


def write(results: dict, verdicts: Sequence[Verdict], folder: Path) -> None:
    """results.json and report.md into a folder, which is made if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(
        json.dumps(as_json(results), indent=1, allow_nan=False) + "\n", "utf-8"
    )
    (folder / "report.md").write_text(markdown(results, verdicts), "utf-8")


def markdown(results: dict, verdicts: Sequence[Verdict] = ()) -> str:
    """Everything that was measured, one section each."""
    parts = ["# pagedkv bench", machine_line(results)]
    for shape in dict.fromkeys(row.shape for row in results["rows"]):
        parts += [f"## Shape {shape}", kernels([row for row in results["rows"] if row.shape == shape])]
    for name, points in results["sweeps"].items():
        parts += [f"## {TITLES[name]}", sweep(points)]
    if results["bookkeeping"]:
        parts += ["## Bookkeeping", bookkeeping(results["bookkeeping"])]
    if results["model"]:
        parts += ["## The shipped model", end_to_end(results["model"])]
    if verdicts:
        parts += ["## Goals", goals(verdicts)]
    if results["absent"]:
        parts += ["## Not measured", "\n".join(f"- {reason}" for reason in results["absent"])]
    return "\n\n".join(parts) + "\n"


def wrong(results: dict) -> list[str]:
    """What gave a wrong answer: each named in one phrase."""
    found = [
        f"{row.peer} {row.dtype} on {row.shape} is off by {row.error:.1e} of the largest |V|"
        for row in results["rows"]
        if not row.correct
    ]
    for name, points in results["sweeps"].items():
        found += [
            f"{TITLES[name].lower()} {next(iter(p.values()))}" for p in points if not p.get("correct", True)
        ]
    return found + [
        f"the model at batch {row['batch']}: logits differ by {row['difference']:.1e}"
        for row in results["model"]
        if not row["difference"] < LOGITS
    ]


LOGITS = 1e-3  # that two caches' logits may differ by; they are about 10

TITLES = {
    "lengths": "Cost against length",
    "batches": "Cost against batch",
    "block_sizes": "Block size",
    "head_dims": "Head dim",
    "beam_widths": "Beam width",
    "bookkeeping": "Bookkeeping of a step against batch",
}


def machine_line(results: dict) -> str:
    m, read = results["machine"], results["read_bandwidth"]
    busy = "" if m["load"] is None else f" (load {m['load']:.1f} at the start)"
    return (
        f"{m['processor']}, {m['cores']} cores{busy}; one reads {read / 1e9:.1f} GB/s. {m['system']}, "
        f"Python {m['python']}, NumPy {m['numpy']}, {m['blas']} with its kernel for {m['blas_kernel']}. "
        "Times are medians, in brackets the 20th and 80th percentile."
    )


def kernels(rows: Sequence[Row]) -> str:
    """Kernels on one shape: fastest first, those that were wrong last."""
    ordered = sorted(rows, key=lambda r: (r.round_of, not r.correct, r.seconds if r.samples else 0))
    head = (
        "kernel",
        "threads",
        "ms a layer",
        "tokens/s",
        "ns a cached token",
        "GB/s",
        "of one core's",
        "error",
    )
    return table(head, [_kernel(row) for row in ordered])


def _kernel(row: Row) -> tuple[str, ...]:
    about = PEERS[row.peer].about if row.peer in PEERS else row.peer
    name = about if row.dtype == "float32" else f"{about}, {row.dtype}"
    error = f"{row.error:.0e}" if row.correct else f"**wrong: {row.error:.1e} of max abs V**"
    if not row.samples:
        return (name, str(row.threads), *["–"] * 5, error)
    spread = f"{row.seconds * 1e3:.3g} [{row.percentile(20) * 1e3:.3g}, {row.percentile(80) * 1e3:.3g}]"
    share = f"{row.bandwidth_share:.2f}" if row.bandwidth_share else "–"
    rate = f"{row.bytes_per_second / 1e9:.1f}"
    return (
        name,
        str(row.threads),
        spread,
        f"{row.tokens_per_second:,.0f}",
        f"{row.ns_per_token:.0f}",
        rate,
        share,
        error,
    )


def sweep(points: Sequence[dict]) -> str:
    columns = list(dict.fromkeys(key for point in points for key in point))
    return table(
        [NAMES.get(c, c.replace("_", " ")) for c in columns],
        [[_cell(c, point.get(c)) for c in columns] for point in points],
    )


NAMES = {
    "seconds": "ms",
    "p20": "p20, ms",
    "p80": "p80, ms",
    "bytes_per_second": "GB/s",
    "ns_per_token": "ns a token",
}


def _cell(column: str, value) -> str:
    if column in ("seconds", "p20", "p80") and value is not None:
        return f"{value * 1e3:.3g}"
    if column == "bytes_per_second" and value is not None:
        return f"{value / 1e9:.1f}"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "**no**", None: "–"}[value]
    return (
        f"{value:.3f}"
        if isinstance(value, float) and value < 10
        else f"{value:,.0f}"
        if value != str(value)
        else value
    )


def bookkeeping(rows: Sequence[dict]) -> str:
    body = []
    for row in rows:
        over = f"a Python loop takes {row['over']:.1f}x" if "over" in row else ""
        spread = f"{row['seconds'] * 1e6:.1f} [{row['p20'] * 1e6:.1f}, {row['p80'] * 1e6:.1f}]"
        body.append((row["name"], spread, over))
    return table(("operation", "µs", ""), body)


def end_to_end(rows: Sequence[dict]) -> str:
    head = (
        "batch",
        "lengths",
        "cache",
        "tokens/s",
        "attention",
        "bookkeeping",
        "network",
        "paged is",
    )
    body = []
    for row in rows:
        for name in ("paged", *CACHES):
            way = row[name]
            shares = [f"{way[part]:.0%}" for part in ("attention", "bookkeeping", "network")]
            over = "" if name == "paged" else f"{way['paged']:.2f}x as fast"
            speed = f"{way['tokens_per_second']:,.0f}"
            body.append((str(row["batch"]), row["mix"], name, speed, *shares, over))
    return table(head, body)


def goals(verdicts: Sequence[Verdict]) -> str:
    body = []
    for verdict in verdicts:
        goal, ok = verdict.goal, {True: "ok", False: "MISSED", None: "–"}[verdict.ok]
        least = "at most " if goal.at_most else ""
        measured = "not measured" if verdict.measured is None else f"{verdict.measured:.2f}{goal.unit}"
        wanted = "none" if verdict.wanted is None else f"{least}{verdict.wanted:g}{goal.unit}"
        body.append((goal.name, measured, wanted, ok))
    return table(("goal", "measured", "goal", f"with {SLACK:.0%} slack"), body)


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns are also straight when read as text."""
    rows = [tuple(head), *map(tuple, body)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])
