"""Grade a folder of submitted notebooks: each in a process of its own, with limits, by the package's checks.

This runs strangers' code. Each notebook gets a fresh process, a temporary folder, an environment without the
caller's variables, limits on time, memory and output; what hangs, crashes or misbehaves is ended and reported.
It still runs as the user who calls it, with that user's files and network: box it in (see `pagedkv grade --help`).
"""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from . import notebooks
from .student import exercises

STARTS = 4  # a notebook that ends or hangs its process is started again without that cell, so often at most
GRACE = 5  # seconds that a stuck process is given beyond its own clock
START_UP = 60  # seconds to import everything on a busy machine
PASSED_ON = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
UNREADABLE, NOTE = "unreadable", "note"
ERROR = "error in your code"
LONGEST = 500  # characters of a message


@dataclass(frozen=True)
class Row:
    """One line of the result: an exercise, or (exercise "") a remark on the whole notebook."""

    file: str
    learner: str
    lesson: str
    exercise: str
    verdict: str
    message: str = ""
    question: str = ""

    @property
    def solved(self) -> bool:
        return self.verdict == "solved"

    def __str__(self) -> str:
        words = "; ".join(part for part in (self.message, self.question) if part) if not self.solved else ""
        what = f"{self.verdict}: {words}" if words else self.verdict
        return f"{self.learner or self.file}  {self.lesson or '?'}  {self.exercise or '–'}  {what}"


@dataclass(frozen=True)
class Settings:
    """How to grade.

    Args: lessons: {file stem: [[exercise, variable, cell id], …]}, see `asked_in`; timeout: seconds that one cell or
        one check may take, a notebook ten times that; memory: MB of address space; variant: of the questions by
        hand, None for what each notebook says; seed: of the hidden cases.
    """

    lessons: dict[str, list]
    timeout: float = 30
    memory: int = 4096
    variant: int | None = None
    seed: int = 1


def asked_in(folder: Path) -> dict[str, list]:
    """What the lessons of a folder ask: {file stem: [[exercise, variable, cell id], …]}."""
    asked = {}
    for path in notebooks.lessons(folder):
        if found := exercises(notebooks.read(path)):
            asked[path.stem] = [[e.name, e.variable, e.cell] for e in found]
    return asked


def submissions(folder: Path) -> list[Path]:
    """The notebooks in a folder and the folders in it, without Jupyter's own copies."""
    return sorted(path for path in folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)


def grade(paths: Iterable[Path], settings: Settings, *, folder: Path, jobs: int = 1) -> Iterator[list[Row]]:
    """Grade notebooks, some at a time; yields the rows of each, in the order of `paths`.

    Args: folder: rows name files relative to it; jobs: processes at once.
    """
    stop = Event()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            yield from pool.map(
                lambda path: grade_one(path, settings, str(path.relative_to(folder)), stop), paths
            )
        except BaseException:  # an interrupt: end what runs, begin nothing
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def grade_one(path: Path, settings: Settings, name: str, stop: Event) -> list[Row]:
    """Grade one notebook; whatever it does, rows come back: one per exercise, then remarks."""
    found, notes, facts = {}, [], {}
    skip, settled = set(), set()
    deadline = time.monotonic() + 10 * settings.timeout + START_UP
    for _ in range(STARTS):
        run = _run(path, settings, skip, settled, deadline, stop)
        for line in run.lines:
            facts |= line if "lesson" in line or "unreadable" in line else {}
            if "exercise" in line and "verdict" in line and line["exercise"] not in settled:
                found[line["exercise"]] = (line["verdict"], line["message"], line["question"])
                settled.add(line["exercise"])
            if "note" in line:
                notes.append(line["note"])
        if run.left_over:
            notes.append(f"left {run.left_over} processes behind; they were ended")
        if run.finished:
            break
        began = next((line for line in reversed(run.lines) if "begin" in line), None)
        if began is None:
            notes.append(f"could not be started: {run.reason}")
            break
        skip.add(began["begin"])
        if began["exercise"] and began["exercise"] not in settled:
            found[began["exercise"]] = (ERROR, run.reason, "")
            settled.add(began["exercise"])
        elif not began["exercise"]:
            notes.append(f"code cell {began['begin'] + 1}: {run.reason}")
        if time.monotonic() > deadline or stop.is_set():
            break
    return _rows(name, facts, found, notes, settings)


def _rows(name: str, facts: dict, found: dict, notes: list, settings: Settings) -> list[Row]:
    who = (_line(name), _line(str(facts.get("learner", ""))), str(facts.get("lesson", "")))
    if "unreadable" in facts:
        return [Row(*who, "", UNREADABLE, _line(facts["unreadable"]))]
    rows = []
    for exercise, *_ in settings.lessons.get(who[2], []):
        verdict, message, question = found.get(exercise, (ERROR, "the notebook was ended before it", ""))
        rows.append(Row(*who, exercise, verdict, _line(message), _line(question)))
    return rows + [Row(*who, "", NOTE, _line(note)) for note in dict.fromkeys(notes)]


