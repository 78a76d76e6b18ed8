"""The package imports NumPy and the standard library only, and its rooms import one way."""

import ast
import subprocess
import sys

import pytest
from needs import ROOT

PACKAGE = ROOT / "pagedkv"

# In reading order: a room may import those before it at module level, never those behind.
ROOMS = [
    "allocator",
    "block_table",
    "storage",
    "prefix_cache",
    "snapshot",
    "manager",
    "attention",
    "tiles",
    "decode",
    "cache",
    "lm",
    "serving",
    "store",
    "metrics",
    "coordinator",
    "bench",
    "integrations",
    "teach",
    "cli",
    "__main__",
]

# Showing oneself as a cell's last line needs teach's drawings: these functions import it when they are called.
DRAW_THEMSELVES = {
    "allocator": {"__repr__", "_repr_html_"},
    "manager": {"__repr__", "_repr_html_"},
    "cache": {"__repr__", "_repr_html_"},
}

LOADED = "import sys, pagedkv; print(*sorted(n for n, m in sys.modules.items() if n == n.split('.')[0]))"


def modules():
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(node, path):
    """The rooms of pagedkv that an import statement names; `path` is the file it stands in."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif node.level == 0:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        package = ("pagedkv", *path.relative_to(PACKAGE).parts[:-1])
        base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
        names = [f"{base}.{alias.name}" for alias in node.names]
    found = set()
    for name in names:
        parts = name.split(".")
        if parts[0] == "pagedkv":
            found.add(parts[1] if len(parts) > 1 else "")
    return found


def imports(source, path):
    """Yield (room, function or None): each import of a room, and the function it is made in."""

    def visit(node, function):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                for room in imported_rooms(child, path):
                    yield room, function
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from visit(child, function or child.name)
            else:
                yield from visit(child, function)

    yield from visit(ast.parse(source), None)


def wrong_imports(source, path):
    """What breaks the one-way rule in a file, as sentences."""
    room, wrong = room_of(path), []
    order = {name: place for place, name in enumerate(ROOMS)}
    for other, function in imports(source, path):
        if other not in order:  # `from pagedkv import Name` loads the whole package: the teaching end may
            if order[room] < order["serving"]:
                wrong.append(f"{room} imports pagedkv.{other}; name the module instead")
        elif order[other] > order[room] and not (
            other == "teach" and function in DRAW_THEMSELVES.get(room, ())
        ):
            wrong.append(f"{room} imports {other} from further down the list (in {function or 'the module'})")
    return wrong


def test_every_module_has_its_place_in_the_list():
    assert {room_of(path) for path in modules()} <= set(ROOMS)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    assert wrong_imports(path.read_text("utf-8"), path) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("allocator.py", "from .manager import BlockManager"),
        ("allocator.py", "from . import manager"),
        ("allocator.py", "import pagedkv.manager"),
        ("allocator.py", "from pagedkv import BlockManager"),
        ("storage.py", "def f():\n    from .cache import PagedKVCache"),
        ("storage.py", "def f():\n    from .teach import pages"),
        ("lm/model.py", "from ..teach import pages"),
        ("manager.py", "if True:\n    from .teach import pages"),
    ],
)
def test_the_rule_sees_an_import_up_the_list(file, line):
    assert wrong_imports(line, PACKAGE / file)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("manager.py", "from .allocator import BlockAllocator"),
        ("lm/model.py", "from . import sampling\nfrom ..cache import PagedKVCache"),
        ("cache.py", "class C:\n    def __repr__(self):\n        from .teach import pages"),
    ],
)
def test_the_rule_allows_an_import_down_the_list(file, line):
    assert wrong_imports(line, PACKAGE / file) == []


def test_importing_pagedkv_loads_numpy_and_the_standard_library_only():
    before = subprocess.run(
        [sys.executable, "-c", LOADED.replace(", pagedkv", "")], capture_output=True, text=True, check=True
    )
    after = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    loaded = set(after.stdout.split()) - set(before.stdout.split())
    foreign = {name for name in loaded if name not in sys.stdlib_module_names and not name.startswith("_")}
    assert foreign == {"numpy", "pagedkv"}
