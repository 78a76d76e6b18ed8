"""The lengths that lesson 01 draws: where they come from, and that they are drawn as the table says."""

import numpy as np
import pytest

from pagedkv.teach import traffic

TRACE = "data/traces/sharegpt/sharegpt_8k_filtered_stats_llama2_tokenizer.csv"


def turns(shared):
    path = shared / TRACE
    if not path.exists():
        pytest.skip("the ShareGPT lengths are not beside this checkout")
    with path.open(encoding="utf-8", newline="") as file:
        return traffic.first_turns(file)


def test_the_table_comes_out_of_the_trace_again(shared):
    first = turns(shared)
    assert len(first) == 5678
    assert traffic.quantiles(first[:, 0]) == traffic.PROMPT
    assert traffic.quantiles(first[:, 1]) == traffic.OUTPUT


def test_draws_resemble_the_trace(shared):
    first = turns(shared)
    prompts, outputs = traffic.draw(50_000, seed=1)
    assert abs(prompts.mean() / first[:, 0].mean() - 1) < 0.08  # straight lines overstate the long tail
    assert abs(outputs.mean() / first[:, 1].mean() - 1) < 0.02


def test_the_two_lengths_hardly_depend_on_each_other_in_the_trace(shared):
    prompt, output = turns(shared).T
    assert round(np.corrcoef(prompt, output)[0, 1], 2) == 0.02
    assert round(np.corrcoef(prompt.argsort().argsort(), output.argsort().argsort())[0, 1], 2) == 0.07


def test_a_row_that_continues_the_one_above_is_no_first_turn():
    lines = ["num_prefill_tokens,num_decode_tokens", "10,5", "15,5", "30,2", "31,1", "40,9"]
    assert traffic.first_turns(lines).tolist() == [[10, 5], [31, 1]]


def test_the_columns_have_one_entry_for_each_percentage_and_never_fall():
    for column in (traffic.PERCENT, traffic.PROMPT, traffic.OUTPUT):
        assert len(column) == len(traffic.PERCENT)
        assert (np.diff(column) > 0).all()


def test_draws_follow_the_table():
    prompts, outputs = traffic.draw(50_000, seed=3)
    for drawn, column in ((prompts, traffic.PROMPT), (outputs, traffic.OUTPUT)):
        assert column[0] <= drawn.min() and drawn.max() <= column[-1]
        for percent, tokens in zip(traffic.PERCENT[1:-1], column[1:-1], strict=True):
            assert abs(100 * (drawn <= tokens).mean() - percent) < 1.5


def test_one_seed_gives_one_draw():
    assert np.array_equal(traffic.draw(100, seed=7), traffic.draw(100, seed=7))
    assert not np.array_equal(traffic.draw(100, seed=7), traffic.draw(100, seed=8))


def test_the_first_lengths_are_the_same_on_every_machine():
    prompts, outputs = traffic.draw(4, seed=0, maximum=2048)
    assert (prompts.tolist(), outputs.tolist()) == ([110, 10, 294, 98], [270, 12, 888, 662])


@pytest.mark.parametrize("maximum", [64, 500, 2048])
def test_no_request_is_longer_than_the_maximum(maximum):
    prompts, outputs = traffic.draw(20, seed=0, maximum=maximum)
    assert len(prompts) == len(outputs) == 20
    assert (prompts + outputs).max() <= maximum


def test_nothing_drawn_is_two_empty_arrays():
    assert [len(lengths) for lengths in traffic.draw(0, seed=0)] == [0, 0]


@pytest.mark.parametrize("n", [-1, 2.5, "4"])
def test_a_count_that_is_none_is_refused(n):
    with pytest.raises(ValueError, match="n must be a whole number"):
        traffic.draw(n, seed=0)


def test_a_maximum_that_no_request_can_keep_is_refused():
    with pytest.raises(ValueError, match="maximum must be a whole number of at least 64, got 63"):
        traffic.draw(1, seed=0, maximum=63)


def test_chats_repeat_what_was_said_and_begin_alike():
    turns = traffic.chats(20, seed=1)
    assert turns == traffic.chats(20, seed=1) != traffic.chats(20, seed=2)
    said = [prompt + answer for prompt, answer in turns]
    later = [prompt for prompt, _ in turns if any(prompt[: len(text)] == text for text in said)]
    assert len(turns) - len(later) == 20  # all but the first of each conversation
    assert len({tuple(prompt[:128]) for prompt, _ in turns}) == 1
    assert all(prompt and answer for prompt, answer in turns)
