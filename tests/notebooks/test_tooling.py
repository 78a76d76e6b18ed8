"""`make notebooks` stores a lesson in one form, whatever the run; nbval then compares what a reader sees."""

import base64
import io
import os
import subprocess
import sys

import nbformat
import numpy as np
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from needs import ROOT

from pagedkv.teach import notebooks

WIDGET = """\
import ipywidgets


class Player(ipywidgets.VBox):
    def _repr_mimebundle_(self, **options):
        live = super()._repr_mimebundle_(**options)
        return {**live, "text/plain": "frame 0", "text/html": "<b>frame 0</b>"}


Player([ipywidgets.IntSlider(description="step")])
"""

FACTS = {
    "title": "Start here",
    "part": "I Pages",
    "template": "use",
    "needs": [],
    "minutes": [10, 20],
    "goals": ["name | read a block"],
    "extras": [],
}


@pytest.fixture
def course(tmp_path):
    """A checkout with one small lesson, not yet run."""
    cells = [
        new_markdown_cell("# 00 · Start here\n\n<!-- course map -->\n<!-- /course map -->"),
        new_code_cell(WIDGET),
        new_code_cell("import sys\nfor i in range(3):\n    print(i, flush=True)"),
        new_code_cell("1 / 0", metadata={"tags": ["raises-exception"], "scrolled": True}),
        new_code_cell(
            "import time\ntime.time()", metadata={"tags": ["nbval-ignore-output"], "reason": "the clock"}
        ),
        new_code_cell("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"),
        new_code_cell("from pathlib import Path\nprint(Path.cwd().name)"),
    ]
    (tmp_path / "notebooks").mkdir()
    nb = new_notebook(
        cells=cells, metadata={"pagedkv": FACTS, "language_info": {"name": "python", "version": "3.1"}}
    )
    nbformat.write(nb, tmp_path / "notebooks" / "00_start_here.ipynb")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # no settings from further up
    (tmp_path / "README.md").write_text("# Course\n<!-- course map -->\nold\n<!-- /course map -->\nend\n")
    return tmp_path


def run(folder, *command, **environment):
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def files(folder):
    return {
        path.name: path.read_bytes()
        for path in (folder / "README.md", *(folder / "notebooks").glob("*.ipynb"))
    }


def test_a_second_run_changes_no_byte_and_nbval_accepts_the_first(course):
    assert run(course, "pagedkv.teach.notebooks").returncode == 0
    stored = files(course)
    second = run(course, "pagedkv.teach.notebooks")
    assert second.returncode == 0
    assert files(course) == stored, second.stdout

    nb = notebooks.read(course / "notebooks" / "00_start_here.ipynb")
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [1, 2, 3, 4, 5, 6]
    assert code[0].outputs[0].data == {"text/plain": "frame 0", "text/html": "<b>frame 0</b>"}
    assert [output.text for output in code[1].outputs] == ["0\n1\n2\n"]
    assert code[2].outputs[0].traceback == ["ZeroDivisionError: division by zero"]
    assert code[2].metadata == {"tags": ["raises-exception"]}
    assert code[5].outputs[0].text == "notebooks\n"
    assert nb.cells[0].id == "00-start-here"
    assert "| I Pages | [00 Start here](00_start_here.ipynb) | name \\| read a block |" in nb.cells[0].source
    assert "[00 Start here](notebooks/00_start_here.ipynb)" in stored["README.md"].decode()
    assert b"old" not in stored["README.md"] and stored["README.md"].endswith(b"end\n")

    copies = notebooks.read(course / "notebooks" / "exercises" / "00_start_here.ipynb")
    assert not any(cell.get("outputs") for cell in copies.cells)
    options = [
        "-q",
        "--nbval",
        "--nbval-current-env",
        "-p",
        "no:cacheprovider",
        "--ignore=notebooks/exercises",
    ]
    assert run(course, "pytest", *options, "notebooks").returncode == 0
    path = course / "notebooks" / "00_start_here.ipynb"
    path.write_text(path.read_text("utf-8").replace("<b>frame 0</b>", "<b>frame 1</b>", 1), "utf-8")
    changed = run(course, "pytest", *options, "notebooks")
    assert changed.returncode == 1, "nbval has to compare a widget's HTML"
    assert "1 failed, 5 passed" in changed.stdout


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A function that writes a lesson of one cell and returns its path; the working directory is that lesson's."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "00_start_here.ipynb"

    def write(source):
        nbformat.write(new_notebook(cells=[new_code_cell(source)]), path)
        return path

    return write


def test_a_failing_lesson_is_reported_and_not_stored(tiny, capsys):
    path = tiny("undefined")
    before = path.read_bytes()
    assert notebooks.main([str(path)]) == 1
    assert "NameError" in capsys.readouterr().out
    assert path.read_bytes() == before


def test_check_writes_nothing_and_says_what_would_change(tiny, capsys):
    path = tiny("print(1)")
    before = path.read_bytes()
    assert notebooks.main(["--check", str(path)]) == 1
    assert f"would change: {path}" in capsys.readouterr().out
    assert path.read_bytes() == before


NOWHERE = {"extras": [], "packages": ["no-such-package-anywhere==1.0"]}
REMEDY = "pip install --no-deps no-such-package-anywhere==1.0"


