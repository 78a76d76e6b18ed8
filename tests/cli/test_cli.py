"""The command line, as its users meet it: a process, its two outputs and its exit code."""

import os
import re
import subprocess
import sys

import pytest

from pagedkv import __version__, cli
from pagedkv.cli import generate, lab

COMMAND = [sys.executable, "-m", "pagedkv.cli"]
ENVIRONMENT = os.environ | {"PYTHONUTF8": "1", "PYTHONUNBUFFERED": ""}  # as at a user's shell


def pagedkv(*arguments):
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=ENVIRONMENT)


# --- generate


def test_the_text_goes_to_standard_output_and_one_line_of_figures_to_standard_error():
    done = pagedkv("generate", "ROMEO:", "--tokens", 40)
    assert done.returncode == 0
    assert done.stdout.startswith("ROMEO:")
    assert len(done.stdout) == len("ROMEO:") + 40 + len("\n")
    assert re.fullmatch(
        r"\[1 sample: 40 characters, \d+ a second; blocks of 16: at most 3 in use, 0 of them shared "
        r"\(3 without sharing\), 0 copied\]\n",
        done.stderr,
    )


def test_the_seed_decides():
    one, same, other = (pagedkv("generate", "ROMEO:", "--tokens", 30, "--seed", s).stdout for s in (1, 1, 2))
    assert one == same != other


def test_the_block_size_and_the_number_of_samples_change_blocks_but_no_text():
    alone = pagedkv("generate", "Good night", "--tokens", 30)
    four = pagedkv("generate", "Good night", "--tokens", 30, "--samples", 4, "--block-size", 3)
    assert four.stdout.startswith(alone.stdout)
    assert four.stdout.count("Good night") >= 4
    assert [f"sample {i} of 4" in four.stdout for i in range(1, 6)] == [False, True, True, True, False]
    assert "at most 43 in use, 4 of them shared (52 without sharing), 3 copied" in four.stderr


def test_temperature_zero_is_the_likeliest_text_for_every_seed():
    texts = {
        pagedkv("generate", "Good night", "--tokens", 20, "--temperature", 0, "--seed", seed).stdout
        for seed in (1, 2)
    }
    texts.add(pagedkv("generate", "Good night", "--tokens", 20, "--beams", 1).stdout)
    assert len(texts) == 1


def test_beams_print_the_best_text_once_and_share_blocks():
    done = pagedkv("generate", "Good night", "--tokens", 60, "--beams", 4, "--block-size", 4)
    assert done.returncode == 0
    assert len(done.stdout) == 10 + 60 + 1
    peak, unshared = map(
        int, re.search(r"at most (\d+) in use, \d+ of them shared \((\d+) without", done.stderr).groups()
    )
    assert unshared == 4 * 18
    assert peak < unshared * 2 / 3


def test_what_beams_print_early_is_never_taken_back():
    model = generate.Llama.load()
    prompt = model.tokenizer.encode("Good night")
    options = generate.argparse.Namespace(tokens=60, beams=4)
    steps = list(generate.beams(model, model.new_cache(100, 4), prompt, options))
    final = steps[-1][0][0]
    assert all(final[:settled] == texts[0][:settled] for texts, settled in steps)
    assert sum(settled > 0 for _, settled in steps) > 20
    assert [len(texts[0]) for texts, _ in steps] == list(range(1, 61))


def test_no_tokens_print_the_prompt():
    assert pagedkv("generate", "Good day", "--tokens", 0).stdout == "Good day\n"


def test_a_text_appears_while_it_is_written():
    command = [*COMMAND, "generate", "ROMEO:", "--tokens", "500"]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        seen = process.stdout.read(10)
        process.kill()
        seen += process.stdout.read()
    assert seen.startswith(b"ROMEO:")
    assert len(seen) < len("ROMEO:") + 500  # it was still writing


def test_a_reader_who_goes_away_ends_it_without_a_traceback():
    command = [*COMMAND, "generate", "ROMEO:", "--tokens", "500"]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait(120) == 1
        assert process.stderr.read() == b""


@pytest.mark.parametrize("way", [("--samples", 3), ("--beams", 3)], ids=["samples", "beams"])
def test_a_pool_that_is_too_small_prints_what_it_could_and_says_why_it_ends(way):
    request = ("generate", "Good night", "--tokens", 60, "--block-size", 4, *way)
    whole, cut = pagedkv(*request), pagedkv(*request, "--num-blocks", 12)
    assert (whole.returncode, cut.returncode) == (0, 1)
    written = int(re.search(r"is full after (\d+) of 60 characters", cut.stderr)[1])
    assert 0 < written < 60
    assert cut.stdout.splitlines()[0].startswith("Good night")
    if way[0] == "--samples":
        assert cut.stdout.startswith(whole.stdout[: 10 + written])
    assert "the pool of 12 blocks of 4" in cut.stderr
    advice = re.search(r"--num-blocks (\d+) is always enough", cut.stderr)[1]
    assert pagedkv(*request, "--num-blocks", advice).stdout == whole.stdout
    assert "Traceback" not in cut.stderr


def test_a_pool_too_small_for_the_prompt_prints_the_prompt():
    done = pagedkv("generate", "Good night", "--block-size", 4, "--num-blocks", 2)
    assert (done.returncode, done.stdout) == (1, "Good night\n")
    assert "full after 0 of 200 characters: the next step needs 3 more, 2 are free" in done.stderr


