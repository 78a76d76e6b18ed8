"""Class copies: nothing of the solutions in them, otherwise the lesson, and they run."""

import copy

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from needs import ROOT, need_module, need_packages

from pagedkv.teach import checks, notebooks, student, variants
from pagedkv.teach.checks import _core

LESSONS = notebooks.lessons(ROOT / "notebooks")
STEM = {"ids": lambda path: path.stem}


def solutions(lesson):
    """The marked solutions of a lesson: {exercise: code}."""
    return {name: cell.source for cell in lesson.cells if (name := student.mark(cell, "solution"))}


@pytest.fixture
def lesson():
    """A small lesson with one exercise by hand and one of code."""
    return new_notebook(
        metadata={"pagedkv": {"title": "Small"}},
        cells=[
            new_markdown_cell("# 03 · Small", id="title"),
            new_code_cell("1", execution_count=1, id="one"),
            new_markdown_cell(
                "### Exercise 1 · By hand\n\n*Easy, 2 minutes.* The slot of 12?\n\n"
                "<details><summary>Hint 1</summary>Count.</details>\n\n[Solution of exercise 1](#solution-1)",
                id="ask",
            ),
            new_code_cell("answer = ...", id="stub", metadata={"pagedkv": {"exercise": "slots_by_hand"}}),
            new_code_cell(
                "checks.slots_by_hand(answer)", id="check", metadata={"pagedkv": {"check": "slots_by_hand"}}
            ),
            new_markdown_cell(
                "<details><summary>Open when you have an answer</summary>\n\nIt is 20.\n\n</details>\n\nGo on.",
                id="folded",
            ),
            new_markdown_cell(
                "Next: more.\n\n## Solutions\n\n**Stop here if you want to try**\n\n### Solution 1\n\n20.",
                id="end",
            ),
            new_code_cell(
                "### BEGIN SOLUTION\nanswer = [20, 24, 31, 0]\n### END SOLUTION",
                id="solution",
                metadata={"pagedkv": {"solution": "slots_by_hand"}},
            ),
        ],
    )


# ---- what a copy holds


def test_a_copy_ends_before_the_solutions_and_names_its_lesson(lesson):
    nb = student.student_copy(lesson, "03_small")
    sources = [cell.source for cell in nb.cells]
    assert sources[1] == 'learner = ""'
    assert sources[2:] == [
        "# 03 · Small",
        "1",
        "### Exercise 1 · By hand\n\n*Easy, 2 minutes.* The slot of 12?\n\n"
        "<details><summary>Hint 1</summary>Count.</details>",
        "answer = ...",
        "checks.slots_by_hand(answer)",
        "Go on.",
        "Next: more.",
    ]
    assert nb.metadata.pagedkv == {"lesson": "03_small"}
    assert all(cell.execution_count is None and not cell.outputs for cell in nb.cells if "outputs" in cell)


def test_the_lesson_itself_stays_as_it_was(lesson):
    before = copy.deepcopy(lesson)
    student.student_copy(lesson, "03_small", 1)
    assert lesson == before


def test_a_variant_asks_otherwise_and_gives_no_hints(lesson):
    nb = student.student_copy(lesson, "03_small", 2)
    by_id = {cell.id: cell.source for cell in nb.cells}
    text, stub = variants.question("slots_by_hand", 2)
    assert by_id["ask"] == f"### Exercise 1 · By hand\n\n{text}"
    assert by_id["stub"] == stub != "answer = ..."
    assert "use_variant(2)" in by_id["learner"]
    assert nb.metadata.pagedkv.variant == 2


def test_a_source_for_nbgrader_has_the_marked_solution_and_a_check_that_fails(lesson):
    nb = student.nbgrader_source(lesson, "03_small")
    by_id = {cell.id: cell for cell in nb.cells}
    stub, check = by_id["stub"], by_id["check"]
    assert stub.source == "answer = ...\n\n\n### BEGIN SOLUTION\nanswer = [20, 24, 31, 0]\n### END SOLUTION"
    assert (stub.metadata.nbgrader.solution, stub.metadata.nbgrader.grade) == (True, False)
    assert check.source == "result = checks.slots_by_hand(answer)\nassert result.ok, result\nresult"
    assert (check.metadata.nbgrader.locked, check.metadata.nbgrader.points) == (True, 1)
    drawn = student.nbgrader_source(lesson, "03_small", 2)
    assert f"answer = {variants.slots(2).slots}" in next(c.source for c in drawn.cells if c.id == "stub")
    ids = [cell.metadata.nbgrader.grade_id for cell in nb.cells if "nbgrader" in cell.metadata]
    assert ids == ["slots_by_hand", "slots_by_hand_check"]


