"""Replay of traffic: counting by hand, against a plain model, and against published numbers."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import ROOT, STRESS, absent

from pagedkv.serving import replay as replays
from pagedkv.serving.replay import (
    Curve,
    Hits,
    LRUReplay,
    ManagerReplay,
    SessionRates,
    Traffic,
    Unique,
    feed_all,
)
from pagedkv.serving.traces import Trace, TraceRequest

TRACES = ROOT.parent / "shared" / "data" / "traces"


def published(name, **options):
    path = TRACES / name
    if not path.exists():
        absent("the published traces (shared/data/traces) are not here")
    return Trace(path, **options)


def request(ids, prompt=None, output=1, size=4, **more):
    prompt = len(ids) * size if prompt is None else prompt
    return TraceRequest(1, 0.0, prompt, output, ids, size, min(len(ids) * size, prompt), **more)


def rates(replay, requests):
    feed_all(requests, [replay])
    return replay.hits.block_rate, replay.hits.token_rate


# --- by hand


def test_lru_touches_a_prompt_head_first():
    replay = LRUReplay(4, 3)
    feed_all([request([1, 2, 3]), request([4]), request([1, 2])], [replay])
    assert (replay.hits.blocks, replay.hits.hit_blocks) == (6, 0)  # 4 pushed out 1, then 1 pushed out 2
    assert list(replay._blocks) == [4, 1, 2]


def test_lru_forgets_what_was_not_used_for_longest():
    replay = LRUReplay(4, 2)
    assert rates(replay, [request([k]) for k in (1, 2, 1, 3, 1)])[0] == 2 / 5  # 3 pushed out 2


def test_the_manager_releases_the_tail_first_so_that_beginnings_survive():
    replay = ManagerReplay(4, 3, count="ids")
    feed_all([request([1, 2, 3]), request([4]), request([1, 2])], [replay])
    assert (replay.hits.blocks, replay.hits.hit_blocks) == (6, 2)  # 4 pushed out 3


def test_a_pool_without_end_forgets_nothing():
    replay = LRUReplay(4)
    assert rates(replay, [request([1, 2]), request([3]), request([1, 2])])[0] == 2 / 5


def test_ids_count_a_partly_filled_block_and_tokens_do_not():
    requests = [request([1, 2], prompt=6), request([1, 2], prompt=6)]
    assert rates(ManagerReplay(4, 8, count="ids"), requests) == (2 / 4, 6 / 12)
    assert rates(ManagerReplay(4, 8), requests) == (1 / 4, 4 / 12)


def test_the_last_token_is_always_computed():
    assert rates(ManagerReplay(4, 8), [request([1, 2]), request([1, 2])]) == (1 / 4, 4 / 16)


def test_an_answer_that_the_trace_knows_is_found_by_the_next_turn():
    turn = TraceRequest(1, 0.0, 6, 3, range(9), 1, 9)  # 8 tokens are written: two blocks
    after = TraceRequest(2, 0.0, 12, 3, range(15), 1, 15)
    assert rates(ManagerReplay(4, 8), [turn, after]) == (2 / 5, 8 / 18)


def test_an_answers_last_token_fills_no_block():
    turn = TraceRequest(1, 0.0, 6, 2, range(8), 1, 8)  # 7 tokens are written: one block
    after = TraceRequest(2, 0.0, 12, 3, range(15), 1, 15)
    assert rates(ManagerReplay(4, 8), [turn, after]) == (1 / 5, 4 / 18)


def test_requests_that_exceed_the_pool_are_counted_and_find_nothing():
    replay = ManagerReplay(4, 2)
    two = [request([1, 2]), request([1, 2], output=2)]  # 8 tokens, and 9: an answer's last token is never run
    feed_all([request([1, 2, 3]), request([1]), *two], [replay])
    assert (replay.hits.too_long, replay.hits.requests, replay.hits.blocks) == (2, 4, 8)
    assert replay.manager.num_free == 2


def test_requests_without_ids_share_nothing():
    nothing = TraceRequest(1, None, 9, 4)
    assert rates(ManagerReplay(4, 8), [nothing, nothing]) == (0, 0)


@pytest.mark.parametrize(
    "make", [lambda: LRUReplay(0), lambda: ManagerReplay(4, 0), lambda: ManagerReplay(4, 4, count="bytes")]
)
def test_wrong_sizes(make):
    with pytest.raises(ValueError, match="must be"):
        make()


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=25)


@settings(max_examples=40, deadline=None)
@given(prompts, st.integers(5, 12))
def test_the_manager_agrees_with_a_plain_list_touched_tail_first(texts, num_blocks):
    """Ids are prefix-chained, so a prompt is a path in a tree; its id is the path."""
    paths = [[int("1" + "".join(map(str, text[: i + 1]))) for i in range(len(text))] for text in texts]
    cached, found, asked = OrderedDict(), 0, 0
    for path in paths:
        found += next((i for i, key in enumerate(path) if key not in cached), len(path))
        asked += len(path)
        for key in reversed(path):
            cached[key] = None
            cached.move_to_end(key)
        while len(cached) > num_blocks:
            cached.popitem(last=False)
    replay = ManagerReplay(4, num_blocks, count="ids")
    assert rates(replay, [request(path) for path in paths])[0] == found / asked


@given(st.lists(st.integers(1, 9), max_size=200), st.sampled_from([2, 4, 8]))
def test_a_curve_keeps_the_total_in_few_points(values, most):
    curve = Curve(most)
    for value in values:
        curve.add(value)
    assert sum(curve.points) == sum(values)
    assert len(curve.points) <= most
    assert curve.points == [sum(values[i : i + curve.stretch]) for i in range(0, len(values), curve.stretch)]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5), st.integers(1, 20)
)
def test_waste_adds_up_step_by_step(lengths, size):
    traffic = Traffic([size])
    for prompt, output in lengths:
        traffic.feed(TraceRequest(1, None, prompt, output))
    held = [prompt + done for prompt, output in lengths for done in range(output)]
    slots = sum(-(-tokens // size) * size for tokens in held)
    assert traffic.paged_waste(size) == pytest.approx(1 - sum(held) / slots)
    shares = traffic.reserved(100, 350)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["external"] == pytest.approx(50 / 350)
    assert shares["tokens"] == pytest.approx(sum(held) / len(held) / 100 * 300 / 350)


def test_a_reservation_must_hold_the_longest():
    traffic = Traffic()
    traffic.feed(TraceRequest(1, None, 30, 2))
    with pytest.raises(ValueError, match="a request has 32 tokens, 31 cannot hold it"):
        traffic.reserved(31)


def test_sessions_are_asked_from_each_models_second_request_on():
    sessions = SessionRates()
    told = [("a", "m", [1, 2]), ("a", "n", [9]), ("a", "m", [1, 3]), ("a", "m", [1, 2]), ("b", "m", [1, 2])]
    feed_all([request(ids, session=name, model=model) for name, model, ids in told], [sessions])
    assert sessions.rates() == {"a": (3 / 4, 2 / 4)}


# --- choosing


def hits(num_blocks, found, block_size=4):
    return Hits("manager", "tokens", block_size, num_blocks, tokens=1000, hit_tokens=found)


def test_the_smallest_pool_that_finds_nearly_all_is_enough():
    assert replays.enough_for_hits([hits(8, 100), hits(16, 381), hits(32, 400)]).num_blocks == 16
    assert replays.enough_for_hits([hits(8, 100), hits(16, 379), hits(32, 400)]).num_blocks == 32


def served(num_blocks, ttft, too_long=0):
    names = replays.Served.__dataclass_fields__
    values = dict.fromkeys(names, 0) | {"block_size": 4, "num_blocks": num_blocks, "too_long": too_long}
    return replays.Served(**(values | {"ttft": (ttft, ttft, ttft)}))


def test_a_pool_that_turns_requests_away_is_not_enough_however_quick():
    pools = [served(8, 0.1, too_long=3), served(16, 2.0), served(32, 1.09), served(64, 1.0)]
    assert replays.enough_for_serving(pools).num_blocks == 32


def test_the_largest_block_that_wastes_little_and_finds_as_much_is_best():
    traffic = Traffic([4, 16, 64])
    traffic.feed(TraceRequest(1, None, 500, 500))
    assert [traffic.paged_waste(size) > replays.WASTE for size in (4, 16, 64)] == [False, False, True]
    assert replays.best_block_size(traffic, [hits(8, 400, 4), hits(8, 395, 16)]) == 16
    assert replays.best_block_size(traffic, [hits(8, 400, 4), hits(8, 380, 16)]) == 4
    assert replays.best_block_size(traffic, []) == 16


@pytest.mark.parametrize(("longest", "total", "size", "blocks"), [
    (100, 700, 16, [8, 16, 32, 64]), (128, 128, 16, [8]), (1, 1, 16, [1]),
    (100, 10**9, 16, [8 * 2**i for i in range(8)]),
])  # fmt: skip
def test_pools_double_from_the_longest_request_until_all_fits(longest, total, size, blocks):
    assert replays.ladder(longest, total, size) == blocks


# --- on the clock


def arrivals(n=30):
    keys = [[k // 3 * 10, k // 3 * 10 + 1, 1000 + k] for k in range(n)]
    return [TraceRequest(k + 1, 0.2 * k, 12, 9, [*ids], 4, 12) for k, ids in enumerate(keys)]


def on_the_clock(num_blocks, **options):
    return replays.serve(arrivals(), 4, num_blocks, step_time=replays.StepTime(0.1), watermark=0.0, **options)


def test_a_small_pool_makes_requests_wait_and_a_large_one_does_not():
    small, large = on_the_clock(6), on_the_clock(200)
    assert (small.finished, large.finished) == (30, 30)
    assert small.ttft[0] > 5 * large.ttft[0]
    assert (large.preemptions, large.recomputed_tokens) == (0, 0)
    assert 0 < small.preempted <= small.preemptions
    assert small.most_used <= 6
    assert large.hit_tokens > 0
    assert len(small.curve["time"]) == len(small.curve["blocks"])


def test_swapping_computes_less_again():
    recompute, swap = on_the_clock(6), on_the_clock(6, swap=True)
    assert swap.preemptions > 0
    assert swap.recomputed_tokens < recompute.recomputed_tokens / 2


def test_requests_longer_than_the_pool_are_counted():
    result = replays.serve(arrivals(5), 4, 4)
    assert (result.finished, result.too_long, result.ttft) == (0, 5, (0.0, 0.0, 0.0))


def test_what_a_trace_does_not_tell_of_an_answer_is_the_requests_own():
    """A request that was preempted may find its own blocks again, and nobody else's."""
    a, b = replays.as_requests([request([1], prompt=6, output=8)] * 2, 4)
    assert [len(r.block_hashes) for r in (a, b)] == [3, 3]  # 13 tokens are written
    assert set(a.block_hashes) & set(b.block_hashes) == {1}
    assert next(replays.as_requests([TraceRequest(1, 0.0, 6, 8)], 4)).block_hashes is None


