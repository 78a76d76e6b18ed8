"""`pagedkv grade`: a folder of submitted notebooks, graded by the package's checks."""

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

from .common import FAILED, complain, number
from .lab import lessons_folder

COLUMNS = ("file", "learner", "lesson", "exercise", "solved", "verdict", "message", "question")

DESCRIPTION = """\
Runs every notebook below DIR (as learners got them from `pagedkv student`) and judges its exercises by the checks
of this package, with hidden cases: other seeds and sizes than the lessons show. Check cells in the notebooks are
not run, so editing or deleting them changes nothing. One line per learner and exercise: solved, not solved yet,
wrong, error in your code, missing (no such cell), doubled (several). Remarks follow.
"""

WARNING = """\
This runs strangers' code. Every notebook has a process of its own with limits on time, memory and output, a
temporary folder and a bare environment, and what it leaves running is ended. But it runs as you: it can read your
files and use your network, and code that wants to cheat can reach into its own process and forge a verdict. So:
  - run it as a user without rights and without files of value, or in a container without network, for example
      docker run --rm --network none --memory 8g --pids-limit 256 -v "$PWD":/work -w /work IMAGE \\
          pagedkv grade submissions --csv grades.csv
  - grade for completion; for credit give each group its own --variant and read what they wrote.
"""


def add(commands) -> None:
    parser = commands.add_parser(
        "grade",
        help="grade a folder of submitted notebooks",
        description=DESCRIPTION,
        epilog=WARNING,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the submissions, also in folders within")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write all lines for the gradebook")
    parser.add_argument(
        "--timeout",
        type=number(1),
        default=30,
        metavar="S",
        help="seconds for one cell or check; a notebook gets ten times that (default 30)",
    )
    parser.add_argument(
        "--jobs", type=number(1), default=2, metavar="N", help="notebooks at once (default 2)"
    )
    parser.add_argument(
        "--memory", type=number(256), default=4096, metavar="MB", help="address space of each (default 4096)"
    )
    parser.add_argument(
        "--variant",
        type=number(0),
        metavar="N",
        help="grade as this variant (default: the one that each notebook says it is a copy of)",
    )
    parser.add_argument(
        "--seed", type=number(1), default=1, metavar="N", help="of the hidden cases (default 1)"
    )
    parser.add_argument(
        "--lessons",
        type=Path,
        metavar="DIR",
        help="where the lessons are (default: the checkout's notebooks)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if sys.platform == "win32":
        return complain("grade", "needs Linux or macOS, for limits and process groups (WSL will do)", FAILED)
    from ..teach import grading

    if not options.folder.is_dir():
        return complain("grade", f"{options.folder} is not a folder", FAILED)
    paths = grading.submissions(options.folder)
    if not paths:
        return complain("grade", f"no notebooks (*.ipynb) in {options.folder}", FAILED)
    lessons = options.lessons or lessons_folder()
    if lessons is None or not any(lessons.glob("*.ipynb")):
        return complain(
            "grade", f"no lessons in {lessons or 'a folder `notebooks`'}: say --lessons DIR", FAILED
        )
    try:
        import IPython  # noqa: F401
        from tqdm import tqdm

        asked = grading.asked_in(lessons)
    except ImportError as error:
        return complain("grade", f'{error.name or error} is missing: pip install "pagedkv[course]"', FAILED)
    try:
        table = options.csv.open("w", newline="", encoding="utf-8") if options.csv else None
    except OSError as error:
        return complain("grade", f"cannot write {options.csv}: {error.strerror}", FAILED)

    settings = grading.Settings(asked, options.timeout, options.memory, options.variant, options.seed)
    writer, rows = csv.writer(table) if table else None, []
    if writer:
        writer.writerow(COLUMNS)
    try:
        graded = grading.grade(paths, settings, folder=options.folder, jobs=options.jobs)
        for found in tqdm(graded, total=len(paths), unit="notebook", disable=None):
            for row in found:
                tqdm.write(str(row))
                if writer:
                    writer.writerow([_cell(row, column) for column in COLUMNS])
            rows += found
    finally:
        if table:
            table.close()
    print("\nThe class:")
    print("\n".join(grading.class_picture(rows)) or "no exercise was found")
    return 0


def _cell(row: Any, column: str) -> str | int:
    """A field of the table; a spreadsheet must not take a stranger's text for a formula."""
    value = getattr(row, column)
    if isinstance(value, bool):
        return int(value)
    return f"'{value}" if value.startswith(("=", "+", "-", "@")) else value
