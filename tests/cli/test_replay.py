"""`pagedkv replay`: the report, its files, and what it says to traces and options that make no sense."""

import json
import subprocess
import sys

import pytest
from needs import need_module

from pagedkv import cli

CHAT = [
    {"timestamp": 0.5 * k, "input_length": 40 + k % 3, "output_length": 30, "block_size": 8, "model": "m",
     "hash_ids": [*range(3), 1000 * k, 1000 * k + 1]}
    for k in range(1, 31)
]  # fmt: skip


@pytest.fixture
def trace(tmp_path):
    def made(records, name="chat.jsonl"):
        path = tmp_path / name
        text = (
            records if isinstance(records, str) else "".join(json.dumps(record) + "\n" for record in records)
        )
        path.write_text(text, "utf-8")
        return str(path)

    return made


@pytest.fixture
def replay(capsys):
    """Run it in this process: exit code, standard output, standard error."""

    def run(*arguments):
        try:
            code = cli.main(["replay", *map(str, arguments)])
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run


def rows_of_hits(out):
    """The table under the first heading."""
    return [line.split() for line in out.split("\n\n")[1].splitlines()[2:]]


def test_the_report_ends_with_the_answer_in_plain_words(replay, trace):
    code, out, err = replay(trace(CHAT), "--num-blocks", "10,20,200", "--block-size", "8,16")
    assert (code, err) == (0, "")
    assert out.startswith(
        "chat.jsonl (lengths): 30 requests in 14 s; prompts of 41 tokens on average, answers of 30"
    )
    answer = out.split("With this traffic:\n")[1].splitlines()
    assert len(answer) == 3
    assert answer[0].startswith(
        "- To remember prompts, 10 blocks of 8 (80 tokens) are enough: they find 56.6%"
    )
    assert answer[1].startswith("- To serve without needless waiting, 20 blocks of 8 (160 tokens) are enough")
    assert answer[2].startswith("- Of the block sizes tried take 8")


def test_the_files_hold_the_same_numbers(replay, trace, tmp_path):
    need_module("matplotlib", "bench")
    folder = tmp_path / "new" / "report"
    code, out, _ = replay(trace(CHAT), "--num-blocks", "10,200", "--block-size", "8,16", "--out", folder)
    assert code == 0
    assert (folder / "report.txt").read_text("utf-8") == out
    found = json.loads((folder / "results.json").read_text("utf-8"))
    assert [(r["block_size"], r["num_blocks"]) for r in found["served"]] == [
        (8, 10),
        (8, 200),
        (16, 10),
        (16, 200),
    ]
    assert found["hits"][0]["rate"] == pytest.approx(29 * 24 / sum(record["input_length"] for record in CHAT))
    assert found["enough"]["blocks_for_hits"] == {"block_size": 8, "num_blocks": 10}
    charts = sorted(path.name for path in folder.glob("*.png"))
    assert charts == ["cost.png", "hits.png", "pool.png", "waiting.png", "waste.png"]
    assert all((folder / name).read_bytes()[:4] == b"\x89PNG" for name in charts)


def test_hits_only_has_no_clock(replay, trace):
    _, out, _ = replay(trace(CHAT), "--num-blocks", 50, "--hits-only")
    assert "On the clock" not in out
    assert "blocks of 8, the only size tried" in out


def test_a_share_of_the_traces_blocks_and_the_plain_lru(replay, trace):
    code, out, _ = replay(trace(CHAT), "--policy", "lru", "--num-blocks", "100%,50%")
    assert code == 0
    rows = rows_of_hits(out)
    assert [row[1:4] for row in rows] == [["31", "248", "58.00%"], ["63", "504", "58.00%"]]


def test_pools_are_chosen_where_none_are_given(replay, trace):
    _, out, _ = replay(trace(CHAT), "--hits-only")
    rows = [row[:3] for row in rows_of_hits(out)]
    assert rows == [["8", str(16 * 2**i), f"{128 * 2**i:,}"] for i in range(6)]


