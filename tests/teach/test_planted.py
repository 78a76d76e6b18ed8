"""The exercise checks are checked: they accept a lesson's solution and reject each planted wrong one as intended.

A file planted/lesson_NN.py, or planted/capstone.py, holds

    BUGS = [(check, name, wrong function, class or value, phrase), …]      or with a fifth part, the verdict

`check` is a name in pagedkv.teach.checks; `phrase` must stand in what the learner is shown; the verdict is WRONG
unless the fifth part says otherwise. The solution is not planted: it is the one in the notebook, found by running the
notebook and looking at what its check cells gave. `pytest -s -k table` prints check × bug → message.
"""

import ast
import functools
import importlib.util
import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from needs import ROOT, need_module, need_packages

from pagedkv.teach import checks
from pagedkv.teach.checks._core import ACCEPTED, ERROR, NOT_SOLVED, WRONG, Learner

FOLDER = Path(__file__).parent / "planted"
PLANTED = [*sorted(FOLDER.glob("lesson_*.py")), FOLDER / "capstone.py"]


def load(path):
    spec = importlib.util.spec_from_file_location(f"planted_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUGS = [(path.stem, *bug) for path in PLANTED for bug in load(path).BUGS]
CHECKS = list(dict.fromkeys((lesson, check) for lesson, check, *_ in BUGS))
IDS = {"ids": [f"{lesson}-{check}" for lesson, check in CHECKS]}
CODE = [(lesson, check) for lesson, check in CHECKS if getattr(checks, check).wants != "value"]
CODE_IDS = {"ids": [f"{lesson}-{check}" for lesson, check in CODE]}


# ---- wrong answers


@pytest.mark.parametrize(
    ("check", "wrong", "phrase", "verdict"),
    [(check, wrong, phrase, *(verdict or [WRONG])) for _, check, _, wrong, phrase, *verdict in BUGS],
    ids=[f"{lesson}-{check}-{name}".replace(" ", "_") for lesson, check, name, *_ in BUGS],
)
def test_a_planted_bug_is_rejected_for_the_right_reason(check, wrong, phrase, verdict):
    result = getattr(checks, check)(wrong)
    assert (result.verdict, phrase in repr(result)) == (verdict, True), f"{phrase!r} is not in\n{result!r}"


@pytest.mark.parametrize(("lesson", "check"), CHECKS, **IDS)
def test_each_check_has_three_to_eight_bugs(lesson, check):
    assert 3 <= sum(bug[:2] == (lesson, check) for bug in BUGS) <= 8


def test_table():
    lines = []
    for lesson, check, name, wrong, *_ in BUGS:
        result = getattr(checks, check)(wrong)
        message = " / ".join(repr(result).splitlines()[1:])
        lines.append(f"{lesson} | {check} | {name} | {result.verdict} | {' '.join(message.split())}")
    print("\n" + "\n".join(lines))
    assert len(set(lines)) == len(BUGS)


# ---- right answers


def run(path):
    """Run a notebook in this process: what its check cells gave, {check: [result, …]}."""
    need_module("matplotlib", "course").use("Agg")
    need_module("ipywidgets", "course")
    nb = need_module("nbformat", "test").read(path, as_version=4)
    need_packages(nb)
    names = {"__name__": "__main__", "display": print, "get_ipython": lambda: None}
    found = {}
    for cell in nb.cells:
        if cell.cell_type != "code":
            continue
        tree = ast.parse(re.sub(r"^\s*[%!].*$", "", cell.source, flags=re.M))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        value = None
        try:
            exec(compile(tree, str(path), "exec"), names)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), str(path), "eval"), names)
        except Exception:
            if "raises-exception" not in cell.metadata.get("tags", []):
                raise
        if check := cell.metadata.get("pagedkv", {}).get("check"):
            found.setdefault(check, []).append(value)
    return found


@functools.cache
def given(lesson):
    number = lesson.removeprefix("lesson_")
    paths = sorted((ROOT / "notebooks").glob(f"{number}*.ipynb"))
    assert len(paths) == 1, f"{lesson} is planted, but there are {len(paths)} notebooks of that number"
    with redirect_stdout(io.StringIO()):
        return run(paths[0])


@pytest.mark.parametrize(("lesson", "check"), CHECKS, **IDS)
def test_the_solution_in_the_notebook_is_accepted(lesson, check):
    results = given(lesson).get(check)
    assert results, f"no check cell with metadata pagedkv.check = {check!r}"
    assert results[-1].verdict == ACCEPTED, results[-1]


