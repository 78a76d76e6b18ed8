"""What a learner has written and a check has accepted, kept for later lessons.

    keep("allocator", MyAllocator)                         # in the lesson that builds it
    mine = parts(allocator=BlockAllocator, plan=AttentionPlan)   # in the capstone
    mine                                                   # written by you: allocator; from the package: plan
    mine.allocator(8)

A part is kept in the session, and as a readable file of Python under ~/.pagedkv (or $PAGEDKV_HOME): its own code, and
what it uses of the notebook.
"""

import ast
import dis
import importlib.util
import inspect
import linecache
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from . import checks
from .checks._core import ACCEPTED, Result

SESSION: dict[str, Any] = {}  # name of the check -> the learner's part


def folder() -> Path:
    """Where parts are kept: $PAGEDKV_HOME/kept, or ~/.pagedkv/kept."""
    return Path(os.environ.get("PAGEDKV_HOME") or Path.home() / ".pagedkv") / "kept"


def keep(name: str, part: Any) -> Result:
    """Keep what the learner wrote, if the check of that name accepts it.

    Args: name: the check's, such as "allocator"; part: the class or function.

    Returns: what the check says; accepted, it says also where the part was kept.

    Raises: ValueError: there is no such check, or it takes an answer found by hand.
    """
    result = _check(name)(part)
    if not result.ok:
        return result
    SESSION[name] = part
    try:
        head = f"# {part.__name__}, as the check {name!r} accepted it."
        text = f"{head}\n\n{source_of(part)}\n\n\nKEPT = {part.__name__}\n"
        folder().mkdir(parents=True, exist_ok=True)
        (folder() / f"{name}.py").write_text(text, "utf-8")
    except (OSError, ValueError) as error:
        return Result(result.exercise, ACCEPTED, f"Kept for this session only: {error}.")
    return Result(result.exercise, ACCEPTED, f"Kept: later lessons find {part.__name__} as {name!r}.")


def kept(name: str) -> Any:
    """The learner's part of this name, or None: from this session, else from its file, checked again."""
    check = _check(name)
    if name not in SESSION:
        path = folder() / f"{name}.py"
        if not path.exists():
            return None
        try:
            module = importlib.util.module_from_spec(
                importlib.util.spec_from_file_location(f"kept_{name}", path)
            )
            exec(compile(path.read_text("utf-8"), str(path), "exec"), vars(module))
            part = module.KEPT
        except Exception:
            return (
                None  # edited since, or it needs what is not installed any more: the package's part will do
            )
        if not check(part).ok:
            return None
        SESSION[name] = part
    return SESSION[name]


def parts(**package: Any) -> "Parts":
    """The learner's own parts where there are any, else the package's.

    Args: package: the name of a check, and what to take if the learner has kept nothing: allocator=BlockAllocator.

    Returns: an object with these names; shown, it says whose each is.
    """
    return Parts(package)


class Parts:
    """Names and what stands for them; see `parts`."""

    def __init__(self, package: dict[str, Any]):
        own = {name: kept(name) for name in package}
        self.written_by_you = [name for name, part in own.items() if part is not None]
        self.from_the_package = [name for name, part in own.items() if part is None]
        vars(self).update({name: part if own[name] is None else own[name] for name, part in package.items()})

    def __repr__(self) -> str:
        def listed(names: list[str]) -> str:
            return ", ".join(names) or "nothing"

        return f"written by you: {listed(self.written_by_you)}; from the package: {listed(self.from_the_package)}"


def forget(name: str) -> None:
    """Forget a part, in the session and on disk; nothing happens if none is kept."""
    _check(name)
    SESSION.pop(name, None)
    (folder() / f"{name}.py").unlink(missing_ok=True)


def _check(name: str) -> Any:
    check = getattr(checks, name, None)
    if getattr(check, "wants", "value") == "value":
        raise ValueError(f"{name!r} is no check of a class or function; try 'allocator'")
    return check


# ---- the code of a part ------------------------------------------------------------------------------------


def source_of(part: Any) -> str:
    """Python that defines a class or function of a notebook: imports, what it uses of the notebook, its own code.

    Raises: ValueError: its code is not to be found, or it uses a variable that cannot be written down.
    """
    imports: dict[str, str] = {}
    pieces: dict[str, str] = {}
    _gather(part.__name__, part, _space_of(part), imports, pieces, set())
    return "\n\n\n".join(filter(None, ["\n".join(imports.values()), *pieces.values()]))


def _gather(name: str, value: Any, space: dict, imports: dict, pieces: dict, seen: set) -> None:
    """Add `name` to the imports or pieces, after everything that it uses."""
    if name in seen:
        return
    seen.add(name)
    home = getattr(value, "__module__", None)
    if isinstance(value, ModuleType):
        imports[name] = f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else "")
    elif (
        home not in (None, "__main__")
        and getattr(sys.modules.get(home), getattr(value, "__name__", ""), None) is value
    ):
        there = value.__name__
        imports[name] = f"from {home} import {there}" + (f" as {name}" if name != there else "")
    elif inspect.isclass(value) or inspect.isfunction(value):
        source = _own_source(value)
        for used in _globals_in(compile(source, name, "exec")):
            if used in space:
                _gather(used, space[used], space, imports, pieces, seen)
        alias = f"\n\n\n{name} = {value.__name__}" if name != value.__name__ else ""
        pieces[name] = source + alias
    else:
        try:
            ast.literal_eval(repr(value))
        except (ValueError, SyntaxError):
            raise ValueError(
                f"it uses the notebook's variable {name}, which is not a plain number or text"
            ) from None
        pieces[name] = f"{name} = {value!r}"


def _name(value: Any) -> str:
    return getattr(value, "__name__", "")


def _globals_in(code: CodeType) -> Iterator[str]:
    """The names that code looks up outside itself."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            yield step.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_in(constant)


def _functions(part: Any) -> list[Any]:
    """A function itself; of a class, the functions in it."""
    found = [part] if inspect.isfunction(part) else [getattr(m, "fget", m) for m in vars(part).values()]
    found = [getattr(function, "__func__", function) for function in found]
    return [function for function in found if inspect.isfunction(function)]


def _space_of(part: Any) -> dict:
    for function in _functions(part):
        return function.__globals__
    return vars(sys.modules[part.__module__])


def _own_source(part: Any) -> str:
    """The statement that defines a class or function, from the cell in which it stands."""
    kind = ast.ClassDef if inspect.isclass(part) else ast.FunctionDef
    places = [function.__code__.co_filename for function in _functions(part)]
    for file in dict.fromkeys([*places, *reversed(linecache.cache)] if inspect.isclass(part) else places):
        text = "".join(linecache.getlines(file))
        try:
            statements = ast.parse(text).body
        except (SyntaxError, ValueError):
            continue
        for statement in reversed(statements):
            if _defines(statement, kind, part.__name__):
                decorators = getattr(statement, "decorator_list", [])
                first = min([statement.lineno, *(d.lineno for d in decorators)])
                return "\n".join(text.splitlines()[first - 1 : statement.end_lineno])
    raise ValueError(f"the code of {part.__name__} is not to be found")


def _defines(statement: ast.stmt, kind: type, name: str) -> bool:
    """Whether a statement makes the class or function of that name; Room = namedtuple("Room", …) makes a class."""
    if isinstance(statement, ast.Assign) and kind is ast.ClassDef:
        return any(isinstance(target, ast.Name) and target.id == name for target in statement.targets)
    return isinstance(statement, kind) and statement.name == name
