"""Run the lessons and store them in one fixed form: `python -m pagedkv.teach.notebooks`, or `make notebooks`.

A stored lesson is read without a kernel, compared cell by cell in the tests, and kept in git. So everything
that changes from run to run is taken out before it is written: time stamps, random cell ids, Python's minor
version, tracebacks (the error's name and message stay) and the random ids of widgets. A widget's stored output is
the text and HTML that it gives beside its live view; nbval compares those two and never looks at the live view.

Two kinds of output may differ although nothing changed: pictures (another matplotlib draws other pixels) and
cells tagged `nbval-ignore-output` (timings). They are kept as they are stored while the cell's code and its other
outputs are the same; `--fresh` renews them.

The copies without solutions in notebooks/exercises/ are written last.

A lesson that needs packages which are not installed is left as it is stored, and one line says what to install.
"""

from __future__ import annotations

import argparse
import base64
import io
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

CELL_TIMEOUT = 120  # seconds
RUN_CLASSES = (10, 30, 60, 120, 300)  # seconds; the course map says "under 10 s"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
IGNORE_OUTPUT = "nbval-ignore-output"
MAP_BEGIN, MAP_END = "<!-- course map -->", "<!-- /course map -->"

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
LANGUAGE = {
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "pygments_lexer": "ipython3",
}
CELL_METADATA = ("tags", "reason", "jupyter", "pagedkv")  # the rest is the editor's and is dropped


# ---- which lessons there are -------------------------------------------------------------------------------


def short_name(path: Path) -> str:
    """The name other lessons use for this one: "04" for 04_copy_on_write.ipynb, else the whole stem."""
    number = re.match(r"\d\d(?=_)", path.stem)
    return number.group() if number else path.stem


def lessons(folder: Path) -> list[Path]:
    """The course's notebooks in reading order: numbers, the capstone after 08, appendices last."""

    def order(path: Path) -> tuple[str, str]:
        if path.stem.startswith("capstone"):
            return "08~", path.stem
        return (path.stem[:2] if path.stem[:2].isdigit() else "~"), path.stem

    return sorted(folder.glob("*.ipynb"), key=order)


def read(path: Path) -> Any:
    """Read a notebook as nbformat 4."""
    nbformat = _jupyter("nbformat")
    return nbformat.read(path, as_version=4)


def dumps(nb: Any) -> str:
    """The text of a notebook file; keys are sorted, so equal notebooks give equal bytes."""
    return _jupyter("nbformat").writes(nb).rstrip("\n") + "\n"


# ---- what a lesson needs beyond the course -----------------------------------------------------------------


def missing_packages(facts: Any) -> str | None:
    """The pip command for what a lesson needs and this environment has not; None if it has all.

    Args: facts: the lesson's `metadata.pagedkv`: `extras` are extras of pagedkv, `packages` are packages that stand
        in none of them, as "name==version".
    """
    extras = [extra for extra in facts.get("extras", []) if not _has_extra(extra)]
    packages = [package for package in facts.get("packages", []) if not _has(package.split("==")[0])]
    commands = [f'pip install "pagedkv[{",".join(extras)}]"'] if extras else []
    commands += [f"pip install --no-deps {package}" for package in packages]
    return "   and   ".join(commands) or None


def _has_extra(extra: str) -> bool:
    """Whether every package is here that an extra of pagedkv adds."""
    requirements = map(_jupyter("packaging.requirements").Requirement, metadata.requires("pagedkv") or [])
    added = [
        r.name
        for r in requirements
        if r.marker and r.marker.evaluate({"extra": extra}) and not r.marker.evaluate({"extra": ""})
    ]
    return all(map(_has, added))