@pytest.mark.parametrize(("lesson", "check"), CHECKS, **IDS)
def test_the_stub_in_the_notebook_is_not_solved_yet(lesson, check):
    *before, _ = given(lesson)[check]
    assert [result.verdict for result in before] == [NOT_SOLVED] * len(before), before


def test_every_planted_lesson_has_stubs():
    for lesson in dict.fromkeys(lesson for lesson, _ in CHECKS):
        assert any(len(results) > 1 for results in given(lesson).values()), lesson


@pytest.mark.parametrize(("lesson", "check"), CODE, **CODE_IDS)
def test_the_package_itself_behaves_as_the_check_demands(lesson, check):
    run_check = getattr(checks, check)
    for part in run_check.own:
        if isinstance(part, type) == (run_check.wants == "class"):
            run_check.__wrapped__(Learner(part, part.__name__))  # raises if it is wrong


# ---- what no check may take for an answer


def as_wanted(check, function):
    """`function` where a function is wanted; where a class is, one whose construction calls it."""
    if getattr(checks, check).wants == "function":
        return function
    return type("Mine", (), {"__init__": lambda self, *args, **kwargs: function(*args, **kwargs)})


def stub(*_args, **_kwargs):
    raise NotImplementedError("your turn: write it")


def fails(*_args, **_kwargs):
    return 1 / 0


@pytest.mark.parametrize(("lesson", "check"), CODE, **CODE_IDS)
def test_a_stub_is_not_solved_yet(lesson, check):
    result = getattr(checks, check)(as_wanted(check, stub))
    assert (result.verdict, result.message) == (NOT_SOLVED, "your turn: write it")


@pytest.mark.parametrize(("lesson", "check"), CHECKS, **IDS)
def test_three_dots_are_not_solved_yet(lesson, check):
    assert getattr(checks, check)(...).verdict == NOT_SOLVED


@pytest.mark.parametrize(("lesson", "check"), CODE, **CODE_IDS)
def test_an_exception_in_the_learners_code_is_called_that(lesson, check):
    result = getattr(checks, check)(as_wanted(check, fails))
    assert result.verdict == ERROR
    assert "ZeroDivisionError" in result.message


class Constant:
    """Has every method; each gives 0."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: 0


@pytest.mark.parametrize("constant", [None, 0, 1, True, "", [], {}, (0, 0)], ids=repr)
@pytest.mark.parametrize(("lesson", "check"), CHECKS, **IDS)
def test_a_constant_is_no_answer(lesson, check, constant):
    wants = getattr(checks, check).wants
    answer = {"value": constant, "class": Constant}.get(wants, lambda *args, **kwargs: constant)
    assert getattr(checks, check)(answer).verdict == WRONG


class EqualToAll:
    """Claims to be whatever is expected."""

    def __eq__(self, other):
        return True

    __hash__ = None


@pytest.mark.parametrize(("lesson", "check"), CHECKS, **IDS)
def test_what_equals_everything_is_no_answer(lesson, check):
    given = EqualToAll()
    wants = getattr(checks, check).wants
    answers = [given, [given] * 2, (given, given), [given] * 4] if wants == "value" else [given]
    for answer in answers:
        submission = (
            answer if wants == "value" else as_wanted(check, lambda *_, _answer=answer, **__: _answer)
        )
        assert getattr(checks, check)(submission).verdict in (WRONG, ERROR)


@pytest.mark.parametrize(("lesson", "check"), CODE, **CODE_IDS)
def test_the_packages_own_part_is_refused_in_every_wrapping(lesson, check):
    run_check = getattr(checks, check)
    for part in run_check.own:
        wrappings = [part] if isinstance(part, type) == (run_check.wants == "class") else []
        if isinstance(part, type) and run_check.wants == "class":
            wrappings += [type("Mine", (part,), {}), wrapped_class(part)]
        elif not isinstance(part, type) and run_check.wants == "function":
            wrappings += [lambda *args, _part=part, **kwargs: _part(*args, **kwargs)]
        for wrapping in wrappings:
            result = run_check(wrapping)
            assert result.verdict == WRONG
            assert "package's" in result.message


def wrapped_class(part):
    """A class that keeps the package's inside and hands every call on."""

    class Mine:
        def __init__(self, *args, **kwargs):
            self.__dict__["inner"] = part(*args, **kwargs)

        def __getattr__(self, name):
            return getattr(self.inner, name)

    return Mine