def test_a_rate_gives_times_to_a_trace_without_them():
    silent = [TraceRequest(k, None, 8, 2) for k in range(2000)]
    with pytest.raises(ValueError, match="does not tell when"):
        list(replays.as_requests(silent, 4))
    times = [r.arrival for r in replays.as_requests(silent, 4, rate=4.0)]
    assert times == sorted(times) == [r.arrival for r in replays.as_requests(silent, 4, rate=4.0)]
    assert np.mean(np.diff(times)) == pytest.approx(0.25, rel=0.1)


# --- published numbers

MOONCAKE = "mooncake/conversation_trace.jsonl"
SHARES = (0.01, 0.05, 0.10, 0.25, 0.50)


@pytest.fixture(scope="module")
def unique():
    counter = Unique(512)
    feed_all(published(MOONCAKE), [counter])
    assert len(counter) == 182_790
    return len(counter)


def test_mooncake_ladder_of_a_plain_lru(unique):
    pools = [LRUReplay(512, int(share * unique)) for share in SHARES] + [LRUReplay(512)]
    feed_all(published(MOONCAKE), pools)
    assert [int(1000 * pool.hits.block_rate) for pool in pools] == [52, 195, 278, 353, 363, 366]


def test_mooncake_ladder_through_the_manager(unique):
    """All pools under PAGEDKV_STRESS=1; else the middle one, and the smallest on a tenth against a plain list."""
    expected = dict(zip(SHARES, (0.0525, 0.1958, 0.2789, 0.3535, 0.3631), strict=True))
    chosen = SHARES if STRESS else (0.10,)
    pools = [ManagerReplay(512, int(share * unique), count="ids") for share in chosen]
    feed_all(published(MOONCAKE), pools)
    assert [round(pool.hits.block_rate, 4) for pool in pools] == [expected[share] for share in chosen]
    assert all(pool.manager.num_free == pool.manager.num_blocks for pool in pools)


