"""The scheduler by hand: small pools, every step written out. Tokens do not matter here, so none are given."""

import pytest
from pools import check_invariants, refs, state_of, table

from pagedkv import BlockManager, PagedKVCache, PoolExhausted
from pagedkv.serving import Request, Scheduler


class Server:
    """A scheduler over a bare manager; every request is given by its prompt's length and its new tokens."""

    def __init__(self, num_blocks, block_size=4, *, host_blocks=None, prefix_cache=False, **options):
        self.events = []
        self.manager = BlockManager(
            num_blocks, block_size, **({"prefix_cache": True} if prefix_cache else {})
        )
        if host_blocks is not None:
            options |= {"preemption": "swap", "host": BlockManager(host_blocks, block_size)}
        options = {"watermark": 0.0, **options}
        self.scheduler = Scheduler(self.manager, observers=[self.events.append], **options)

    def add(self, name, length=4, new=4, **options):
        return self.scheduler.add(Request(name, num_tokens=length, max_new_tokens=new, **options))

    def step(self, **options):
        """Schedule and advance: the step, and who finished."""
        step = self.scheduler.schedule()
        finished = self.scheduler.advance(step, **options)
        self.check()
        return step, [group.request.id for group in finished]

    def steps(self, n):
        return [self.step()[0] for _ in range(n)]

    def check(self):
        pools = [self.manager] + ([self.scheduler.host] if self.scheduler.host else [])
        for pool in pools:
            check_invariants(pool)
        order = [*self.scheduler.running, *self.scheduler.waiting]
        assert order == list(self.scheduler._groups.values()), (
            "the running are the oldest, all in their order"
        )

    def names(self, place):
        return [group.request.id for group in getattr(self.scheduler, place)]

    def told(self, kind):
        return [event for event in self.events if event.kind == kind]


def work(step):
    """What a step computes, as {request: (start, tokens per sequence)}."""
    return {chunk.request_id: (chunk.start, chunk.num_tokens) for chunk in step.chunks}


# --- batches, budgets, chunks


def test_a_request_joins_a_running_batch_and_leaves_it_without_the_others_waiting():
    server = Server(20)
    server.add("a", 5, new=4)
    assert work(server.step()[0]) == {"a": (0, 5)}
    server.add("b", 3, new=2)
    step, finished = server.step()
    assert (work(step), step.admitted, finished) == ({"a": (5, 1), "b": (0, 3)}, ("b",), [])
    step, finished = server.step()
    assert (work(step), finished) == ({"a": (6, 1), "b": (3, 1)}, ["b"])
    step, finished = server.step()
    assert (work(step), finished) == ({"a": (7, 1)}, ["a"])
    assert server.scheduler.unfinished == 0 and server.manager.num_free == 20
    assert server.manager.seq_ids == []


def test_a_group_tells_how_far_it_has_come():
    server = Server(4, token_budget=6)
    group = server.add("a", 8, new=2)
    assert repr(group) == "SequenceGroup('a', waiting: 0 of 8 tokens computed, 0 written)"
    server.steps(2)
    assert repr(group) == "SequenceGroup('a', running: 8 of 9 tokens computed, 1 written)"


def test_the_last_token_is_chosen_but_never_run():
    server = Server(2)
    server.add("a", 4, new=5)  # 8 positions fill both blocks; the ninth token needs none
    assert sum(step.prefill_tokens + step.decode_tokens for step in server.steps(5)) == 8
    assert server.scheduler.unfinished == 0


def test_one_new_token_takes_one_step():
    server = Server(2)
    server.add("a", 5, new=1)
    assert server.step()[1] == ["a"]


def test_a_long_prompt_is_computed_in_chunks_while_others_decode():
    server = Server(20, token_budget=6)
    server.add("a", 2, new=9)
    server.add("long", 12, new=2)
    server.add("c", 3, new=2)
    steps = server.steps(4)
    assert [work(step) for step in steps] == [
        {"a": (0, 2), "long": (0, 4)},
        {"a": (2, 1), "long": (4, 5)},
        {"a": (3, 1), "long": (9, 3), "c": (0, 2)},  # the rest of the budget goes to the next
        {"a": (4, 1), "long": (12, 1), "c": (2, 1)},
    ]
    assert [[chunk.samples for chunk in step.chunks] for step in steps] == [
        [True, False],
        [True, False],
        [True, True, False],
        [True, True, True],
    ]
    assert [(step.prefill_tokens, step.decode_tokens) for step in steps] == [(6, 0), (5, 1), (5, 1), (1, 2)]