def test_an_exercise_without_a_check_is_an_error(lesson):
    lesson.cells = [cell for cell in lesson.cells if cell.id != "check"]
    with pytest.raises(ValueError, match="'slots_by_hand' in cell 'stub'"):
        student.student_copy(lesson, "03_small")


@pytest.mark.parametrize("variant", [0, 3])
@pytest.mark.parametrize("path", LESSONS, **STEM)
def test_no_solution_is_left_in_a_real_copy(path, variant):
    lesson = notebooks.read(path)
    nb = student.student_copy(lesson, path.stem, variant)
    text = notebooks.dumps(nb)
    assert "SOLUTION" not in text and "Solution" not in text and "#solution" not in text.lower()
    assert "Stop here" not in text or path.stem.startswith("00")  # which explains the words
    for name, code in solutions(lesson).items():
        lines = [line for line in code.splitlines() if line.strip() and "SOLUTION" not in line]
        assert not all(
            any(line == other for cell in nb.cells for other in cell.source.splitlines()) for line in lines
        ), name
    marks = [student.mark(cell, "exercise") for cell in nb.cells]
    assert [mark for mark in marks if mark] == [exercise.name for exercise in student.exercises(lesson)]
    widgets = [cell.source for cell in lesson.cells if "widgets." in cell.source and cell.cell_type == "code"]
    assert all(any(source == cell.source for cell in nb.cells) for source in widgets)


def test_the_committed_copies_are_current():
    assert student.write_copies(ROOT / "notebooks", ROOT / "notebooks/exercises", check=True) == [], (
        "run `make notebooks`"
    )
    names = {path.name for path in (ROOT / "notebooks/exercises").glob("*.ipynb")}
    assert names == {path.name for path in LESSONS}


# ---- variants


@pytest.mark.parametrize("exercise", variants.BY_HAND)
def test_variants_differ_and_their_answers_are_accepted(exercise):
    answers = [variants.answer(exercise, number) for number in range(12)]
    check = getattr(checks, exercise)
    try:
        for number, answer in enumerate(answers):
            checks.use_variant(number)
            assert check(answer).ok, (number, answer)
            assert number == 0 or not check(answers[0]).ok, "the story's answer, which is public"
    finally:
        checks.use_variant(0)
    assert len({repr(answer) for answer in answers}) >= 10
    assert len({variants.question(exercise, number) for number in range(1, 12)}) == 11


def test_a_question_of_a_variant_shows_no_answer():
    for number in range(1, 30):
        assert variants.free_list(number).free != sorted(variants.free_list(number).free)
        assert variants.slots(number).table != sorted(variants.slots(number).table)


@pytest.mark.parametrize("number", [-1, True, 1.5, "1"])
def test_a_variant_is_a_whole_number(number):
    with pytest.raises(ValueError, match="whole number"):
        checks.use_variant(number)
    assert _core.SETTING.variant == 0


# ---- they run


@pytest.mark.parametrize("path", LESSONS, **STEM)
def test_a_copy_runs_as_it_is(path, tmp_path):
    """No cell fails but those that show an error on purpose; no exercise is done, and none is in error."""
    need_module("nbclient", "test")
    lesson = notebooks.read(path)
    need_packages(lesson)
    nb = student.student_copy(lesson, path.stem)
    notebooks.execute(nb, tmp_path)
    meant = {cell.id for cell in lesson.cells if "raises-exception" in cell.metadata.get("tags", [])}
    for cell in nb.cells:
        if cell.cell_type == "code":
            failed = any(output.output_type == "error" for output in cell.outputs)
            assert failed == (cell.id in meant), cell.source
    asked = {exercise.name for exercise in student.exercises(lesson)}
    for cell in nb.cells:
        if student.mark(cell, "check") in asked:
            assert "not solved yet" in cell.outputs[0].data["text/plain"]
