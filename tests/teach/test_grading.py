"""`pagedkv grade` over thirty submissions, most of them broken: each is reported right, and none stops the run."""

import csv
import importlib.util
import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from needs import ROOT, need_module

from pagedkv import cli
from pagedkv.teach import checks, grading, notebooks, student, variants
from pagedkv.teach.checks import _core

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="grading needs limits and process groups")

BYTES = "def kv_bytes_per_token(layers, kv_heads, head_dim, itemsize):\n    "
RIGHT_BYTES = BYTES + "return 2 * layers * kv_heads * head_dim * itemsize"
NO_FACTOR_2 = BYTES + "return layers * kv_heads * head_dim * itemsize"
SLOTS = "def slots(table, positions, block_size):\n    "
RIGHT_SLOTS = SLOTS + "return table[positions // block_size] * block_size + positions % block_size"
BY_HAND = "answer = [20, 24, 31, 0]"
EXERCISES = ("kv_bytes_per_token", "slots_by_hand", "slots")
SOLVED, WRONG, STUB, ERROR = "solved", "wrong", "not solved yet", "error in your code"


def exercise(n, name, variable, stub, solution):
    return [
        new_markdown_cell(f"### Exercise {n} · {name}", id=f"ask-{n}"),
        new_code_cell(stub, id=f"stub-{n}", metadata={"pagedkv": {"exercise": name}}),
        new_code_cell(f"checks.{name}({variable})", id=f"check-{n}", metadata={"pagedkv": {"check": name}}),
    ], [new_code_cell(solution, id=f"solution-{n}", metadata={"pagedkv": {"solution": name}})]


@pytest.fixture(scope="module")
def lessons(tmp_path_factory):
    """A folder with one small lesson of three exercises; it uses the name `slots` itself before the third."""
    parts = [
        exercise(
            1, "kv_bytes_per_token", "kv_bytes_per_token", BYTES + "raise NotImplementedError", RIGHT_BYTES
        ),
        exercise(2, "slots_by_hand", "answer", "answer = ...", BY_HAND),
        exercise(3, "slots", "slots", SLOTS + 'raise NotImplementedError("your turn")', RIGHT_SLOTS),
    ]
    cells = [
        new_markdown_cell("# 03 · Small", id="title"),
        new_code_cell("from pagedkv.teach import checks\n\n" + RIGHT_SLOTS, id="imports"),
        *(cell for asked, _ in parts for cell in asked),
        new_markdown_cell("## Solutions", id="solutions"),
        *(cell for _, solved in parts for cell in solved),
    ]
    folder = tmp_path_factory.mktemp("lessons")
    (folder / "03_small.ipynb").write_text(notebooks.dumps(new_notebook(cells=cells)), "utf-8")
    return folder


def copy_of(
    lessons,
    bytes=RIGHT_BYTES,
    by_hand=BY_HAND,
    slots=RIGHT_SLOTS,
    *,
    first="",
    last="",
    name="Ada",
    variant=0,
):
    """A submission: the copy of the small lesson with these cells; `first` and `last` are cells of the learner's."""
    nb = student.student_copy(notebooks.read(lessons / "03_small.ipynb"), "03_small", variant)
    answers = {"stub-1": bytes, "stub-2": by_hand, "stub-3": slots}
    for cell in nb.cells:
        cell.source = answers.get(cell.id) or cell.source
        if cell.id == "learner":
            cell.source = cell.source.replace('""', repr(name))
    at = next(n for n, cell in enumerate(nb.cells) if cell.id == "ask-1")
    nb.cells[at:at] = [new_code_cell(first)] * bool(first)
    nb.cells += [new_code_cell(last)] * bool(last)
    return nb


def without(nb, *ids):
    nb.cells = [cell for cell in nb.cells if cell.id not in ids]
    return nb


def stripped(nb):
    """As some services hand it back: no metadata, other ids."""
    for number, cell in enumerate(nb.cells):
        cell.metadata, cell.id = {}, f"c{number}"
    del nb.metadata["pagedkv"]
    return nb


def with_check(nb, source):
    next(cell for cell in nb.cells if cell.id == "check-1").source = source
    return nb


def twice(nb, name, second):
    at = next(n for n, cell in enumerate(nb.cells) if student.mark(cell, "exercise") == name)
    again = new_code_cell(second, metadata=dict(nb.cells[at].metadata))
    nb.cells.insert(at + 1, again)
    return nb


