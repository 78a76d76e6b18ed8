"""Runs one submitted notebook in this process and reports exercise by exercise; `grading` starts it.

Whatever happens here is a stranger's code at work, so nothing in this process is trusted but a report, written
line by line: what begins, what came out. If the process dies or hangs, the last line says where.

The checks are the package's own. Before each of them, everything that the notebook changed in the package, in NumPy
and in Python's builtins is put back. That defeats careless and lazy tricks, not a determined one: code that runs
in the same process can reach anything.
"""

import ast
import inspect
import io
import json
import os
import re
import signal
import stat
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from . import checks
from .checks import _core
from .student import mark, name_in

MOST_BYTES = 64 << 20  # of a notebook file, and of a file that it writes
MOST_PRINTED = 10_000_000  # characters
SEALED = ("builtins", "copy", "inspect", "numpy", "numpy.linalg", "numpy.random")  # and all of pagedkv
LAZY = {"__annotations__", "__slotnames__", "__warningregistry__"}  # which Python itself fills in later
VERDICTS = {_core.ACCEPTED: "solved", _core.WRONG: "wrong", _core.BROKEN: "error in the check"}
NOT_SOLVED, ERROR, MISSING, DOUBLED = _core.NOT_SOLVED, _core.ERROR, "missing", "doubled"
CHECK_CALL = re.compile(r"^\s*checks\.(\w+)\(\w+\)\s*$")


class Unreadable(Exception):
    """The file is no submission; the message says why."""


class TookTooLong(BaseException):
    """Raised by the clock into the notebook's code; no Exception, so that `except Exception` lets it pass."""


class TooMuchOutput(Exception):
    """Raised by `print`."""


def main() -> None:
    """Read the job from standard input, run the notebook, write the report."""
    job = json.load(sys.stdin)
    report = Report(job["report"])
    try:
        judge = Judge(job, report)
    except Unreadable as error:
        report(unreadable=str(error))
    else:
        judge.run()
    report(done=True)


class Report:
    """Appends lines of JSON to a file, for this process alone: a forked child that goes on here ends instead."""

    def __init__(self, path: str):
        self.file, self.process = open(path, "a", encoding="utf-8"), os.getpid()  # noqa: SIM115

    def __call__(self, **facts: Any) -> None:
        if os.getpid() != self.process:
            os._exit(0)
        print(json.dumps(facts), file=self.file, flush=True)


# ---- the submission ----------------------------------------------------------------------------------------


def cells_of(path: Path) -> tuple[list[dict], dict]:
    """The code cells of a notebook file, as {"id", "source", "metadata"}, and what its metadata says of the course.

    Raises: Unreadable: it is no notebook, or larger than 64 MB.
    """
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > MOST_BYTES:
            raise Unreadable(f"no plain file of at most {MOST_BYTES >> 20} MB")
        nb = json.loads(path.read_text("utf-8-sig"))
        cells = [
            {
                "id": str(cell.get("id", "")),
                "source": "".join(cell["source"]),
                "metadata": cell.get("metadata") if isinstance(cell.get("metadata"), dict) else {},
            }
            for cell in nb["cells"]
            if cell["cell_type"] == "code"
        ]
        ours = nb.get("metadata", {}).get("pagedkv", {})
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise Unreadable("is not JSON") from None
    except (KeyError, TypeError, AttributeError):
        raise Unreadable("is not a notebook of format 4") from None
    return cells, ours if isinstance(ours, dict) else {}


def lesson_of(path: Path, cells: list[dict], ours: dict, lessons: dict[str, list]) -> str:
    """Which lesson was handed in: as its metadata says, else most of its exercises, else its file name."""
    if ours.get("lesson") in lessons:
        return ours["lesson"]
    of = {name: stem for stem, asked in lessons.items() for name, _, _ in asked}
    found = Counter(of[name] for cell in cells if (name := mark(cell, "exercise")) in of)
    if found:
        return found.most_common(1)[0][0]
    for stem in lessons:
        if path.stem.startswith(stem):
            return stem
    raise Unreadable("has no exercise of these lessons")


def stubs_of(cells: list[dict], name: str, variable: str, cell_id: str) -> list[int]:
    """Where an exercise is answered: the cells that bear its mark, else its id, else bind the name above a check."""
    if marked := [n for n, cell in enumerate(cells) if mark(cell, "exercise") == name]:
        return marked
    if same_id := [n for n, cell in enumerate(cells) if cell["id"] == cell_id]:
        return same_id
    checked = (n for n, cell in enumerate(cells) if is_check(cell) == name)
    return [n - 1 for n in checked if n and variable in bound_names(cells[n - 1]["source"])][:1]