def test_a_chunk_limits_what_one_prompt_gets():
    server = Server(20, token_budget=10, chunk=3)
    server.add("a", 8)
    server.add("b", 8)
    assert work(server.step()[0]) == {"a": (0, 3), "b": (0, 3)}


def test_max_batch_counts_sequences():
    server = Server(20, max_batch=3)
    server.add("a", 4, num_samples=2)
    server.add("b", 4, num_samples=2)
    server.add("c", 4)
    server.step()
    assert server.names("running") == ["a"] and server.names("waiting") == ["b", "c"]


def test_neither_overtakes_a_long_request_ahead_of_a_short_one():
    server = Server(8)
    server.add("first", 16, new=4)
    server.step()
    server.add("long", 20, new=2)
    server.add("short", 4, new=2)
    assert server.step()[0].admitted == ()
    assert server.names("waiting") == ["long", "short"]
    server.steps(2)
    step, _ = server.step()
    assert step.admitted == ("long", "short")


def test_an_admission_needs_room_for_its_whole_prompt_though_a_chunk_is_computed():
    server = Server(6, token_budget=4)
    server.add("a", 12, new=8)
    server.steps(3)
    server.add("b", 14, new=2)
    server.step()
    assert server.names("waiting") == ["b"]  # one chunk would fit, all four blocks would not


def test_the_watermark_keeps_room_for_the_next_tokens_of_the_others():
    for watermark, admitted in ((0.0, ("b",)), (0.25, ())):
        server = Server(8, watermark=watermark)
        server.add("a", 16, new=4)
        server.step()
        server.add("b", 8, new=4)  # a takes block 5, b would leave one
        assert server.step()[0].admitted == admitted


def test_alone_a_request_may_use_the_whole_pool_whatever_the_watermark():
    server = Server(4, watermark=0.5)
    server.add("a", 16, new=1)
    assert server.step()[1] == ["a"]


# --- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 17, "new": 1}, "needs up to 5 blocks, the pool has 4"),
        ({"length": 4, "new": 14}, "needs up to 5 blocks, the pool has 4"),
        ({"length": 6, "new": 4, "num_samples": 3}, "needs up to 7 blocks, the pool has 4"),
        ({"length": 2, "new": 2, "num_samples": 4}, "writes 4 texts side by side, a step takes 3"),
    ],
)
def test_what_could_never_be_computed_is_refused_at_once(options, message):
    server = Server(4, max_batch=3)
    with pytest.raises(ValueError, match=message):
        server.add("a", **options)
    assert server.scheduler.unfinished == 0
    server.add("a", 13, new=4)  # 16 positions: exactly the pool


def test_a_group_that_just_fits_when_it_shares_its_prompt_is_taken_and_finishes():
    server = Server(5)
    server.add("a", 8, new=5, num_samples=3)  # 2 shared blocks and 1 for each
    server.steps(5)
    assert server.scheduler.unfinished == 0 and server.told("preempt") == []


def test_positions_beyond_max_length_are_refused():
    scheduler = Scheduler(BlockManager(10, 4, max_length=12))
    scheduler.add(Request("a", num_tokens=8, max_new_tokens=5))
    with pytest.raises(ValueError, match="'b' needs 13 positions, max_length is 12"):
        scheduler.add(Request("b", num_tokens=8, max_new_tokens=6))