def test_mooncake_figure_9_what_three_million_tokens_find_of_all():
    """Qin et al., FAST 2025, figure 9: a local cache of 3M tokens reaches 41 % of the highest hit rate.

    Full blocks count, as only they can be found. With 3 · 10^6 tokens in place of 3 · 2^20 it is 38.5 %.
    """
    pool, endless = ManagerReplay(512, 3 * 2**20 // 512, count="ids"), LRUReplay(512)
    for each in published(MOONCAKE):
        whole = each.prompt // 512
        feed_all([request(each.ids[:whole], size=512)], [pool, endless])
    assert pool.hits.hit_blocks / endless.hits.hit_blocks == pytest.approx(0.41, abs=0.025)


def test_agentic_sessions_as_published():
    sessions = SessionRates()
    feed_all(published("agentic_coding/sample.jsonl"), [sessions])
    rows = [
        line.split(",") for line in (TRACES / "agentic_coding/published_rates.csv").read_text("utf-8").split()
    ]
    told = {row[0]: (float(row[3]), float(row[2])) for row in rows[1:]}
    found = sessions.rates()
    assert len(found) == 27
    for name, (ever, same) in found.items():
        assert (100 * ever, 100 * same) == pytest.approx(told[name], abs=0.0501), name


def first_turns():
    """Conversations' first turns that OPT's 2,048 positions hold."""
    session = None
    for turn in published("sharegpt/sharegpt_8k_filtered_stats_llama2_tokenizer.csv"):
        if turn.session != session and turn.prompt + turn.output <= 2048:
            yield turn
        session = turn.session


def test_figure_2_of_the_paper_orca_max_and_paged():
    """OPT-13B on an A100 has 15,700 slots (table 1); everyone is given 2,048 of them."""
    traffic = Traffic([16])
    feed_all(first_turns(), [traffic])
    shares = {name: 100 * share for name, share in traffic.reserved(2048, 15_700).items()}
    assert shares == {
        "tokens": pytest.approx(20.4, abs=2),
        "reservation": pytest.approx(13.3, abs=2),
        "internal": pytest.approx(57.3, abs=2),
        "external": pytest.approx(8.9, abs=2),
    }
    assert 100 * (1 - traffic.paged_waste(16)) == pytest.approx(96.3, abs=2.5)


def test_cost_per_request_stays_flat_and_so_does_memory():
    """Counted, not timed: blocks in the index and sequences known never exceed the pool, however long the trace."""
    pool = ManagerReplay(512, 1827, count="ids")
    sizes = []
    for each in published(MOONCAKE, limit=12_031 if STRESS else 1_200):
        pool.feed(each)
        sizes.append(len(pool.manager.prefix_index))
    assert max(sizes) <= 1828
    assert pool.manager.seq_ids == []
    assert len(pool.hits.seconds.points) <= 128