def is_check(cell: dict) -> str | None:
    """The exercise that a check cell checks: by its mark, or as it is written."""
    call = CHECK_CALL.match(cell["source"])
    return mark(cell, "check") or (call[1] if call else None)


def bound_names(source: str) -> set[str]:
    """What a cell defines at its top level."""
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError):
        return set()
    names = {s.name for s in statements if isinstance(s, ast.FunctionDef | ast.ClassDef)}
    assigned = (target for s in statements if isinstance(s, ast.Assign) for target in s.targets)
    return names | {target.id for target in assigned if isinstance(target, ast.Name)}


# ---- run and judge -----------------------------------------------------------------------------------------


class Judge:
    """One submission: its cells in order, its exercises where their check stands.

    Args: job: notebook, lessons {stem: [[exercise, variable, cell id], …]}, variant (None: as the notebook says),
        seed, timeout (seconds a cell), memory (MB), skip (numbers of cells), settled (names of exercises).
    """

    def __init__(self, job: dict, report: Report):
        self.report, self.timeout = report, job["timeout"]
        self.skip, self.settled = set(job["skip"]), set(job["settled"])
        path = Path(job["notebook"])
        self.cells, ours = cells_of(path)
        lesson = lesson_of(path, self.cells, ours, job["lessons"])
        named = (name_in(cell["source"]) for cell in self.cells if mark(cell, "learner"))
        report(lesson=lesson, learner=next((name for name in named if name), ""))

        made_for = ours.get("variant", 0)
        made_for = made_for if isinstance(made_for, int) and made_for >= 0 else 0
        self.variant = made_for if job["variant"] is None else job["variant"]
        if self.variant != made_for:
            report(note=f"is a copy of variant {made_for}, graded as variant {self.variant}")
        self.seed = job["seed"]

        self.asked = {}  # where it is judged -> exercise, variable, its cells
        for name, variable, cell_id in job["lessons"][lesson]:
            stubs = stubs_of(self.cells, name, variable, cell_id)
            if not stubs:
                report(exercise=name, verdict=MISSING, message="no cell of this exercise", question="")
                continue
            below = range(stubs[-1] + 1, len(self.cells))
            place = next((n for n in below if is_check(self.cells[n]) == name), stubs[-1])
            self.asked[place] = (name, variable, stubs)
        self.exercise_of = {n: name for name, _, stubs in self.asked.values() for n in stubs}
        self.variable_of = {name: variable for name, variable, _ in self.asked.values()}
        self.shell = quiet_shell()
        self.seal = Seal()
        bound(job["memory"])

    def run(self) -> None:
        """Every cell, and every check where it is due."""
        space, failed, before = self.shell.user_ns, {}, {}
        for number, cell in enumerate(self.cells):
            name = self.exercise_of.get(number)
            if name and name not in before:  # the lesson may have defined it already, for itself
                before[name] = space.pop(self.variable_of[name], None)
            if number not in self.skip and not mark(cell, "check"):
                self.report(begin=number, exercise=name)
                error = self.run_cell(cell["source"])
                if name:
                    failed[name] = error
                elif isinstance(error, TookTooLong | TooMuchOutput):
                    self.report(note=f"code cell {number + 1}: {error}")
            if number in self.asked:
                changed = self.seal.restore()  # before anything else: it may be the builtins
                name, variable, stubs = self.asked[number]
                if changed:
                    self.report(note=f"changed {', '.join(changed[:3])}{' …' * (len(changed) > 3)}; put back")
                if name not in self.settled:
                    self.report(begin=number, exercise=name)
                    self.judge(name, space.get(variable, ...), variable, failed.get(name), len(stubs))
                if variable not in space and before[name] is not None:
                    space[variable] = before[name]

    def run_cell(self, source: str) -> BaseException | None:
        """Run one cell; what it raised."""
        with clock(self.timeout) as late:
            result = self.shell.run_cell(source, store_history=False)
            return result.error_before_exec or result.error_in_exec
        return late[0]

    def judge(self, name: str, answer: Any, variable: str, error: BaseException | None, times: int) -> None:
        """Report on one exercise: what its cell raised, else what the package's check says."""
        if isinstance(error, NotImplementedError):
            verdict, message, question = NOT_SOLVED, str(error), ""
        elif error is not None:
            verdict, message, question = ERROR, f"{type(error).__name__}: {_text(error)}", ""
        elif answer is ... and getattr(checks, name).wants != "value":
            verdict, message, question = NOT_SOLVED, f"the cell does not define {variable}", ""
        else:
            verdict, message, question = self.checked(name, answer)
        if times > 1:
            message = f"{times} cells of this exercise, run in order: {verdict}. {message}"
            verdict = DOUBLED
        self.report(exercise=name, verdict=verdict, message=message, question=question)

    def checked(self, name: str, answer: Any) -> tuple[str, str, str]:
        """What the check says, of hidden cases."""
        _core.SETTING.variant, _core.SETTING.hidden = self.variant, self.seed
        with clock(self.timeout) as late, np.errstate(all="warn", under="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                result = getattr(checks, name)(answer)
            except TookTooLong:
                raise
            except BaseException as error:  # SystemExit and its like, or a class that was made to confuse
                return ERROR, f"{type(error).__name__}: {_text(error)}", ""
            return VERDICTS.get(result.verdict, result.verdict), result.message, result.question
        return ERROR, str(late[0]), ""


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return "(an error that cannot say what it is)"


@contextmanager
def clock(seconds: float) -> Iterator[list[TookTooLong]]:
    """Raise TookTooLong into the block after some seconds, and end the block there; the list then holds it."""
    late: list[TookTooLong] = []

    def ring(*_: Any) -> None:
        raise TookTooLong(f"took more than {seconds:g} seconds")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield late
    except TookTooLong as error:
        late.append(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


# ---- the process -------------------------------------------------------------------------------------------


class Sink(io.TextIOBase):
    """Takes what is printed and forgets it; too much of it is an error."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.taken = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.taken += len(text)
        if self.taken > MOST_PRINTED:
            self.taken = 0
            raise TooMuchOutput(f"printed more than {MOST_PRINTED // 1_000_000} MB")
        return len(text)


def quiet_shell() -> Any:
    """What runs the cells of a Jupyter kernel, without the kernel: magics and `await` work, nothing is shown."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config, user_ns={"__name__": "__main__"})
    shell.showtraceback = shell.showsyntaxerror = lambda *_, **__: None
    sys.stdout = sys.stderr = Sink()
    return shell


def bound(memory: int) -> None:
    """Limit this process: address space in MB, and the size of a file that it writes."""
    import resource

    for what, most in [
        (resource.RLIMIT_AS, memory << 20),
        (resource.RLIMIT_FSIZE, MOST_BYTES),
        (resource.RLIMIT_CORE, 0),
    ]:
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with suppress(ValueError, OSError):  # macOS knows the limit on address space and does not set it
            resource.setrlimit(what, (most, most))


class Seal:
    """Remembers the package, NumPy and the builtins as they are, and puts back what somebody changed since."""

    def __init__(self) -> None:
        self.names: list[tuple[str, Any, dict]] = []  # what it is called, a module or class, its names
        self.code: list[tuple[str, Any, tuple]] = []  # what it is called, a function, what makes it up
        for module_name, module in list(sys.modules.items()):
            ours = module_name.split(".")[0] == "pagedkv"
            if module is None or not (ours or module_name in SEALED):
                continue
            self.names.append((module_name, module, dict(vars(module))))
            for name, part in list(vars(module).items()) if ours else []:
                if getattr(part, "__module__", None) != module_name:
                    continue
                if inspect.isclass(part):
                    self.names.append((f"{module_name}.{name}", part, dict(vars(part))))
                    for method_name, method in vars(part).items():
                        self._remember(f"{module_name}.{name}.{method_name}", method)
                self._remember(f"{module_name}.{name}", part)

    def _remember(self, name: str, function: Any) -> None:
        function = getattr(function, "__func__", function)
        while function is not None:  # a decorated one, and what it decorates
            if inspect.isfunction(function):
                self.code.append((name, function, _made_of(function)))
            function = getattr(function, "__wrapped__", None)

    def restore(self) -> list[str]:
        """Put everything back; the names of what was changed."""
        changed = []
        for name, owner, names in self.names:
            now = dict(vars(owner))
            for key, part in names.items():
                if (new := now.get(key, self)) is not part and key not in LAZY:
                    _attempt(setattr, owner, key, part)
                    if getattr(new, "__module__", None) != "torch.package.package_importer":
                        changed.append(f"{name}.{key}")  # torch has an inspect.getfile of its own
            if inspect.isclass(owner):
                for key in now.keys() - names.keys() - LAZY:
                    _attempt(delattr, owner, key)
                    changed.append(f"{name}.{key}")
        for name, function, made_of in self.code:
            if any(a is not b for a, b in zip(_made_of(function), made_of, strict=True)):
                function.__code__, function.__defaults__, function.__kwdefaults__ = made_of
                changed.append(name)
        sys.setprofile(None)
        sys.settrace(None)
        return changed


def _made_of(function: Any) -> tuple:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _attempt(call: Callable, *args: Any) -> None:
    with suppress(AttributeError, TypeError):  # read-only, so nobody changed it for good
        call(*args)


if __name__ == "__main__":
    main()