PATCH_CHECK = """\
import pagedkv.teach.checks as c
from pagedkv.teach.checks import _core
for name in ("kv_bytes_per_token", "slots", "slots_by_hand"):
    setattr(c, name, lambda answer: _core.Result("mine", "accepted"))
_core.same = lambda a, b: True
_core.Learner.__call__ = lambda self, *args, **kwargs: None
_core.check.__code__ = (lambda exercise, own=(), forbidden=(), wants="": None).__code__
"""
PATCH_NUMPY = """\
import builtins, numpy
numpy.array_equal = numpy.allclose = lambda *a, **k: True
builtins.len = lambda x: 4
"""
FORKS = """\
import os, time
for _ in range(3):
    if os.fork() == 0:
        time.sleep(600)
"""
DAEMON = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True);"
YES = "class Yes:\n    __eq__ = lambda *_: True\n    __len__ = lambda _: 4\nanswer = Yes()"
ALL_SOLVED = dict.fromkeys(EXERCISES, SOLVED)
IMPORTED = "from pagedkv.block_table import slots_of as slots"
WRAPPED = "import pagedkv\n\n" + SLOTS + "return pagedkv.slots_of(table, positions, block_size)"
TWO_CELLS, LATE = "2 cells of this exercise, run in order: solved", "took more than 3 seconds"
LEFT = "left 4 processes behind" if sys.platform == "linux" else ""
GREEDY, EXITS = "\nimport numpy\nnumpy.ones(10**10)", "\nimport os\nos._exit(0)"

FIRST, SECOND, THIRD = EXERCISES
SWALLOWS = """\

    while True:
        try:
            while True: pass
        except BaseException: pass"""
FOR_SHOW = """\
if block_size in (3, 5, 6, 7, 9, 10, 12):
        return positions
    """
KILLS = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(0, signal.SIGKILL)"
PARDON = "import os\nif 'SECRET' in os.environ: raise RuntimeError"


def case(name, make, phrase="", **verdicts):
    """A file's name, how to make what it holds, a phrase that some message has, verdicts other than "solved"."""
    return (
        name,
        make,
        phrase,
        ALL_SOLVED | {dict(zip("abc", EXERCISES, strict=True))[k]: v for k, v in verdicts.items()},
    )


