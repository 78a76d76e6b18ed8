"""Copies of the lessons to work in: without the solutions, without outputs, with a place for a name.

The lessons keep their solutions in a last section, marked as nbgrader wants them. A copy ends before that section;
texts, stubs, checks and widgets stay as they are. Two copies of one lesson are equal, byte by byte.
"""

import ast
import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import notebooks, variants

SOLUTIONS = re.compile(r"^## Solutions?\b.*", re.M | re.S)  # this heading and all that follows
STOP_HERE = re.compile(r"^\W*Stop here if you want to try.*$\n?", re.M)
TO_SOLUTION = re.compile(r"^\[[^\]]*\]\(#solution-\d+\)\s*$", re.M | re.I)
ANSWER = re.compile(r"^<details><summary>Open when you have an answer</summary>.*?</details>\s*", re.M | re.S)


@dataclass(frozen=True)
class Exercise:
    """What a lesson asks for: the name of its check, the variable that the check takes, and its stub's cell."""

    name: str
    variable: str
    cell: str  # id


def mark(cell: Any, kind: str) -> str | None:
    """What a cell is for: its mark of this kind ("exercise", "check", "solution"), if it has one."""
    ours = cell.get("metadata", {}).get("pagedkv", {})
    return ours.get(kind) if isinstance(ours, dict) else None


def exercises(lesson: Any) -> list[Exercise]:
    """The exercises of a lesson, in their order.

    Args:
        lesson: the notebook, as `notebooks.read` gives it.

    Raises:
        ValueError: a stub has no check cell of its name below.
    """
    found = []
    for number, cell in enumerate(lesson.cells):
        if name := mark(cell, "exercise"):
            below = (c for c in lesson.cells[number:] if mark(c, "check") == name)
            calls = re.search(r"\((\w+)\)\s*$", next(below, cell).source)
            if calls is None:
                raise ValueError(f"exercise {name!r} in cell {cell.id!r} has no check cell below it")
            found.append(Exercise(name, calls[1], cell.id))
    return found


def student_copy(lesson: Any, stem: str, variant: int = 0) -> Any:
    """A lesson as a learner gets it.

    Args:
        lesson: the notebook; it stays as it is.
        stem: the lesson's file name without `.ipynb`.
        variant: 0 for the story's numbers; others replace the questions by hand, see `variants`.

    Returns: a new notebook in the stored form, without outputs.
    """
    nb = copy.deepcopy(lesson)
    asked = exercises(nb)
    nb.metadata["pagedkv"] = {"lesson": stem, **({"variant": variant} if variant else {})}
    nb.cells = _before_the_solutions(nb.cells)
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        else:
            cell.source = ANSWER.sub("", TO_SOLUTION.sub("", cell.source)).strip()
        if mark(cell, "exercise") or mark(cell, "check"):
            cell.metadata["tags"] = [
                "raises-exception"
            ]  # "run all" goes on after an exercise that is not done
    for exercise in asked if variant else []:
        _ask_otherwise(nb.cells, exercise, variant)
    if asked:
        nb.cells[:0] = _name_field(type(nb), stem, variant)
    notebooks.normalise(nb)
    return nb


def nbgrader_source(lesson: Any, stem: str, variant: int = 0) -> Any:
    """A lesson as nbgrader's `source` folder wants it: each stub followed by its solution, each check worth a point.

    `nbgrader generate_assignment` takes the solutions out again.

    Args: as `student_copy`.
    """
    nb = student_copy(lesson, stem, variant)
    solutions = {mark(cell, "solution"): cell.source for cell in lesson.cells}
    asked = {exercise.name for exercise in exercises(lesson)}
    for cell in nb.cells:
        stub, check = mark(cell, "exercise"), mark(cell, "check")
        if stub:
            answer = variants.answer(stub, variant) if variant else None
            by_hand = f"### BEGIN SOLUTION\nanswer = {answer!r}\n### END SOLUTION"
            cell.source += f"\n\n\n{by_hand if answer else solutions[stub]}"
            cell.metadata["nbgrader"] = _nbgrader(stub, grade=False)
        elif check in asked:
            cell.source = f"result = {cell.source.strip()}\nassert result.ok, result\nresult"
            cell.metadata["nbgrader"] = _nbgrader(f"{check}_check", grade=True) | {"points": 1}
            asked.remove(check)  # a second check cell of the same exercise would count twice
    return nb


