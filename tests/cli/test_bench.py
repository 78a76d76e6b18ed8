"""`pagedkv bench`: a tiny run end to end, verdicts as exit codes, and complaints of one line."""

import json
import sys

import pytest

from pagedkv import cli
from pagedkv.bench import PEERS, SHAPES, Shape, bookkeeping, goals, peers, suite, vllm_peer
from pagedkv.cli import bench

SMALL = ["--peers", "numpy-padded", "--dtypes", "float32", "--seconds", "0.001", "--threads", "1"]
NOTHING = ["--block-sizes", "none", "--head-dims", "none", "--beam-widths", "none"]


@pytest.fixture
def tiny(monkeypatch):
    """One shape that takes no time, under a name that goals speak of; and a memory that was measured."""
    for name in SHAPES:
        monkeypatch.setitem(SHAPES, name, Shape(name, (5, 17), 4, 2, 8))
    monkeypatch.setattr(suite, "read_bandwidth", lambda **_: 1e10)
    monkeypatch.setattr(bench, "QUICK", 64)
    rows = bookkeeping.rows
    monkeypatch.setattr(bookkeeping, "rows", lambda rounds: rows(1))


def test_a_quick_run_writes_everything(tiny, tmp_path, capsys):
    peers = ["--peers", "numpy-padded,paged-ungrouped"]  # nothing to group in this shape: for the beams only
    arguments = ["--quick", "--shapes", "a", *SMALL, *peers, "--block-sizes", "4,16", "--head-dims", "8,16"]
    assert cli.main(["bench", *arguments, "--beam-widths", "1,2", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out == (tmp_path / "out" / "report.md").read_text("utf-8")
    read = json.loads((tmp_path / "out" / "results.json").read_text("utf-8"))
    assert [(row["shape"], row["peer"]) for row in read["rows"]] == [("a", "paged"), ("a", "numpy-padded")]
    assert [p["block_size"] for p in read["sweeps"]["block_sizes"]] == [4, 16]
    assert [p["head_dim"] for p in read["sweeps"]["head_dims"]] == [8, 16]
    assert {p["width"] for p in read["sweeps"]["beam_widths"]} == {1, 2}
    assert {p["peer"] for p in read["sweeps"]["beam_widths"]} == {"paged", "paged-ungrouped"}
    assert {"kernels_a.png", "linear.png", "block_sizes.png"} <= {
        f.name for f in (tmp_path / "out").iterdir()
    }


def test_the_model_alone(tiny, capsys):
    assert cli.main(["bench", "--quick", "--model"]) == 0
    out = capsys.readouterr().out
    assert "## The shipped model" in out
    assert "## Shape" not in out


@pytest.mark.parametrize(("wanted", "code"), [(0.0, 0), (1e9, 1)])
def test_check_says_which_goal_is_missed(tiny, monkeypatch, capsys, wanted, code):
    goal = goals.Goal("a: padded contiguous NumPy", goals.against("a", "numpy-padded"), wanted, wanted)
    monkeypatch.setattr(goals, "GOALS", [goal])
    assert cli.main(["bench", "--check", "--shapes", "a", *SMALL]) == code
    printed = capsys.readouterr()
    assert ("MISSED" in printed.out) == bool(code)
    assert printed.err == "pagedkv bench: goals missed: a: padded contiguous NumPy\n" * code


def test_check_judges_the_shapes_that_were_measured(tiny, monkeypatch, capsys):
    cli.main(["bench", "--check", "--shapes", "a", *SMALL])
    out = capsys.readouterr().out
    assert "a: padded contiguous NumPy" in out
    assert "b8:" not in out


def test_a_wrong_kernel_is_exit_1(tiny, monkeypatch, capsys):
    wrong = peers.Peer("seed", "wrong", lambda workload, threads=1: lambda layer: workload.query * 0)
    monkeypatch.setitem(PEERS, "seed", wrong)
    assert cli.main(["bench", "--quick", "--shapes", "a", *SMALL[2:], "--peers", "seed", *NOTHING]) == 1
    assert "wrong results: seed float32 on a" in capsys.readouterr().err


def test_an_absent_peer_is_named_and_left_out(tiny, monkeypatch, capsys):
    gone = peers.Peer("seed", "gone", None, lambda: "get it there")
    monkeypatch.setitem(PEERS, "seed", gone)
    assert cli.main(["bench", "--quick", "--shapes", "a", *SMALL[2:], "--peers", "seed", *NOTHING]) == 0
    printed = capsys.readouterr()
    assert "seed: get it there\n" in printed.err
    assert "- seed: get it there\n" in printed.out


def test_a_vllm_that_does_not_run_is_one_line(tiny, monkeypatch, capsys):
    monkeypatch.setenv("PAGEDKV_VLLM_PYTHON", "")  # restored after the test
    arguments = ["--quick", "--shapes", "a", *SMALL[2:], "--peers", "vllm", "--vllm-python", sys.executable]
    monkeypatch.setattr(vllm_peer, "CHILD", "/no/such/script.py")
    assert cli.main(["bench", *arguments]) == 1
    last = capsys.readouterr().err
    assert "gave up: " in last
    assert last.count("\n") == 1


def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench"]) == 1
    assert 'pip install "pagedkv[bench]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "a,nine"], "there is no 'nine'; there are"),
        (["--shapes", ""], "there is no ''"),
        (["--peers", "jax"], "--peers: there is no 'jax'"),
        (["--dtypes", "float8"], "--dtypes: there is no 'float8'"),
        (["--block-sizes", "0"], "--block-sizes: a whole number of at least 1"),
        (["--block-sizes", "4,,8"], "not ''"),
        (["--head-dims", "x"], "not 'x'"),
        (["--beam-widths", "1000000"], "is more than"),
        (["--threads", "100000"], "--threads: 100000 is more than"),
        (["--seconds", "0"], "a number above 0"),
        (["--seconds", "nan"], "a number above 0"),
        (["--check", "--quick"], "leave --quick out"),
        (["--vllm-python", "/no/such/python"], "/no/such/python"),
        (["--out", __file__], "exists"),
        (["--nonsense"], "unrecognized arguments"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_2(arguments, message, capsys):
    try:
        code = cli.main(["bench", *arguments])
    except SystemExit as exit:
        code = exit.code
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert message in printed.err
    assert printed.err.count("\n") == 1