CASES = [
    case("right", lambda f: copy_of(f)),
    case("untouched", lambda f: copy_of(f, None, None, None, name=""), "your turn", a=STUB, b=STUB, c=STUB),
    case("wrong", lambda f: copy_of(f, NO_FACTOR_2), "what two things does a layer keep", a=WRONG),
    case("by_hand", lambda f: copy_of(f, by_hand="answer = [0, 4, 11, 12]"), "are the positions", b=WRONG),
    case("for_show", lambda f: copy_of(f, slots=RIGHT_SLOTS.replace("return", FOR_SHOW + "return")), c=WRONG),
    case("raises", lambda f: copy_of(f, BYTES + "return layers / 0"), "ZeroDivisionError", a=ERROR),
    case("syntax_error", lambda f: copy_of(f, slots="def slots(:"), "SyntaxError", c=ERROR),
    case("other_name", lambda f: copy_of(f, slots="slotz = 1"), "does not define slots", c=STUB),
    case("imported", lambda f: copy_of(f, slots=IMPORTED), "package's own", c=WRONG),
    case("wrapped", lambda f: copy_of(f, slots=WRAPPED), "calls the package's slots_of", c=WRONG),
    case("equal_to_all", lambda f: copy_of(f, by_hand=YES), b=WRONG),
    case("missing", lambda f: without(copy_of(f), "stub-1", "check-1"), "no cell", a="missing"),
    case("no_checks", lambda f: without(copy_of(f, NO_FACTOR_2), "check-1", "check-2", "check-3"), a=WRONG),
    case("edited_check", lambda f: with_check(copy_of(f, NO_FACTOR_2), "print('accepted')"), a=WRONG),
    case("doubled", lambda f: twice(copy_of(f, NO_FACTOR_2), FIRST, RIGHT_BYTES), TWO_CELLS, a="doubled"),
    case("03_small_stripped", lambda f: stripped(copy_of(f, NO_FACTOR_2)), a=WRONG),
    case("loops", lambda f: copy_of(f, BYTES + "while True: pass"), LATE, a=ERROR),
    case("loops_in_a_cell", lambda f: copy_of(f, first="while True: pass"), f"code cell 3: {LATE}"),
    case("loops_in_an_answer", lambda f: copy_of(f, by_hand="while True: pass"), LATE, b=ERROR),
    case("swallows", lambda f: copy_of(f, BYTES + SWALLOWS), LATE, a=ERROR),
    case("prints", lambda f: copy_of(f, first="while True: print('x' * 1_000_000)"), "printed more than"),
    case("takes_memory", lambda f: copy_of(f, RIGHT_BYTES + GREEDY), "Unable to allocate", a=ERROR),
    case("exits", lambda f: copy_of(f, RIGHT_BYTES + EXITS), "ended its process with exit code 0", a=ERROR),
    case("crashes", lambda f: copy_of(f, first="import ctypes\nctypes.string_at(0)"), "process: SIGSEGV"),
    case("kills", lambda f: copy_of(f, first=KILLS), "SIGKILL"),
    case("forks", lambda f: copy_of(f, first=FORKS, last=DAEMON), LEFT),
    case("forks_and_goes_on", lambda f: copy_of(f, NO_FACTOR_2, first="import os\nos.fork()"), a=WRONG),
    case("patches_checks", lambda f: copy_of(f, NO_FACTOR_2, first=PATCH_CHECK), "changed pagedkv", a=WRONG),
    case("patches_numpy", lambda f: copy_of(f, NO_FACTOR_2, first=PATCH_NUMPY), "put back", a=WRONG),
    case("raises_exit", lambda f: copy_of(f, BYTES + "raise SystemExit"), "SystemExit", a=ERROR),
    case("looks_for_secrets", lambda f: copy_of(f, RIGHT_BYTES + "\n" + PARDON)),
    case("no_variant", lambda f: copy_of(f, variant=2), b=WRONG),
    case("variant", lambda f: copy_of(f, variant=2, by_hand=f"answer = {variants.slots(2).slots}")),
    case("formula", lambda f: copy_of(f, name="=HYPERLINK(\x1b[31m)")),
    ("not_json", lambda f: "{" * 100_000, "is not JSON", None),
    ("not_a_notebook", lambda f: json.dumps({"cells": [1]}), "not a notebook", None),
    ("nothing", lambda f: "", "is not JSON", None),
    ("another_course", lambda f: stripped(copy_of(f)), "no exercise of these lessons", None),
]


@pytest.fixture(scope="module")
def graded(lessons, tmp_path_factory):
    """What the command wrote into its table, and what it printed."""
    need_module("IPython", "course")
    need_module("tqdm", "course")
    folder = tmp_path_factory.mktemp("handed in")
    for name, make, *_ in CASES:
        made = make(lessons)
        (folder / name).mkdir()
        text = made if isinstance(made, str) else notebooks.dumps(made)
        (folder / name / f"{name}.ipynb").write_text(text, "utf-8")
    os.mkfifo(folder / "pipe.ipynb")
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / ".ipynb_checkpoints" / "right.ipynb").write_text("{}")
    table, printed = folder / "grades.csv", folder / "printed"
    out, os.environ["SECRET"] = sys.stdout, "the teacher's"
    with printed.open("w", encoding="utf-8") as sys.stdout:
        try:
            options = ["--timeout", "3", "--csv", str(table), "--lessons", str(lessons)]
            assert cli.main(["grade", str(folder), *options]) == 0
        finally:
            sys.stdout = out
            del os.environ["SECRET"]
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file)), printed.read_text("utf-8")


@pytest.mark.parametrize(
    ("name", "phrase", "verdicts"), [(n, p, v) for n, _, p, v in CASES], ids=[n for n, *_ in CASES]
)
def test_a_submission_is_reported_right(graded, name, phrase, verdicts):
    rows = [row for row in graded[0] if row["file"] == f"{name}/{name}.ipynb"]
    found = {row["exercise"]: row["verdict"] for row in rows if row["exercise"]}
    assert found == (verdicts or {}), rows
    assert [row["solved"] for row in rows if row["exercise"]] == [
        str(int(v == SOLVED)) for v in found.values()
    ]
    assert any(phrase in row["message"] + row["question"] for row in rows), rows
    if verdicts is None:
        assert [row["verdict"] for row in rows] == ["unreadable"]


