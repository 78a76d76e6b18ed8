"""What all exercise checks share: run the learner's code, watch it, and say what happened.

A check is a function of a `Learner`, the proxy around what the learner wrote. It calls the proxy as if it were
the real thing and raises `Wrong` at the first answer that is not right. Everything else (a stub, an error in the
learner's code, changed arguments, the package's own part handed in) is noticed here.
"""

from __future__ import annotations

import copy
import functools
import html
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

ACCEPTED = "accepted"
NOT_SOLVED = "not solved yet"
WRONG = "not right yet"
ERROR = "error in your code"
BROKEN = "error in the check"

LAMPS = {ACCEPTED: "✓", NOT_SOLVED: "○", WRONG: "✗", ERROR: "!", BROKEN: "?"}
LIBRARIES = tuple(
    {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
)
EDGES = {ACCEPTED: "#009E73", NOT_SOLVED: "#888888", WRONG: "#D55E00", ERROR: "#D55E00", BROKEN: "#CC79A7"}


@dataclass
class Setting:
    """Which cases the checks take. The zeros are what every reader sees; grading takes others."""

    variant: int = 0  # of the questions by hand; 0 is the story
    hidden: int = 0  # seeds and sizes


SETTING = Setting()


def use_variant(number: int) -> None:
    """Let the checks ask for variant `number` of the questions by hand; 0 is the story."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"a variant is a whole number from 0 on, not {number!r}")
    SETTING.variant = number


def seeded(seed: int) -> np.random.Generator:
    """The random numbers of a check: the same for every reader, others when it grades."""
    return np.random.default_rng([seed, SETTING.hidden] if SETTING.hidden else seed)


def sizes(*visible: int) -> tuple[int, ...]:
    """The sizes of blocks or pools that a check goes through; two more when it grades."""
    if not SETTING.hidden:
        return visible
    others = [size for size in (3, 5, 6, 7, 9, 10, 12) if size not in visible]
    return (*visible, *seeded(0).choice(others, 2, replace=False).tolist())


class Wrong(Exception):
    """A wrong answer: what was seen and expected, a question that points at the idea, the state as a drawing."""

    def __init__(self, seen: str, question: str = "", drawing: Any = None):
        super().__init__(seen)
        self.seen, self.question, self.drawing = seen, question, drawing


class _NotSolved(Exception):
    pass


class _Raised(Exception):
    """The learner's code raised `error` when called as `said`."""

    def __init__(self, error: Exception, said: str):
        super().__init__(said)
        self.error, self.said = error, said

    def __str__(self) -> str:
        lines = traceback.extract_tb(self.error.__traceback__)
        theirs = [line for line in lines if not line.filename.startswith(LIBRARIES)]
        line = (theirs or lines)[-1]  # where the learner's code was, even if NumPy raised
        where = f"\nin {line.name}, line {line.lineno}: {line.line}" if line.line else ""
        return f"{self.said} raised {type(self.error).__name__}: {self.error}{where}"


@dataclass(frozen=True)
class Result:
    """What a check found; the last line of a check cell."""

    exercise: str
    verdict: str
    message: str = ""
    question: str = ""
    drawing: Any = None

    @property
    def ok(self) -> bool:
        return self.verdict == ACCEPTED

    def __repr__(self) -> str:
        lines = [f"{LAMPS[self.verdict]} {self.exercise}: {self.verdict}"]
        lines += [f"  {line}" for line in self.message.splitlines()]
        lines += [f"  {line}" for line in repr(self.drawing).splitlines()] if self.drawing is not None else []
        lines += [f"  Ask yourself: {self.question}"] if self.question else []
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        def line(text: str, style: str = "") -> str:
            return f'<div style="{style}">{html.escape(text)}</div>'

        parts = [line(f"{LAMPS[self.verdict]} {self.exercise}: {self.verdict}", "font-weight:bold")]
        parts += [
            line(text, "white-space:pre-wrap;font-family:monospace") for text in self.message.splitlines()
        ]
        if self.drawing is not None:
            drawn = getattr(self.drawing, "_repr_html_", None)
            parts.append(
                drawn() if drawn else line(repr(self.drawing), "white-space:pre;font-family:monospace")
            )
        parts += [line(f"Ask yourself: {self.question}", "font-style:italic")] if self.question else []
        edge = f"border-left:4px solid {EDGES[self.verdict]};padding:4px 10px;margin:4px 0"
        return f'<div role="status" style="{edge}">{"".join(parts)}</div>'


def check(
    exercise: str, *, own: tuple[Any, ...] = (), forbidden: tuple[Any, ...] = (), wants: str = "function"
) -> Callable:
    """Make a check of a function that takes a `Learner` and returns a line for the accepted result.

    Args: exercise: its name, as the lesson says it; own: parts of the package that are the answer itself, so handing
        them in, subclassing or calling them is refused; forbidden: parts of another shape that may not be called
        either; wants: "function", "class" or "value" (an answer found by hand, `...` while it is missing).
    """

    def decorate(body: Callable[[Learner], str | None]) -> Callable[[Any], Result]:
        @functools.wraps(body)
        def run(submission: Any) -> Result:
            say = functools.partial(Result, exercise)
            try:
                _refuse_misfits(submission, own, wants)
                learner = Learner(
                    submission, getattr(submission, "__name__", exercise), _code_of(own + forbidden)
                )
                told = body(learner)
            except _NotSolved as stub:
                return say(NOT_SOLVED, str(stub))
            except Wrong as wrong:
                return say(WRONG, wrong.seen, wrong.question, wrong.drawing)
            except _Raised as raised:
                return say(ERROR, str(raised), "what did you expect that line to do?")
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                return say(BROKEN, f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})")
            return say(ACCEPTED, told or "")

        run.exercise, run.wants, run.own = exercise, wants, own
        return run

    return decorate


