"""`pagedkv student` writes copies, and `pagedkv lab` opens them."""

import nbformat
import pytest
from needs import ROOT

from pagedkv import cli
from pagedkv.cli import lab
from pagedkv.teach import notebooks, student

LESSONS = notebooks.lessons(ROOT / "notebooks")


def test_the_command_writes_copies_and_overwrites_none_that_was_worked_in(tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["student", str(out)]) == 0
    assert f"{len(LESSONS)} copies written" in capsys.readouterr().out
    assert student.write_copies(ROOT / "notebooks", out, check=True) == []
    assert cli.main(["student", str(out)]) == 0  # nothing to do, so nothing to lose
    mine = out / LESSONS[1].name
    mine.write_text("my work")
    assert cli.main(["student", str(out)]) == 1
    assert LESSONS[1].name in capsys.readouterr().err
    assert mine.read_text() == "my work"
    assert cli.main(["student", str(out), "--force"]) == 0
    assert nbformat.read(mine, as_version=4).metadata.pagedkv.lesson == LESSONS[1].stem


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--variant", "-1"], 2, "at least 0"),
        (["--lessons", "nowhere"], 1, "nowhere"),
    ],
)
def test_a_wrong_request_is_one_line(arguments, code, message, tmp_path, capsys):
    try:
        got = cli.main(["student", str(tmp_path / "out"), *arguments])
    except SystemExit as exit:
        got = exit.code
    error = capsys.readouterr().err
    assert (got, error.count("\n")) == (code, 1)
    assert message in error
    assert not (tmp_path / "out").exists()


def test_the_lessons_are_not_written_over(capsys):
    assert cli.main(["student", str(ROOT / "notebooks"), "--force"]) == 1
    assert "the lessons themselves" in capsys.readouterr().err


def test_a_file_where_the_folder_should_be_is_one_line(tmp_path, capsys):
    (tmp_path / "out").write_text("")
    assert cli.main(["student", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_lab_opens_the_copies_and_the_lessons_when_asked(monkeypatch, tmp_path):
    (tmp_path / "exercises").mkdir()
    for folder in (tmp_path, tmp_path / "exercises"):
        (folder / "00_start_here.ipynb").touch()
    calls = []
    monkeypatch.setattr(lab.subprocess, "call", lambda command: calls.append(command) or 0)
    monkeypatch.setattr(lab.importlib.util, "find_spec", lambda name: object())
    for more in ([], ["--solutions"]):
        assert cli.main(["lab", "--folder", str(tmp_path), *more]) == 0
    copies, lessons = calls
    assert copies[-1] == str(tmp_path / "exercises" / "00_start_here.ipynb")
    assert f"--ServerApp.root_dir={tmp_path}" in copies  # links from the copies to the lessons work
    assert lessons[-1] == str(tmp_path / "00_start_here.ipynb")


def test_a_school_gets_the_version_with_marked_solutions(tmp_path):
    assert cli.main(["student", str(tmp_path), "--nbgrader"]) == 0
    text = (tmp_path / "02_block_allocator.ipynb").read_text("utf-8")
    assert "### BEGIN SOLUTION" in text and '"grade_id": "release_check"' in text
