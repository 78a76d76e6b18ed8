"""Synthetic traffic has the statistics that it claims."""

import numpy as np
import pytest

from pagedkv.serving import replay as replays
from pagedkv.serving import synthetic
from pagedkv.serving.synthetic import conversations


def first_turns(requests):
    seen = set()
    return [r for r in requests if not (r.session in seen or seen.add(r.session))]


@pytest.fixture(scope="module")
def many():
    return conversations(4000, seed=1, maximum=100_000)


def test_lengths_and_turns_are_those_published(many):
    first = first_turns(many)
    prompts = np.array([r.prompt for r in first]) - synthetic.SYSTEM_PROMPT
    assert len(first) == 4000
    assert prompts.mean() == pytest.approx(synthetic.FIRST_PROMPT, rel=0.07)
    assert np.median(prompts) == pytest.approx(synthetic.FIRST_PROMPT_MEDIAN, rel=0.07)
    assert np.mean([r.output for r in many]) == pytest.approx(synthetic.ANSWER, rel=0.03)
    assert len(many) / 4000 == pytest.approx(synthetic.TURNS, rel=0.05)


def test_requests_come_in_order_and_the_seed_decides():
    a, b, other = conversations(20, seed=3), conversations(20, seed=3), conversations(20, seed=4)
    assert a == b != other
    assert a[0].arrival == 0
    assert [r.arrival for r in a] == sorted(r.arrival for r in a)
    assert [r.line for r in a] == list(range(1, len(a) + 1))


def test_all_share_the_system_prompt_and_turns_share_what_was_said():
    requests = conversations(30, seed=5, system_prompt=32)
    assert len({tuple(r.blocks(16)[:2]) for r in requests}) == 1
    held = {}
    for request in requests:
        if request.session in held:
            before = held[request.session]
            full = len(before) // 16
            assert request.blocks(16)[:full] == [before[(k + 1) * 16 - 1] for k in range(full)]
            assert request.prompt > len(before)
        else:
            others = {key for ids in held.values() for key in ids[32:]}
            assert not others & set(request.ids[32:])
        held[request.session] = request.ids


def test_no_request_exceeds_the_maximum():
    requests = conversations(200, seed=6, maximum=300)
    assert max(r.prompt + r.output for r in requests) <= 300
    assert len(first_turns(requests)) == 200
    assert min(r.output for r in requests) >= 1


def test_it_can_be_replayed():
    pool = replays.ManagerReplay(16, 2000)
    replays.feed_all(conversations(40, seed=7), [pool])
    assert 0.3 < pool.hits.token_rate < 0.95


@pytest.mark.parametrize("options", [{"n": -1}, {"rate": 0}, {"rate": float("nan")}, {"system_prompt": -1},
                                     {"maximum": 100}, {"system_prompt": 1.5}])  # fmt: skip
def test_wrong_numbers(options):
    with pytest.raises(ValueError, match="must be"):
        conversations(**({"n": 3} | options))


def test_no_conversations_are_no_requests():
    assert conversations(0) == []