class Learner:
    """The proxy around what the learner wrote: a function, a class, an instance, or a plain `value`.

    Calling it calls the real thing, and notices a stub, an error, changed arguments (plain ones: numbers, lists,
    arrays, …; an object may be there to be changed) and calls of the package's own answer.
    """

    def __init__(self, target: Any, name: str, forbidden: frozenset[tuple[str, str]] = frozenset()):
        self.value = target
        self._name, self._forbidden = name, forbidden

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        said = call_text(self._name, *args, **kwargs)
        before = _plain_copies(args, kwargs)
        used: set[str] = set()
        try:
            with _watching(self._forbidden, used):
                result = self.value(*args, **kwargs)
        except NotImplementedError as stub:
            raise _NotSolved(str(stub) or "a line still raises NotImplementedError") from None
        except Exception as error:
            raise _Raised(error, said) from None
        finally:
            if used:
                raise Wrong(f"{said} calls the package's {min(used)}: write your own, it may be slower.")
        if not same(_plain_copies(args, kwargs), before):
            raise Wrong(
                f"{said} changed its arguments: now it reads {call_text(self._name, *args, **kwargs)}.",
                "who else may still need them as they were?",
            )
        return Learner(result, self._name, self._forbidden) if inspect.isclass(self.value) else result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not hasattr(self.value, name):
            raise Wrong(f"{self._name} has no {name!r}.")
        found = getattr(self.value, name)
        return Learner(found, f"{self._name}.{name}", self._forbidden) if callable(found) else found


def expect(
    call: Learner,
    *args: Any,
    gives: Any,
    question: str = "",
    drawing: Any = None,
    about: str = "",
    **kwargs: Any,
):
    """Call the learner's function and compare; returns what it gave. `about` says what the case is."""
    got = call(*args, **kwargs)
    if not same(got, gives):
        said = call_text(call._name, *args, **kwargs)
        raise Wrong(
            f"{said} gave {show(got)}, expected {show(gives)}{about and f' ({about})'}.", question, drawing
        )
    return got


