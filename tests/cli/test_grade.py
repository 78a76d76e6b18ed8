"""`pagedkv grade` refuses what makes no sense in one line; what it does is in tests/teach/test_grading.py."""

import sys

import pytest

from pagedkv import cli
from pagedkv.cli import grade
from pagedkv.teach.grading import Row

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="grading needs limits and process groups")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], 1, "nowhere is not a folder"),
        (["."], 1, "no notebooks"),
        ([".", "--timeout", "0"], 2, "--timeout"),
        ([".", "--jobs", "-1"], 2, "--jobs"),
        ([".", "--memory", "1"], 2, "--memory"),
        ([".", "--seed", "0"], 2, "--seed"),
        (["full", "--csv", "nowhere/grades.csv"], 1, "cannot write nowhere/grades.csv"),
        (["full", "--lessons", "full/none"], 1, "no lessons"),
    ],
)
def test_a_wrong_request_is_one_line(arguments, code, message, tmp_path, monkeypatch, capsys):
    empty = tmp_path / "empty"
    (empty / "full").mkdir(parents=True)
    monkeypatch.chdir(empty if arguments[0] == "full" else tmp_path / "empty")
    if arguments[0] == "full":
        (empty / "full" / "a.ipynb").write_text("{}")
    try:
        got = cli.main(["grade", *arguments])
    except SystemExit as exit:
        got = exit.code
    printed = capsys.readouterr()
    assert (got, printed.err.count("\n"), printed.out) == (code, 1, "")
    assert message in printed.err


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x"])
def test_a_spreadsheet_takes_no_text_for_a_formula(text):
    assert grade._cell(Row("f", text, "01", "fits", "solved"), "learner") == f"'{text}"
    assert grade._cell(Row("f", "Ada", "01", "fits", "solved"), "learner") == "Ada"


def test_the_help_says_whose_code_it_runs_and_how_to_box_it_in(capsys):
    with pytest.raises(SystemExit):
        cli.main(["grade", "--help"])
    told = capsys.readouterr().out
    assert "strangers' code" in told and "--network none" in told and "user without rights" in told