def test_the_pages_are_drawn_at_every_step():
    done = pagedkv(
        "generate",
        "Good night",
        "--tokens",
        5,
        "--samples",
        2,
        "--block-size",
        4,
        "--num-blocks",
        8,
        "--show-pages",
    )
    steps = done.stdout.split("\n\n")
    text = done.stdout.splitlines()
    letters = [line.split("next: ")[1].split(", ") for line in text if line.startswith("step")]
    assert len(letters) == 5
    assert steps[0].endswith(
        "0 Good 0,1 | 1 ␣nig 0,1 | 2 ht·· 0,1 | 3 ···· – | 4 ···· – | 5 ···· – | 6 ···· – | 7 ···· –   free 5"
    )
    second = {row: f"ht{chosen[2:]}· {row}" for row, chosen in enumerate(letters[0])}
    assert all(box in steps[1] for box in second.values())
    assert steps[5].startswith("Good night")


def test_pages_of_beams_show_what_the_cache_holds():
    done = pagedkv("generate", "Good day", "--tokens", 6, "--beams", 3, "--block-size", 4, "--show-pages")
    assert done.returncode == 0
    assert done.stdout.count("0 Good 0 | 1 ␣day 0") == 1  # the prompt, before the first fork
    assert done.stdout.count("0 Good 0,1,2 | 1 ␣day 0,1,2") == 5
    assert done.stdout[-15:].startswith("Good day")  # eight letters, six new ones and the line end


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "the prompt is empty"),
        (["Good nïght"], "never seen 'ï' (position 6)"),
        (["x", "--tokens", "-1"], "--tokens: a whole number of at least 0 is needed, not '-1'"),
        (["x", "--tokens", "many"], "--tokens"),
        (["x", "--tokens", "512"], "a prompt of 1 and 512 new tokens exceed the model's context of 512"),
        (["x", "--block-size", "0"], "--block-size: a whole number of at least 1 is needed, not '0'"),
        (["x", "--block-size", "2.5"], "--block-size"),
        (["x", "--num-blocks", "0"], "--num-blocks"),
        (["x", "--num-blocks", "1000000000"], "1000000000"),
        (["x", "--samples", "0"], "--samples"),
        (["x", "--beams", "0"], "--beams"),
        (["x", "--beams", "66"], "66 beams cannot start from 65 different tokens"),
        (["x", "--beams", "2", "--samples", "2"], "not allowed with"),
        (["x", "--beams", "2", "--top-k", "3"], "beams do not draw"),
        (["x", "--temperature", "-1"], "temperature must be above 0, got -1.0"),
        (["x", "--temperature", "nan"], "temperature"),
        (["x", "--top-p", "1.5"], "top_p must be above 0 and at most 1, got 1.5"),
        (["x", "--top-p", "0"], "top_p"),
        (["x", "--top-k", "0"], "--top-k"),
        (["x", "--seed", "-1"], "--seed"),
        ([], "PROMPT"),
        (["x", "--colour"], "unrecognized"),
        (["x", "--model", "gpt2"], "invalid choice: 'gpt2'"),
        (["x", "--chat"], "--chat needs a model that answers: --model smollm2"),
        (["x", "--model", "smollm2", "--top-p", "2"], "top_p must be above 0"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(arguments, message, capfd):
    """In this process, to be quick; an exit by argparse is a SystemExit with the same code."""
    try:
        code = cli.main(["generate", *arguments])
    except SystemExit as exit:
        code = exit.code
    printed = capfd.readouterr()
    assert (code, printed.out) == (2, "")
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_damaged_weights_are_named(monkeypatch, capsys, tmp_path):
    def load():
        from pagedkv.lm.weights import read_weights

        return read_weights(tmp_path / "gone.npz")

    monkeypatch.setattr(generate.Llama, "load", load)
    assert cli.main(["generate", "x"]) == 1
    assert "gone.json" in capsys.readouterr().err


# --- lab, and the command itself


@pytest.mark.parametrize(("user", "asked"), [(1000, []), (0, ["--allow-root"])])
def test_lab_opens_the_first_lesson_in_the_folder(monkeypatch, tmp_path, user, asked):
    monkeypatch.setattr(lab.os, "geteuid", lambda: user, raising=False)
    calls = []
    monkeypatch.setattr(lab.subprocess, "call", lambda command: calls.append(command) or 0)
    monkeypatch.setattr(lab.importlib.util, "find_spec", lambda name: object())
    (tmp_path / "00_start_here.ipynb").touch()
    assert cli.main(["lab", "--folder", str(tmp_path)]) == 0
    assert calls == [[sys.executable, "-m", "jupyterlab", *asked, str(tmp_path / "00_start_here.ipynb")]]


def test_lab_without_the_extra_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(lab.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["lab", "--folder", str(tmp_path)]) == 1
    assert 'pip install "pagedkv[course]"' in capsys.readouterr().err


def test_lab_without_lessons_says_where_it_looked(tmp_path):
    done = pagedkv("lab", "--folder", tmp_path / "nowhere")
    assert done.returncode == 1
    assert "nowhere" in done.stderr
    assert done.stderr.count("\n") == 1


def test_version_and_help():
    assert pagedkv("--version").stdout == f"pagedkv {__version__}\n"
    assert "generate" in pagedkv("--help").stdout
    assert "--num-blocks" in pagedkv("generate", "--help").stdout


@pytest.mark.parametrize("arguments", [[], ["nonsense"]])
def test_an_unknown_command_is_one_line(arguments):
    done = pagedkv(*arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