def test_names_in_use_are_refused():
    server = Server(8)
    server.manager.add("theirs")
    server.add("a")
    for name in ("a", "theirs"):
        with pytest.raises(ValueError, match=f"'{name}' exists already"):
            server.add(name)
    server.add("b", num_samples=2)
    with pytest.raises(ValueError, match=r"'b\.1' exists already"):
        server.add("b.1")


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_tokens": 0},
        {"num_tokens": -1},
        {"num_tokens": 2.5},
        {"prompt": []},
        {"prompt": [1.5]},
        {"prompt": [[1, 2]]},
        {"prompt": [1], "num_tokens": 1},
        {},
        {"num_tokens": 4, "max_new_tokens": 0},
        {"num_tokens": 4, "num_samples": 0},
        {"num_tokens": 4, "beam_width": 0},
        {"num_tokens": 4, "beam_width": 2, "num_samples": 2},
        {"num_tokens": 4, "arrival": -1.0},
        {"num_tokens": 4, "arrival": float("nan")},
        {"num_tokens": 4, "id": 1.5},
        {"num_tokens": 4, "id": None},
        {"num_tokens": 4, "id": True},
    ],
)
def test_a_request_that_makes_no_sense_is_a_value_error(wrong):
    with pytest.raises(ValueError):
        Request(**{"id": "a", **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"preemption": "swop"},
        {"preemption": "swap"},
        {"host": BlockManager(4, 4)},
        {"watermark": 1.0},
        {"watermark": -0.1},
        {"max_batch": 0},
        {"token_budget": 0},
        {"chunk": 0},
    ],
)
def test_a_scheduler_that_makes_no_sense_is_a_value_error(wrong):
    with pytest.raises(ValueError):
        Scheduler(BlockManager(4, 4), **wrong)


POOL = BlockManager(4, 4, max_length=16)


@pytest.mark.parametrize(
    ("pool", "host", "message"),
    [
        (POOL, POOL, "another pool of the same kind"),
        (POOL, PagedKVCache(4, 4, 2, 2), "another pool of the same kind"),
        (POOL, BlockManager(4, 8), "blocks of 8, the pool of 4"),
        (POOL, BlockManager(4, 4, max_length=15), "max_length is 15, the pool's 16"),
        (BlockManager(4, 4), POOL, "max_length is 16, the pool's None"),
        (PagedKVCache(4, 4, 2, 2), PagedKVCache(4, 4, 1, 2), "pages of the source"),
    ],
)
def test_a_host_that_could_not_take_what_the_pool_holds_is_refused_at_once(pool, host, message):
    with pytest.raises(ValueError, match=message):
        Scheduler(pool, preemption="swap", host=host)


def test_names_in_use_in_the_host_pool_are_refused():
    server = Server(4, host_blocks=4)
    server.scheduler.host.add("a")
    with pytest.raises(ValueError, match="'a' exists already"):
        server.add("a")


def test_without_requests_there_is_nothing_to_compute():
    server = Server(4)
    step = server.scheduler.schedule()
    assert step.chunks == () and server.scheduler.repeat(step, 9) is step
    assert server.scheduler.advance(step) == []


def test_a_step_is_advanced_once_and_before_the_next_is_scheduled():
    server = Server(4)
    server.add("a")
    step = server.scheduler.schedule()
    with pytest.raises(ValueError, match="has not been advanced"):
        server.scheduler.schedule()
    with pytest.raises(ValueError, match="request 'a' needs 1 tokens, got 2"):
        server.scheduler.advance(step, {"a": [1, 2]})
    server.scheduler.advance(step)
    for call in (server.scheduler.advance, server.scheduler.cancel):
        with pytest.raises(ValueError, match="not the step that was scheduled last"):
            call(step)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": {"a": [1]}}, "request 'g' needs 2 tokens, got 0"),
        ({"tokens": {"a": [1], "g": [1, 2, 3]}}, "request 'g' needs 2 tokens, got 3"),
        ({"tokens": {"a": [1], "g": [1, 2], "b": [1]}}, "tokens for request 'b', which has no part"),
        ({"parents": {"b": [0]}}, "parents for request 'b', which has no part"),
        ({"parents": {"g": [0]}}, r"request 'g' needs a row of its 2 for each, got \[0\]"),
        ({"parents": {"g": [0, 2]}}, "request 'g' needs a row of its 2 for each"),
        ({"stop": ["g"]}, "sequence 'g' chose no token in this step"),
        ({"stop": ["long"]}, "sequence 'long' chose no token in this step"),
    ],
)
def test_choices_that_do_not_fit_the_step_change_nothing(wrong, message):
    server = Server(20, token_budget=10)
    server.add("a", 4)
    server.add("g", 4, beam_width=2)
    server.add("long", 4)
    step = server.scheduler.schedule()
    before = state_of(server.manager), [vars(group).copy() for group in server.scheduler.running]
    with pytest.raises(ValueError, match=message):
        server.scheduler.advance(step, **wrong)
    assert before == (state_of(server.manager), [vars(group) for group in server.scheduler.running])
    server.scheduler.advance(step, {"a": [1], "g": [1, 2]}, stop=["a"])
    assert server.names("running") == ["g", "long"]