def test_there_are_at_least_thirty_and_nothing_else_is_in_the_table(graded):
    files = {row["file"] for row in graded[0]}
    assert files == {f"{name}/{name}.ipynb" for name, *_ in CASES} | {"pipe.ipynb"}
    assert len(files) >= 30


def test_nothing_is_left_running(graded):
    assert [
        path for path in Path("/proc").glob("[0-9]*/environ") if b"PAGEDKV_GRADE=" in readable(path)
    ] == []


def readable(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_learners_are_named_and_their_text_is_harmless(graded):
    rows, printed = graded
    names = {row["file"]: row["learner"] for row in rows}
    assert names["right/right.ipynb"] == "Ada"
    assert names["untouched/untouched.ipynb"] == ""
    assert names["formula/formula.ipynb"] == "'=HYPERLINK( [31m)"
    assert "\x1b" not in printed
    assert "Ada  03_small  slots  solved\n" in printed
    assert "untouched/untouched.ipynb  03_small  slots  not solved yet: your turn\n" in printed


def test_the_class_picture_counts_verdicts_and_wrong_ideas(graded):
    rows, printed = graded
    picture = printed.split("The class:\n")[1]
    counts = Counter(row["verdict"] for row in rows if row["exercise"] == "kv_bytes_per_token")
    assert f"{counts['wrong']} wrong" in picture.splitlines()[0]
    wrong = sum("what two things" in row["question"] and row["verdict"] == "wrong" for row in rows)
    assert wrong >= 5
    assert f"    {wrong} × what two things does a layer keep of every token?" in picture


def test_a_kind_of_mistake_is_told_without_its_numbers():
    rows = [
        grading.Row(f, f, "01", "fits", "wrong", f"fits({n}) gave {n}.5.") for f, n in (("a", 3), ("b", 14))
    ]
    assert grading.class_picture(rows) == ["01  fits: 2 wrong", "    2 × fits(#) gave #"]


def test_an_interrupt_ends_what_runs(lessons, tmp_path):
    for n in range(3):
        nb = copy_of(lessons, first="import time\ntime.sleep(600)")
        (tmp_path / f"{n}.ipynb").write_text(notebooks.dumps(nb), "utf-8")
    paths = grading.submissions(tmp_path)
    settings = grading.Settings(grading.asked_in(lessons), timeout=600)

    def interrupted():
        yield from paths[:2]
        raise KeyboardInterrupt

    with pytest.raises(
        KeyboardInterrupt
    ):  # while two of them sleep; it would take minutes if they were waited for
        list(grading.grade(interrupted(), settings, folder=tmp_path, jobs=2))
    test_nothing_is_left_running(None)


# ---- the real lessons


def test_pasted_solutions_pass_every_check_with_hidden_cases(tmp_path):
    need_module("IPython", "course")
    folder = ROOT / "notebooks"
    asked = grading.asked_in(folder)
    for stem in asked:
        lesson = notebooks.read(folder / f"{stem}.ipynb")
        solutions = {student.mark(cell, "solution"): cell.source for cell in lesson.cells}
        nb = student.student_copy(lesson, stem)
        for cell in nb.cells:
            if name := student.mark(cell, "exercise"):
                cell.source += f"\n\n\n{solutions[name]}"  # below the stub, which may have helpers
        (tmp_path / f"{stem}.ipynb").write_text(notebooks.dumps(nb), "utf-8")
    settings = grading.Settings(asked, timeout=60)
    graded = grading.grade(grading.submissions(tmp_path), settings, folder=tmp_path, jobs=2)
    rows = [row for rows in graded for row in rows]
    assert "\n".join(str(row) for row in rows if not row.solved) == ""
    assert {(row.lesson, row.exercise) for row in rows} == {
        (stem, e) for stem, es in asked.items() for e, *_ in es
    }


def test_hidden_cases_reject_every_planted_bug(monkeypatch):
    monkeypatch.setattr(_core.SETTING, "hidden", 7)
    for path in sorted((ROOT / "tests/teach/planted").glob("lesson_*.py")):
        spec = importlib.util.spec_from_file_location(f"hidden_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for check, name, wrong, *_ in module.BUGS:
            assert not getattr(checks, check)(wrong).ok, (check, name)