def _has(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


# ---- run ---------------------------------------------------------------------------------------------------


def execute(nb: Any, folder: Path, timeout: int = CELL_TIMEOUT) -> None:
    """Run all cells of `nb` in a fresh kernel of this environment whose working directory is `folder`.

    Args:
        nb: the notebook; its outputs and counts are replaced.
        folder: where the kernel starts.
        timeout: seconds a cell may take.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed that is not tagged `raises-exception`.
    """
    nbclient = _jupyter("nbclient")
    kernelspec = _jupyter("jupyter_client.kernelspec")
    ipykernel = _jupyter("ipykernel.kernelspec")

    class ThisEnvironment(kernelspec.KernelSpecManager):
        """Whatever kernel a user has registered under the name python3, take the running interpreter."""

        def get_kernel_spec(self, kernel_name: str) -> Any:
            return self.kernel_spec_class(resource_dir=ipykernel.RESOURCES, **ipykernel.get_kernel_dict())

    class Manager(_jupyter("jupyter_client").AsyncKernelManager):
        """One kernel, which the client shuts down when it is done."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "kernel_spec_manager": ThisEnvironment()})

    nb.metadata.pop("widgets", None)
    nbclient.NotebookClient(
        nb,
        kernel_manager_class=Manager,
        timeout=timeout,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        store_widget_state=False,
    ).execute(stderr=subprocess.DEVNULL)  # the kernel's own log; what cells print on stderr is an output


# ---- one fixed form ----------------------------------------------------------------------------------------


def normalise(nb: Any) -> None:
    """Bring a notebook into the stored form, in place; a second call changes nothing."""
    ours = nb.metadata.get("pagedkv")
    nb.metadata.clear()
    nb.metadata.update(kernelspec=dict(KERNEL), language_info=dict(LANGUAGE))
    if ours is not None:
        nb.metadata["pagedkv"] = ours
    nb.nbformat, nb.nbformat_minor = 4, 5

    taken: set[str] = set()
    for cell in nb.cells:
        cell.metadata = {key: cell.metadata[key] for key in CELL_METADATA if key in cell.metadata}
        cell.source = cell.source.rstrip()
        cell["id"] = _readable_id(cell, taken)
        if cell.cell_type == "code":
            cell.outputs = _joined_streams(cell.outputs)
            for output in cell.outputs:
                _normalise_output(output)


def _normalise_output(output: Any) -> None:
    if output.output_type == "error":
        output.traceback = [f"{output.ename}: {output.evalue}"]  # the rest names files of this machine
    elif "data" in output:
        output.data.pop(WIDGET_VIEW, None)  # a random id; without a kernel it would show "model not found"


def _joined_streams(outputs: Sequence[Any]) -> list[Any]:
    """Kernels cut printed text into pieces at random moments; join neighbours of the same stream."""
    joined: list[Any] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.output_type == output.output_type == "stream"
            and last.name == output.name
        ):
            last.text += output.text
        else:
            joined.append(output)
    return joined


def is_random_id(cell_id: str) -> bool:
    """Whether nbformat (8 hex digits) or JupyterLab (a UUID) made up this id."""
    return re.fullmatch(r"[0-9a-f]{8}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", cell_id) is not None


def _readable_id(cell: Any, taken: set[str]) -> str:
    """Keep an id that a person could have written; else make one of the cell's first words."""
    kept = cell.get("id", "")
    if kept and kept not in taken and not is_random_id(kept):
        taken.add(kept)
        return kept
    first_line = next((line for line in cell.source.splitlines() if re.search(r"[a-zA-Z]", line)), "cell")
    words = re.findall(r"[a-z0-9]+", first_line.lower())[:7]
    slug = "-".join(words)[:44].strip("-") or "cell"
    if is_random_id(slug):
        slug = f"cell-{slug}"
    name, number = slug, 1
    while name in taken:
        number += 1
        name = f"{slug}-{number}"
    taken.add(name)
    return name


# ---- keep what differs without meaning ---------------------------------------------------------------------


def settle(new: Any, old: Any) -> None:
    """Take over `old`'s pictures and ignored outputs where code and other outputs are the same (in place)."""
    stored: dict[str, list[Any]] = {}
    for cell in old.cells:
        if cell.cell_type == "code":
            stored.setdefault(cell.source.rstrip(), []).append(cell)
    for cell in new.cells:
        if cell.cell_type != "code" or not stored.get(cell.source):
            continue
        before = stored[cell.source].pop(0)
        ignored = IGNORE_OUTPUT in cell.metadata.get("tags", [])
        if _kinds(cell) != _kinds(before):
            continue
        if ignored or (_compared(cell) == _compared(before) and _same_pictures(cell, before)):
            cell.outputs = before.outputs
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = cell.execution_count


def _kinds(cell: Any) -> list[Any]:
    return [(o.output_type, o.get("name"), sorted(o.get("data", {}))) for o in cell.outputs]


def _compared(cell: Any) -> list[Any]:
    return [
        (
            o.get("text"),
            o.get("ename"),
            o.get("evalue"),
            {k: v for k, v in o.get("data", {}).items() if k != "image/png"},
        )
        for o in cell.outputs
    ]


def _same_pictures(cell: Any, before: Any) -> bool:
    pairs = zip(cell.outputs, before.outputs, strict=True)
    return all(
        _same_picture(a.get("data", {}).get("image/png"), b.get("data", {}).get("image/png"))
        for a, b in pairs
    )


def _same_picture(a: str | None, b: str | None) -> bool:
    """Equal but for the edges of letters and lines, which another matplotlib draws a little differently."""
    if a == b:
        return True
    if a is None or b is None:
        return False
    imread = _jupyter("matplotlib.image").imread
    left, right = (imread(io.BytesIO(base64.b64decode(png)), format="png") for png in (a, b))
    return left.shape == right.shape and float(abs(left - right).mean()) < 0.01


# ---- the course map ----------------------------------------------------------------------------------------


def run_class(seconds: float, stored: str | None = None) -> str:
    """The coarse running time that the course map shows, such as "under 10 s".

    A stored class is left only at twice its bound, or at half of the next lower one: neither a busy machine nor a
    fast one rewrites the table.
    """
    kept = re.fullmatch(r"under (\d+) s", stored or "")
    if kept:
        bound = int(kept[1])
        below = max((b for b in RUN_CLASSES if b < bound), default=0)
        if below / 2 <= seconds <= bound * 2:
            return kept[0]
    bound = next((b for b in RUN_CLASSES if seconds < b), 60 * (int(seconds) // 60 + 1))
    return f"under {bound} s"


def course_map(folder: Path, link_prefix: str = "") -> str:
    """The table of all lessons, from each notebook's `metadata.pagedkv`.

    Args:
        folder: the notebooks' folder.
        link_prefix: what to put before a file name in a link ("notebooks/" in the README).

    Returns:
        A Markdown table in reading order; minutes are reading / with exercises.
    """
    rows = [
        "| part | lesson | afterwards you can | you need | minutes to read / with exercises | runs in |",
        "|---|---|---|---|---|---|",
    ]
    part_above = None
    for path in lessons(folder):
        facts = read(path).metadata.get("pagedkv")
        if facts is None:
            continue
        part, part_above = ("" if facts["part"] == part_above else facts["part"]), facts["part"]
        needs = [*facts["needs"], *(f"`pagedkv[{extra}]`" for extra in facts.get("extras", []))]
        read_minutes, all_minutes = facts["minutes"]
        cells = (
            part,
            f"[{short_name(path)} {facts['title']}]({link_prefix}{path.name})"
            if short_name(path).isdigit()
            else f"[{facts['title']}]({link_prefix}{path.name})",
            "; ".join(facts["goals"]),
            ", ".join(needs) or "–",
            f"{read_minutes} / {all_minutes}",
            facts.get("run", "–"),
        )
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(rows)


def with_course_map(text: str, table: str) -> str:
    """Replace what stands between the course map's markers; a text without markers is returned as it is."""
    begin, end = text.find(MAP_BEGIN), text.find(MAP_END)
    if begin < 0 or end < begin:
        return text
    return f"{text[: begin + len(MAP_BEGIN)]}\n\n{table}\n\n{text[end:]}"


def write_course_maps(root: Path, check: bool = False) -> list[Path]:
    """Renew the table in the README and in lessons that have the markers; returns the files that changed."""
    readme, folder = root / "README.md", root / "notebooks"
    texts, changed = {}, []
    if readme.exists():
        texts[readme] = with_course_map(readme.read_text("utf-8"), course_map(folder, "notebooks/"))
    table = course_map(folder)
    for path in lessons(folder):
        nb = read(path)
        for cell in nb.cells:
            if cell.cell_type == "markdown":
                cell.source = with_course_map(cell.source, table)
        if any(MAP_BEGIN in cell.source for cell in nb.cells):
            texts[path] = dumps(nb)
    for path, text in texts.items():
        if _store(path, text, check):
            changed.append(path)
    return changed


def _store(path: Path, text: str, check: bool = False) -> bool:
    """Write `text` unless the file holds it already; returns whether it did (or, checking, would)."""
    if path.exists() and path.read_text("utf-8") == text:
        return False
    if not check:
        path.write_text(text, "utf-8", newline="\n")
    return True


# ---- the command -------------------------------------------------------------------------------------------


def renew(path: Path, *, fresh: bool = False, check: bool = False) -> tuple[bool, float]:
    """Execute and store one lesson; returns whether its file changed (or, checking, would) and the seconds."""
    old, new = read(path), read(path)
    start, start_cpu = time.perf_counter(), _children_seconds()
    execute(new, path.parent)
    seconds = time.perf_counter() - start
    worked = min(
        seconds, (_children_seconds() - start_cpu) or seconds
    )  # what it takes where nothing else runs
    normalise(new)
    if not fresh:
        settle(new, old)
    if "pagedkv" in new.metadata:
        facts = new.metadata["pagedkv"]
        facts["run"] = run_class(worked, facts.get("run"))
    return _store(path, dumps(new), check), seconds


def _children_seconds() -> float:
    """Processor time of the kernels that have ended; 0 where the system does not tell (Windows)."""
    try:
        import resource
    except ImportError:
        return 0.0
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pagedkv.teach.notebooks", description=__doc__.split("\n")[0]
    )
    parser.add_argument("files", nargs="*", type=Path, help="lessons to run (default: all in notebooks/)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file would change")
    parser.add_argument("--fresh", action="store_true", help="renew pictures and timings that would be kept")
    options = parser.parse_args(arguments)
    root = Path.cwd()

    changed, failed = [], []
    for path in options.files or lessons(root / "notebooks"):
        print(f"{path.name:32} ", end="", flush=True)
        if absent := missing_packages(read(path).metadata.get("pagedkv", {})):
            print(f"left as it is: it needs {absent}", flush=True)
            continue
        try:
            differs, seconds = renew(path.resolve(), fresh=options.fresh, check=options.check)
        except Exception as error:
            failed.append(path)
            print(f"failed\n{error}", flush=True)
            continue
        changed += [path] * differs
        print(f"{seconds:5.1f} s  {'changed' if differs else 'same'}", flush=True)
    if (root / "notebooks").is_dir():
        from .student import write_copies

        changed += write_course_maps(root, options.check)
        changed += write_copies(root / "notebooks", root / "notebooks" / "exercises", check=options.check)
    for path in changed if options.check else []:
        print(f"would change: {path}")
    return 1 if failed or (options.check and changed) else 0


def _jupyter(module: str) -> Any:
    """Import a module of the `course` extra, or say how to get it."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{module} is missing: pip install "pagedkv[course]"') from error


if __name__ == "__main__":
    sys.exit(main())