def test_a_trace_without_times_is_served_at_a_rate(replay, trace):
    table = "num_prefill_tokens,num_decode_tokens\n" + "50,9\n20,90\n40,8\n" * 5
    code, out, _ = replay(trace(table))
    assert code == 0
    assert "does not tell when requests arrived; --rate R" in out
    assert "Found in the prefix cache" not in out
    code, out, _ = replay(trace(table), "--rate", 5, "--preempt", "swap", "--num-blocks", 8)
    assert code == 0
    assert "On the clock" in out


def test_sessions_of_agents_get_a_table(replay, trace):
    requests = [{"t": k, "model": "m", "in": 130, "out": 3, "hash_ids": [1, k + 5]} for k in range(3)]
    _, out, _ = replay(trace([{"trace": "one", "block_size": 64, "requests": requests}]), "--num-blocks", 9)
    assert ["one", "50.0", "50.0"] in [line.split() for line in out.splitlines()]


def test_damaged_lines_are_named_or_counted(replay, trace):
    path = trace("".join(json.dumps(r) + "\n" for r in CHAT[:3]) + "{oops\n" + json.dumps(CHAT[3]))
    code, out, err = replay(path)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("pagedkv replay: chat.jsonl, line 4: Expecting property name")
    assert err.endswith("(--skip-bad leaves damaged lines out)\n")
    code, out, err = replay(path, "--skip-bad", "--num-blocks", 50)
    assert (code, err) == (0, "")
    assert "4 requests in" in out
    assert "1 damaged lines were left out, the first: chat.jsonl, line 4" in out


@pytest.mark.parametrize(
    "name", ["", "\n\n", "num_prefill_tokens,num_decode_tokens\n"], ids=["empty", "blank", "csv"]
)
def test_a_trace_without_requests_is_said_to_have_none(replay, trace, name):
    assert replay(trace(name)) == (1, "", "pagedkv replay: chat.jsonl holds no requests\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--block-size", "0"], 2, "at least 1 is needed, not '0'"),
        (["--block-size", "16,x"], 2, "not 'x'"),
        (["--block-size", "12"], 2, "a block size must divide 8 or be a multiple of it, not 12"),
        (["--num-blocks", ""], 2, "--num-blocks"),
        (["--num-blocks", "-3"], 2, "not '-3'"),
        (["--num-blocks", "101%"], 2, "at most 100%, not 101%"),
        (["--num-blocks", "0%"], 2, "a number above 0 is needed, not '0'"),
        (["--num-blocks", "1000000000000"], 2, "1000000000000"),
        (["--policy", "fifo"], 2, "invalid choice: 'fifo'"),
        (["--policy", "lru", "--count", "tokens"], 2, "lru counts ids"),
        (["--format", "parquet"], 2, "invalid choice: 'parquet'"),
        (["--format", "agentic"], 1, "line 1: requests must be a list"),
        (["--rate", "0"], 2, "--rate"),
        (["--rate", "inf"], 2, "--rate"),
        (["--step-ms", "-1"], 2, "--step-ms"),
        (["--limit", "-1"], 2, "--limit"),
        (["--limit", "0"], 1, "holds no requests"),
    ],
)
def test_a_wrong_request_is_one_line(replay, trace, arguments, code, message):
    got, out, err = replay(trace(CHAT), *arguments)
    assert (got, out) == (code, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_missing_file_and_a_folder_are_named(replay, tmp_path):
    for path in (tmp_path / "gone.jsonl", tmp_path):
        code, out, err = replay(path)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert str(path) in err


def test_an_output_folder_that_cannot_be_made_is_named(replay, trace, tmp_path):
    need_module("matplotlib", "bench")
    (tmp_path / "taken").write_text("")
    code, _, err = replay(trace(CHAT), "--num-blocks", 50, "--hits-only", "--out", tmp_path / "taken")
    assert code == 1
    assert "taken" in err


def test_lengths_alone_cannot_be_looked_up(replay, trace):
    code, _, err = replay(trace("prompt,output\n3,4\n"), "--policy", "lru")
    assert (code, "nothing to look up" in err) == (2, True)
    code, _, err = replay(trace("prompt,output\n3,4\n"), "--num-blocks", "5%")
    assert (code, "cannot be counted" in err) == (2, True)


def test_the_command_is_known():
    done = subprocess.run(
        [sys.executable, "-m", "pagedkv.cli", "replay", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "--skip-bad" in done.stdout
