"""`keep`: accepted parts come back in a later session, as code of their own."""

import ast
import json
import subprocess
import sys

import numpy as np
import pytest
from needs import ROOT, need_module

from pagedkv import BlockAllocator, slots_of
from pagedkv.teach import keep, notebooks, student
from pagedkv.teach.checks._core import ACCEPTED, WRONG


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDKV_HOME", str(tmp_path))
    monkeypatch.setattr(keep, "SESSION", {})
    return tmp_path


CELLS = """\
import numpy as np
from collections import Counter as Times
import pagedkv

FIRST = 0
LATER = {"a": [1, 2]}
pool = object()


def before(table, position, block_size):
    pool = position // block_size + FIRST
    return np.asarray(table)[pool]


def slots(table, positions, block_size):
    Times([LATER["a"][0]])
    return before(table, positions, block_size) * block_size + positions % block_size
"""


def run_in_shell(home, *cells):
    """Run cells as a kernel does, in a process of its own; the text of what the last one gives."""
    script = (
        "import json, sys\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance(user_ns={'__name__': '__main__'})\n"
        "for cell in json.load(sys.stdin):\n"
        "    done = shell.run_cell(cell)\n"
        "done.raise_error()\n"
        "print('RESULT', repr(done.result))\n"
    )
    environment = {"PAGEDKV_HOME": str(home), "HOME": str(home), "IPYTHONDIR": str(home), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("RESULT ")[1]


def test_a_function_comes_back_in_another_session_with_what_it_uses(home):
    need_module("IPython", "course")
    keeping = ("from pagedkv.teach.keep import keep", "keep('slots', slots)")
    assert "Kept: later lessons find slots as 'slots'" in run_in_shell(home, CELLS, *keeping)
    text = (home / "kept" / "slots.py").read_text("utf-8")
    defined = [getattr(s, "name", None) or ast.unparse(s) for s in ast.parse(text).body]
    assert sorted(defined) == sorted([
        "import numpy as np",
        "from collections import Counter as Times",
        "FIRST = 0",
        "LATER = {'a': [1, 2]}",
        "before",
        "slots",
        "KEPT = slots",
    ])  # fmt: skip
    assert keep.kept("slots")([5, 6], np.array([0, 7]), 4).tolist() == [20, 27]


@pytest.mark.parametrize(
    ("stem", "check", "name"),
    [
        ("02_block_allocator", "allocator", "MyAllocator"),
        ("03_block_tables", "tables", "MyTables"),
        ("04_copy_on_write", "manager", "MyManager"),
        ("05_paged_decode", "plan", "MyPlan"),
    ],
)
def test_the_class_that_a_lesson_ends_with_is_kept_with_its_helpers(home, stem, check, name):
    need_module("IPython", "course")
    lesson = notebooks.read(ROOT / "notebooks" / f"{stem}.ipynb")
    code = [cell for cell in lesson.cells if cell.cell_type == "code"]
    upto = next(n for n, cell in enumerate(code) if student.mark(cell, "check") == check)
    keeping = ("from pagedkv.teach.keep import keep", f"keep({check!r}, {name})")
    told = run_in_shell(home, *(cell.source for cell in code[:upto]), *keeping)
    assert f"Kept: later lessons find {name}" in told
    assert any(keeping[1] in cell.source.replace('"', "'") for cell in lesson.cells), "the lesson says so"
    mine = keep.parts(**{check: BlockAllocator, "slots": slots_of})
    assert repr(mine) == f"written by you: {check}; from the package: slots"
    assert mine.slots is slots_of
    assert getattr(mine, check).__name__ == name


def test_what_is_not_accepted_is_not_kept(home):
    result = keep.keep("slots", lambda table, positions, block_size: positions)
    assert result.verdict == WRONG
    assert keep.kept("slots") is None
    assert not list(home.iterdir())


def test_code_that_cannot_be_written_down_is_kept_for_the_session(home):
    names = {}
    code = "def new_blocks(length, more, size):\n    return -(-(length + more) // size) - -(-length // size)"
    exec(code, names)  # in no file and in no cell
    result = keep.keep("new_blocks", names["new_blocks"])
    assert result.verdict == ACCEPTED
    assert "for this session only" in result.message
    assert repr(keep.parts(new_blocks=None)) == "written by you: new_blocks; from the package: nothing"


@pytest.mark.parametrize("text", ["KEPT = lambda *_: 0", "not python", "", "1 / 0"])
def test_a_file_that_is_not_right_any_more_is_not_used(home, text):
    (home / "kept").mkdir()
    (home / "kept" / "slots.py").write_text(text)
    assert keep.kept("slots") is None
    assert repr(keep.parts(slots=None)) == "written by you: nothing; from the package: slots"


def test_a_part_can_be_forgotten(home):
    (home / "kept").mkdir()
    (home / "kept" / "slots.py").write_text("KEPT = 1")
    keep.SESSION["slots"] = 1
    keep.forget("slots")
    keep.forget("slots")
    assert keep.kept("slots") is None


@pytest.mark.parametrize("name", ["nonsense", "free_list", "../../x", "use_variant"])
def test_only_checks_of_code_have_parts(name):
    for call in (lambda: keep.keep(name, len), lambda: keep.kept(name), lambda: keep.forget(name)):
        with pytest.raises(ValueError, match="no check of a class or function"):
            call()