def test_blocks_in_other_hands_are_a_refusal_that_changes_nothing():
    server = Server(4)
    server.manager.add("theirs")
    server.manager.extend("theirs", 8)
    server.add("a", 12, new=4)
    for _ in range(2):
        with pytest.raises(PoolExhausted, match="requested 3, free 2"):
            server.scheduler.schedule()
    server.manager.free("theirs")
    assert server.step()[0].admitted == ("a",)


def test_one_that_outsiders_starve_gives_way_and_comes_back():
    server = Server(4)
    server.add("a", 4, new=8)
    server.step()
    server.manager.add("theirs")
    server.manager.extend("theirs", 12)
    step, _ = server.step()
    assert (step.chunks, step.preempted) == ((), ("a",))
    with pytest.raises(PoolExhausted):
        server.scheduler.schedule()
    server.manager.free("theirs")
    assert work(server.step()[0]) == {"a": (0, 5)}


# --- preemption


def full_pool(**options):
    """Three requests that fill a pool of 6 blocks of 4: each has 2 full ones and will need a third."""
    server = Server(6, **options)
    for name in "abc":
        server.add(name, 8, new=5)
    server.step()
    return server


def test_the_last_arrived_gives_way_and_heads_the_queue():
    server = full_pool()
    server.add("late", 4)
    step, _ = server.step()
    assert (work(step), step.preempted) == ({"a": (8, 1), "b": (8, 1)}, ("c",))
    assert server.names("waiting") == ["c", "late"]
    assert server.manager.num_free == 0
    (event,) = server.told("preempt")
    assert (event.seq_ids, event.counts) == (("c",), {"swapped": 0, "freed": 2})


def test_after_a_recompute_prompt_and_text_are_computed_again_in_one_go():
    server = full_pool()
    server.steps(4)  # a and b finish
    assert server.names("waiting") == ["c"]
    step, _ = server.step()
    assert work(step) == {"c": (0, 9)}  # its prompt, and the token that it had chosen
    assert (step.prefill_tokens, step.recomputed_tokens) == (9, 8)
    assert work(server.step()[0]) == {"c": (9, 1)}


def test_after_a_swap_it_goes_on_where_it_was():
    server = full_pool(host_blocks=2)
    server.step()
    assert [group.request.id for group in server.scheduler.swapped] == ["c"]
    assert server.scheduler.host.num_free == 0 and server.scheduler.host.seq_ids == ["c"]
    server.steps(3)
    step, _ = server.step()
    assert work(step) == {"c": (8, 1)}
    assert (step.decode_tokens, step.recomputed_tokens) == (1, 0)
    assert server.scheduler.host.num_free == 2 and server.scheduler.host.seq_ids == []


def test_without_room_in_the_host_pool_it_is_dropped_and_recomputed():
    server = full_pool(host_blocks=1)
    server.step()
    assert server.scheduler.swapped == [] and server.scheduler.host.num_free == 1
    assert server.told("preempt")[0].counts["swapped"] == 0
    server.steps(3)
    assert work(server.step()[0]) == {"c": (0, 9)}


def test_nobody_is_admitted_in_a_step_that_preempts():
    server = Server(9, block_size=1)
    server.add("a", 2, new=6)
    server.add("b", 6, new=4)
    server.step()
    server.add("tiny", 1, new=1)
    step, _ = server.step()  # 8 + 2 > 9: b gives 6 blocks back
    assert (step.preempted, step.admitted) == (("b",), ())