def test_a_lesson_whose_packages_are_absent_is_left_out_with_the_reason(tmp_path):
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text("utf-8"))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # no settings from further up
    nb = new_notebook(cells=[new_code_cell("1")], metadata={"pagedkv": NOWHERE})
    nbformat.write(nb, tmp_path / "13_lesson.ipynb")
    collect = ("pytest", "--co", "-q", "--nbval", "--nbval-current-env")
    lax = run(tmp_path, *collect, PAGEDKV_STRICT="")
    assert f"13_lesson.ipynb left out: it needs {REMEDY}" in lax.stdout
    assert "1 deselected" in lax.stdout
    strict = run(tmp_path, *collect, PAGEDKV_STRICT="1")
    assert "1 test collected" in strict.stdout


def test_a_lesson_whose_packages_are_absent_is_not_run_and_stays_as_it_is(tiny, capsys):
    path = tiny("undefined")
    nb = notebooks.read(path)
    nb.metadata["pagedkv"] = NOWHERE
    nbformat.write(nb, path)
    before = path.read_bytes()
    assert notebooks.main([str(path)]) == 0
    assert f"left as it is: it needs {REMEDY}\n" in capsys.readouterr().out
    assert path.read_bytes() == before


def test_what_is_missing_is_said_as_commands(monkeypatch):
    assert notebooks.missing_packages({}) is None
    assert (
        notebooks.missing_packages({"extras": [], "packages": ["nbformat==5"]}) is None
    )  # whichever version
    monkeypatch.setattr(notebooks.metadata, "version", absent)
    facts = {"extras": ["transformers", "train"], "packages": NOWHERE["packages"]}
    assert notebooks.missing_packages(facts) == (
        f'pip install "pagedkv[transformers,train]"   and   {REMEDY}'
    )


def absent(name):
    raise notebooks.metadata.PackageNotFoundError(name)


def test_normalising_twice_is_normalising_once(course):
    nb = notebooks.read(course / "notebooks" / "00_start_here.ipynb")
    notebooks.normalise(nb)
    once = notebooks.dumps(nb)
    notebooks.normalise(nb)
    assert notebooks.dumps(nb) == once


def test_ids_that_a_person_wrote_are_kept_and_doubles_are_numbered():
    cells = [
        new_markdown_cell("## The pool now", id="pool"),
        new_markdown_cell("## The pool now", id="0a1b2c3d"),
        new_markdown_cell("## The pool now", id="0a1b2c3e"),
        new_code_cell("", id="0a1b2c3f"),
    ]
    nb = new_notebook(cells=cells)
    notebooks.normalise(nb)
    assert [cell.id for cell in nb.cells] == ["pool", "the-pool-now", "the-pool-now-2", "cell"]


def png(pixels):
    import matplotlib.image

    stream = io.BytesIO()
    matplotlib.image.imsave(stream, pixels, format="png")
    return base64.b64encode(stream.getvalue()).decode()


def lesson_with(source, picture, text="8 free\n"):
    outputs = [
        new_output("stream", name="stdout", text=text),
        new_output("display_data", data={"image/png": picture, "text/plain": "<Figure>"}),
    ]
    return new_notebook(cells=[new_code_cell(source, outputs=outputs, execution_count=1)])


FIGURE = np.zeros((40, 40, 3))
SMOOTHED = FIGURE + (np.arange(40) == 7)[:, None] * 0.2  # one line of pixels a little lighter
REDRAWN = FIGURE + (np.arange(40) > 30)[:, None] * 0.9


@pytest.mark.parametrize(
    ("after", "kept"),
    [
        (lesson_with("draw()", png(SMOOTHED)), True),
        (lesson_with("draw()", png(REDRAWN)), False),
        (lesson_with("draw(2)", png(SMOOTHED)), False),
        (lesson_with("draw()", png(SMOOTHED), "7 free\n"), False),
    ],
    ids=["another matplotlib", "another picture", "other code", "other numbers"],
)
def test_a_stored_picture_is_kept_while_it_shows_the_same(after, kept):
    stored = png(FIGURE)
    notebooks.settle(after, lesson_with("draw()", stored))
    assert (after.cells[0].outputs[1].data["image/png"] == stored) is kept


@pytest.mark.parametrize(
    ("seconds", "stored", "shown"),
    [
        (3, None, "under 10 s"),
        (12, None, "under 30 s"),
        (12, "under 10 s", "under 10 s"),  # a busy machine
        (25, "under 10 s", "under 30 s"),
        (45, "under 30 s", "under 30 s"),
        (8, "under 30 s", "under 30 s"),  # a fast one
        (4, "under 30 s", "under 10 s"),
        (1, "under 10 s", "under 10 s"),
        (400, None, "under 420 s"),
    ],
)
def test_running_times_are_coarse_and_steady(seconds, stored, shown):
    assert notebooks.run_class(seconds, stored) == shown


def test_lessons_stand_in_reading_order(tmp_path):
    names = ["00_start_here", "08_scheduling", "capstone", "09_persistence", "appendix_attention_refresher"]
    for name in reversed(names):
        (tmp_path / f"{name}.ipynb").touch()
    assert [path.stem for path in notebooks.lessons(tmp_path)] == names
    assert [notebooks.short_name(path) for path in notebooks.lessons(tmp_path)] == [
        "00",
        "08",
        *names[2:3],
        "09",
        names[4],
    ]