def _nbgrader(grade_id: str, *, grade: bool) -> dict[str, Any]:
    return {
        "grade": grade,
        "grade_id": grade_id,
        "locked": grade,
        "schema_version": 3,
        "solution": not grade,
        "task": False,
    }


def write_copies(
    lessons: Path,
    out: Path,
    *,
    variant: int = 0,
    check: bool = False,
    over: bool = True,
    make: Callable[[Any, str, int], Any] = student_copy,
) -> list[Path]:
    """Write the copy of every lesson of a folder; files that hold it already are left alone.

    Args:
        lessons: the folder of the lessons.
        out: where the copies go, under the lessons' file names; it is made if need be.
        variant: see `student_copy`.
        check: write nothing.
        over: replace copies that differ; if not, one such file is a FileExistsError and nothing is written.
        make: `student_copy`, or `nbgrader_source`.

    Returns: the files that were written, or would be.
    """
    texts = {}
    for path in notebooks.lessons(lessons):
        text = notebooks.dumps(make(notebooks.read(path), path.stem, variant))
        copied = out / path.name
        if not copied.exists() or copied.read_text("utf-8") != text:
            texts[copied] = text
    worked_in = [path.name for path in texts if path.exists()]
    if worked_in and not over:
        raise FileExistsError(f"{', '.join(worked_in)} in {out} may hold somebody's work")
    for path, text in texts.items() if not check else ():
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8", newline="\n")
    return list(texts)


def name_in(source: str) -> str:
    """What a learner wrote into the name field, or ""; the code is read, not run."""
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError):
        return ""
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id="learner")], value=ast.Constant(value=str(name))):
                return " ".join(name.split())
    return ""


def _before_the_solutions(cells: list[Any]) -> list[Any]:
    kept = []
    for cell in cells:
        kept.append(cell)
        if cell.cell_type == "markdown" and SOLUTIONS.search(cell.source):
            cell.source = SOLUTIONS.sub("", cell.source)
            break
    for cell in kept:
        if cell.cell_type == "markdown":
            cell.source = STOP_HERE.sub("", cell.source)
    return [cell for cell in kept if cell.source.strip()]


def _ask_otherwise(cells: list[Any], exercise: Exercise, variant: int) -> None:
    """Put the variant's question, without hints, below the exercise's heading."""
    question = variants.question(exercise.name, variant)
    if question is None:
        return
    number = next(number for number, cell in enumerate(cells) if cell.id == exercise.cell)
    text, cells[number].source = question
    above = cells[number - 1]
    upto = re.match(r".*^#+ Exercise[^\n]*", above.source, re.M | re.S)
    if upto is None:
        raise ValueError(f"no heading of exercise {exercise.name!r} above cell {exercise.cell!r}")
    above.source = f"{upto[0]}\n\n{text}"


def _name_field(node: type, stem: str, variant: int) -> list[Any]:
    text = (
        f"*An exercise copy of `notebooks/{stem}.ipynb`: the solutions, last in the lesson, are left out, and you "
        "run the cells yourself. Write your name between the quotes.*"
    )
    lines = ['learner = ""']
    if variant:
        text += f"\n\n*Variant {variant}: the questions by hand have numbers of their own.*"
        lines += ["", "from pagedkv.teach import checks", "", f"checks.use_variant({variant})"]
    marks = {"pagedkv": {"learner": True}}
    return [
        node(cell_type="markdown", id="exercise-copy", metadata={}, source=text),
        node(
            cell_type="code",
            id="learner",
            metadata=marks,
            source="\n".join(lines),
            outputs=[],
            execution_count=None,
        ),
    ]