def test_a_group_gives_way_as_one_and_is_forked_again_when_it_comes_back():
    server = Server(6)
    server.add("a", 8, new=6)
    server.add("g", 6, new=4, num_samples=2)
    server.step()
    assert refs(server.manager)[:4] == [1, 1, 2, 2]
    assert work(server.step()[0]) == {"a": (8, 1), "g": (6, 1)}  # a takes a block, g copies one
    assert server.manager.num_free == 0
    server.steps(1)
    step, _ = server.step()  # g needs two blocks for position 8
    assert step.preempted == ("g",) and server.manager.num_free == 3
    server.steps(2)
    assert server.names("running") == []
    first, second = server.steps(2)
    assert work(first) == {"g": (0, 6)} and [chunk.seq_ids for chunk in first.chunks] == [("g.0",)]
    assert not first.chunks[0].samples  # what comes next was chosen before
    assert work(second) == {"g": (6, 3)} and [chunk.seq_ids for chunk in second.chunks] == [("g.0", "g.1")]
    assert server.scheduler.unfinished == 0  # the fourth token ends it


def test_a_group_swaps_out_and_in_with_its_sharing_kept():
    server = Server(6, host_blocks=3)
    server.add("a", 8, new=6)
    server.add("g", 6, new=4, num_samples=2)
    server.steps(4)
    assert [group.request.id for group in server.scheduler.swapped] == ["g"]
    assert refs(server.scheduler.host) == [2, 1, 1]
    server.steps(2)
    assert work(server.step()[0]) == {"g": (8, 1)}
    assert server.scheduler.unfinished == 0 and server.scheduler.host.num_free == 3


def test_samples_end_one_by_one():
    server = Server(7)
    group = server.add("g", 6, new=5, num_samples=3)
    server.step(tokens={"g": [1, 2, 3]})
    server.step(tokens={"g": [4, 5, 6]}, stop=["g.1"])
    assert (group.seq_ids, server.manager.num_free) == (["g.0", "g.2"], 4)
    step, finished = server.step(tokens={"g": [7, 8]}, stop=["g.0", "g.2"])
    assert finished == ["g"] and [chunk.seq_ids for chunk in step.chunks] == [("g.0", "g.2")]
    assert group.texts == {"g.0": [1, 4, 7], "g.1": [2, 5], "g.2": [3, 6, 8]}
    assert server.manager.num_free == 7


def test_beams_move_as_their_parents_say():
    server = Server(8)
    group = server.add("g", 5, new=4, beam_width=3)
    server.step(tokens={"g": [1, 2, 3]}, parents={"g": [0, 0, 0]})
    server.step(tokens={"g": [4, 5, 6]}, parents={"g": [0, 0, 1]})
    assert group.texts == {"g.0": [1, 4], "g.1": [1, 5], "g.2": [2, 6]}
    tables = server.manager.block_tables(group.seq_ids).tolist()
    assert tables[0] == tables[1] != tables[2]
    server.step(tokens={"g": [7, 8, 9]}, parents={"g": [2, 1, 0]})
    assert group.texts == {"g.0": [2, 6, 7], "g.1": [1, 5, 8], "g.2": [1, 4, 9]}


def test_two_that_cannot_run_together_do_not_preempt_each_other_for_ever():
    server = Server(6)
    for name in "abcd":
        server.add(name, 12, new=12)
    steps = 0
    while server.scheduler.unfinished:
        oldest = next(iter(server.scheduler._groups))
        step, _ = server.step()
        assert step.chunks[0].request_id == oldest, "the oldest advances in every step"
        steps += 1
    assert steps <= 4 * 12 + 4
    assert len(server.told("finish")) == 4


# --- abort and cancel