def _line(text: str) -> str:
    """A stranger's text in one printable line of bounded length."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * LONGEST]).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


# ---- one process -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    lines: list[dict]  # of the report
    finished: bool
    reason: str = ""  # why it did not finish
    left_over: int = 0  # processes


def _run(
    path: Path, settings: Settings, skip: set[int], settled: set[str], deadline: float, stop: Event
) -> _Run:
    """Start the judge for one notebook and watch it until it ends, or is ended."""
    with tempfile.TemporaryDirectory(prefix="pagedkv-grade-", ignore_cleanup_errors=True) as folder:
        home, report, token = Path(folder, "home"), Path(folder, "report"), secrets.token_hex(16)
        home.mkdir()
        report.touch()
        job = {
            "notebook": str(path.resolve()),
            "report": str(report),
            "lessons": settings.lessons,
            "variant": settings.variant,
            "seed": settings.seed,
            "timeout": settings.timeout,
            "memory": settings.memory,
            "skip": sorted(skip),
            "settled": sorted(settled),
        }
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        environment |= {
            "HOME": str(home),
            "IPYTHONDIR": str(home),
            "MPLBACKEND": "Agg",
            "MPLCONFIGDIR": str(home),
            "OPENBLAS_NUM_THREADS": "1",
            "PAGEDKV_GRADE": token,  # by this we know its children
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        # The shell in between is the parent that a notebook may kill without harm.
        command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-P", "-m", "pagedkv.teach.judge"]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=home,
            env=environment,
            start_new_session=True,
        )
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(job).encode())
                process.stdin.close()
            stuck = _watch(process, report, settings.timeout + GRACE, deadline, stop)
        finally:
            left_over = _end(process, token)
        lines = _lines(report)
    if lines and lines[-1].get("done"):
        return _Run(lines, True, left_over=left_over)
    if stuck:
        return _Run(lines, False, f"took more than {settings.timeout:g} seconds")
    code = process.returncode
    number = -code if code < 0 else code - 128 if code > 128 else 0
    if number:
        names = {s.value: s.name for s in signal.Signals}
        return _Run(lines, False, f"ended its process: {names.get(number, number)}", left_over)
    return _Run(lines, False, f"ended its process with exit code {code}", left_over)


def _watch(process: subprocess.Popen, report: Path, patience: float, deadline: float, stop: Event) -> bool:
    """Wait until the process ends; True if its report does not grow for too long, time is up, or all shall stop."""
    size, since, allowed = 0, time.monotonic(), START_UP + patience
    while process.poll() is None:
        now = time.monotonic()
        if (grown := report.stat().st_size) != size:
            size, since, allowed = grown, now, patience
        if now - since > allowed or now > deadline or stop.is_set():
            return True
        time.sleep(0.02)
    return False


def _end(process: subprocess.Popen, token: str) -> int:
    """End a process, its group and whatever carries its token; how many had been left behind."""
    alone = process.poll() is not None
    left = _carriers(token) if alone else []
    for _ in range(10):  # a child may be forking meanwhile
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        carriers = _carriers(token)
        for pid in carriers:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not carriers:
            break
        time.sleep(0.02)
    process.wait()
    return len(left)


def _carriers(token: str) -> list[int]:
    """The living processes whose environment holds the token; none where there is no /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if token.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def _lines(report: Path) -> list[dict]:
    """What a judge wrote, until the first line that it cannot have written."""
    lines = []
    for text in report.read_text("utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if not isinstance(line, dict):
            break
        lines.append(line)
    return lines


# ---- the class ---------------------------------------------------------------------------------------------


def class_picture(rows: Sequence[Row]) -> list[str]:
    """Which answers were met how often, exercise by exercise; wrong ones by the question that they raise."""
    lines = []
    for lesson, exercise in dict.fromkeys((row.lesson, row.exercise) for row in rows if row.exercise):
        here = [row for row in rows if (row.lesson, row.exercise) == (lesson, exercise)]
        counts = Counter(row.verdict for row in here)
        verdicts = ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common())
        lines.append(f"{lesson}  {exercise}: {verdicts}")
        wrong = Counter(_kind(row) for row in here if row.verdict in ("wrong", ERROR))
        lines += [f"    {n} × {kind}" for kind, n in wrong.most_common()]
    return lines


def _kind(row: Row) -> str:
    """What two learners with the same mistake have in common."""
    return (
        row.question if row.verdict == "wrong" and row.question else re.sub(r"-?\d[\d.]*", "#", row.message)
    )