def expect_refusal(
    call: Learner,
    *args: Any,
    error: type[Exception] | tuple = ValueError,
    question: str = "",
    drawing: Any = None,
) -> Exception:
    """Call the learner's function, which must raise `error`; returns the error."""
    kinds = error if isinstance(error, tuple) else (error,)
    wanted = " or ".join(kind.__name__ for kind in kinds)
    said = call_text(call._name, *args)
    try:
        got = call(*args)
    except _Raised as raised:
        if isinstance(raised.error, kinds):
            return raised.error
        kind = type(raised.error).__name__
        raise Wrong(f"{said} raised {kind}: {raised.error}, expected {wanted}.", question, drawing) from None
    raise Wrong(f"{said} was accepted and gave {show(got)}, expected {wanted}.", question, drawing)


def same(a: Any, b: Any) -> bool:
    """Equal in value: arrays element by element (NaN equals NaN), lists, tuples and arrays of one content alike."""
    if isinstance(a, dict) or isinstance(b, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, np.ndarray | list | tuple) or isinstance(b, np.ndarray | list | tuple):
        try:
            if len(a) != len(b):
                return False
        except TypeError:
            return False
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
            return a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == b.dtype.kind == "f")
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    if not (_is_known(a) and _is_known(b)):
        return a is b  # a class of the learner's own may claim to equal anything
    equal = a == b
    return bool(equal) if np.ndim(equal) == 0 else False


def _is_known(value: Any) -> bool:
    return type(value).__module__ in ("builtins", "numpy", "fractions", "decimal")


def show(value: Any) -> str:
    """A value in at most a line, arrays as lists."""
    if isinstance(value, np.ndarray):
        value = value.tolist() if value.size <= 16 else f"an array of shape {value.shape}"
        return value if isinstance(value, str) else show(value)
    if isinstance(value, np.generic):
        return show(value.item())
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return "[" + ", ".join(map(show, value)) + "]"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}…"


def call_text(name: str, *args: Any, **kwargs: Any) -> str:
    """A call as one would write it."""
    said = [show(value) for value in args] + [f"{key}={show(value)}" for key, value in kwargs.items()]
    return f"{name}({', '.join(said)})"


PLAIN = (int, float, str, bytes, list, tuple, dict, set, np.ndarray, np.generic)


def _plain_copies(args: tuple, kwargs: dict) -> list[Any]:
    return [copy.deepcopy(value) for value in (*args, *kwargs.values()) if isinstance(value, PLAIN)]


def _refuse_misfits(submission: Any, own: tuple[Any, ...], wants: str) -> None:
    if submission is ...:
        raise _NotSolved("replace the three dots by your answer")
    if wants == "value":
        return
    fits = inspect.isclass if wants == "class" else callable
    if not fits(submission):
        raise Wrong(f"this check takes a {wants}, you gave {show(submission)}.")
    for part in own:
        if submission is part:
            raise Wrong(f"{part.__name__} is the package's own: write yours, it may be slower.")
        if inspect.isclass(submission) and inspect.isclass(part) and issubclass(submission, part):
            raise Wrong(
                f"{submission.__name__} inherits from the package's {part.__name__}: begin from nothing."
            )


def _code_of(own: tuple[Any, ...]) -> frozenset[tuple[str, str]]:
    """File and qualified name of each part, to recognise its code when it runs."""
    return frozenset((inspect.getfile(part), part.__qualname__) for part in own)


@contextmanager
def _watching(forbidden: frozenset[tuple[str, str]], used: set[str]):
    """Note in `used` which forbidden parts run meanwhile, however they are reached."""

    def look(frame, event, _argument):
        if event == "call":
            code = frame.f_code
            for file, name in forbidden:
                if code.co_filename == file and (code.co_qualname + ".").startswith(name + "."):
                    used.add(name)

    if not forbidden:
        yield
        return
    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)