@pytest.mark.parametrize("host_blocks", [None, 2])
def test_abort_wherever_a_request_is(host_blocks):
    server = full_pool(host_blocks=host_blocks)
    server.add("fresh", 4)
    server.step()  # c gives way
    for name in ("fresh", "c", "a", "b"):  # waiting, preempted, running, running
        server.scheduler.abort(name)
        server.check()
        with pytest.raises(KeyError, match=name):
            server.scheduler.abort(name)
    assert server.scheduler.unfinished == 0
    assert server.manager.seq_ids == [] and server.manager.num_free == 6
    if host_blocks:
        assert server.scheduler.host.seq_ids == [] and server.scheduler.host.num_free == 2
    assert len(server.told("abort")) == 4


def test_abort_of_a_request_that_is_being_computed_waits_for_the_step():
    server = full_pool()
    step = server.scheduler.schedule()
    server.scheduler.abort("a")
    with pytest.raises(KeyError):
        server.scheduler.abort("a")
    assert server.manager.length("a") == 9  # the model may still write to its blocks
    assert server.scheduler.advance(step, {"b": [1]}) == []
    assert "a" not in server.manager.seq_ids and server.names("running") == ["b"]
    server.check()


def test_a_name_can_be_used_again_after_it_finished():
    server = Server(4)
    for _ in range(2):
        server.add("a", new=1)
        assert server.step()[1] == ["a"]


def test_a_cancelled_step_is_computed_again():
    server = Server(8, token_budget=6)
    server.add("a", 4, new=3)
    server.add("b", 6, new=3)
    server.step()
    free, step = server.manager.num_free, server.scheduler.schedule()
    server.scheduler.abort("b")
    server.scheduler.cancel(step)
    assert server.names("running") == ["a"] and server.manager.num_free == free + 1
    assert work(server.step()[0]) == {"a": (4, 1)}
    server.check()


def test_after_a_cancelled_step_blocks_are_found_under_their_own_hashes():
    server = Server(12, prefix_cache=True, token_budget=8)
    server.add("a", 12, new=9, block_hashes=[1, 2, 3, 4])
    server.scheduler.cancel(server.scheduler.schedule())
    server.steps(1)
    server.scheduler.cancel(server.scheduler.schedule())
    server.steps(9)
    assert server.scheduler.unfinished == 0
    for hashes, found in (([1, 2, 3, 4, 5], 16), ([2, 3, 4, 5, 6], 0), ([1, 2, 4, 5, 6], 8)):
        seq = server.manager.add(block_hashes=hashes, num_tokens=20)
        assert server.manager.match(seq) == found


# --- repeats


def test_repeated_steps_stop_before_anyone_finishes_or_a_block_is_missing():
    server = Server(6)
    server.add("a", 4, new=30 - 9)
    server.step()
    step = server.scheduler.repeat(server.scheduler.schedule(), 1000)
    assert step.repeat == 20
    assert [group.request.id for group in server.scheduler.advance(step)] == ["a"]

    server = full_pool()
    server.scheduler.abort("c")
    step = server.scheduler.repeat(server.scheduler.schedule(), 1000)
    assert (step.repeat, server.manager.lengths(["a", "b"]).tolist()) == (4, [12, 12])


def test_a_step_with_a_prompt_is_not_repeated():
    server = Server(6)
    server.add("a", 4)
    step = server.scheduler.schedule()
    assert server.scheduler.repeat(step, 10) is step


# --- the story: the wall of lesson 04, resolved

NIGHT = [ord(letter) for letter in "Good night"]


def said(names, letters):
    """The tokens that requests chose, a letter each."""
    return {name: [ord(letter)] for name, letter in zip(names, letters, strict=True)}


def at_the_wall():
    """a, b, c, d share the full blocks of Good night, each has its own third, and position 12 is next."""
    server = Server(8, prefix_cache=True)
    server.scheduler.add(Request("earlier", NIGHT, 1))
    server.step(tokens={"earlier": [ord("!")]})  # its blocks stay cached
    for name in "abcd":
        server.scheduler.add(Request(name, NIGHT, 8))
    for letters in (",!.;", "    ", "nnnn"):
        step, _ = server.step(tokens=said("abcd", letters))
    assert len(step.chunks) == 4 and server.manager.lengths([*"abcd"]).tolist() == [12] * 4
    return server


def test_at_the_wall_d_gives_way_and_one_of_its_three_blocks_becomes_free():
    server = at_the_wall()
    assert (server.manager.num_free, server.manager.blocks_needed([*"abcd"])) == (2, 4)
    assert (len(table(server.manager, "d")), server.manager.blocks_needed([*"abc"])) == (3, 3)
    step, _ = server.step(tokens=said("abc", "ooo"))
    assert (step.preempted, work(step)) == (("d",), dict.fromkeys("abc", (12, 1)))
    assert server.told("preempt")[0].counts["freed"] == 1
    assert server.manager.num_free == 0


def test_at_the_next_wall_c_gives_way():
    server = at_the_wall()
    for _ in range(4):
        server.step(tokens=said("abc", "ooo"))
    assert (server.manager.blocks_needed([*"abc"]), server.manager.num_free) == (3, 0)
    assert server.manager.blocks_needed([*"ab"]) == 2
    step, finished = server.step(tokens=said("ab", "oo"))
    assert (step.preempted, finished) == (("c",), ["a", "b"])
    assert server.told("preempt")[1].counts["freed"] == 2


def test_d_recomputes_four_of_its_twelve_tokens_with_prefix_reuse():
    server = at_the_wall()
    for names in ["abc"] * 4 + ["ab"]:
        server.step(tokens=said(names, names))
    assert server.names("waiting") == ["c", "d"]
    step = server.scheduler.schedule()
    assert work(step) == {"c": (8, 9), "d": (8, 5)}  # what they had, and the token that they had chosen
    assert [chunk.recomputed for chunk in step.chunks] == [8, 4]


def test_d_recomputes_all_twelve_without():
    server = Server(7)
    server.scheduler.add(Request("a", NIGHT, 4))
    server.scheduler.add(Request("d", NIGHT, 4))
    for letters in (",;", "  ", "nn"):
        server.step(tokens=said("ad", letters))
    assert server.manager.lengths([*"ad"]).tolist() == [12, 12]
    assert server.step()[0].preempted == ("d",)
    step, _ = server.step(tokens=said("d", "o"))
    assert work(step) == {"d": (0, 13)}
    assert step.recomputed_tokens == 12


def test_what_is_not_known_of_a_text_is_computed_behind_what_is():
    """A simulation knows a prompt, not the answer: the answer finds nothing in the cache, but has its place."""
    server = Server(8, prefix_cache=True)
    server.scheduler.add(Request("a", num_tokens=10, block_hashes=[1, 2], max_new_tokens=9))
    group = server.scheduler.add(Request("d", num_tokens=10, block_hashes=[3, 4], max_new_tokens=9))
    server.steps(3)
    while not server.step()[0].preempted:
        pass
    while not (step := server.step()[0]).admitted:
        pass
    assert work(step) == {"d": (8, 3)}  # of the 11 that are known by their hashes 8 were found
    assert work(server.step()[0]) == {"d": (11, 6)}
    assert group.hits == 0  # when it came, nothing was found


def test_salts_and_adapters_keep_blocks_apart():
    server = Server(20, prefix_cache=True)
    for name, apart, found in (
        ("a", {"cache_salt": "x"}, 0),
        ("b", {"cache_salt": "x"}, 8),
        ("c", {"cache_salt": "y"}, 0),
        ("d", {"cache_salt": "x", "adapter": "z"}, 0),
        ("e", {}, 0),
        ("f", {}, 8),
    ):
        for kind in ({"prompt": NIGHT}, {"num_tokens": 10, "block_hashes": [1, 2]}):
            group = server.scheduler.add(Request(name, **kind, **apart))
            server.step()
            assert (group.place, group.hits) == ("done", found), name


# --- events


def test_the_events_of_one_request():
    server = Server(4)
    server.add("a", 4, new=2)
    server.steps(2)
    assert [event.kind for event in server.events] == ["arrive", "admit", "schedule", "schedule", "finish"]
    assert server.told("schedule")[0].counts == {
        "prefill": 4,
        "decode": 0,
        "recomputed": 0,
        "running": 1,
        "waiting": 0,
        "free": 3,
    }
