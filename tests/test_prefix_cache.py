"""Texts, their digests and the index, as the manager and the cache offer them: what callers may say, and events."""

import copy

import numpy as np
import pytest
from pools import ManagerModel, Model, check_invariants, contents, new_cache, queue, refused, state_of

from pagedkv import BlockAllocator, BlockManager, KVStorage, PoolExhausted, Snapshot, StalePlan
from pagedkv.prefix_cache import PrefixStats, Text, root_link, tagged

# The two ends of the allocator's queue


def test_cached_blocks_wait_behind_the_plain_ones_least_recent_first():
    allocator = BlockAllocator(6)
    allocator.allocate(5)
    assert allocator.release([3, 2], cached=[2, 3]).tolist() == [3, 2]
    assert allocator.release([1, 0], cached=[0]).tolist() == [1, 0]
    assert (allocator.queue(), allocator.num_cached, allocator.num_free) == ([1, 5, 3, 2, 0], 3, 5)
    assert allocator.allocate(3).tolist() == [1, 5, 3]
    assert (allocator.queue(), allocator.num_cached) == ([2, 0], 2)


def test_a_block_is_cached_by_its_last_release_alone():
    allocator = BlockAllocator(2)
    allocator.share(allocator.allocate(2))
    allocator.release([0, 1], cached=[0])
    allocator.release([0, 1], cached=[1])
    assert (allocator.queue(), allocator.num_cached) == ([0, 1], 1)


def test_share_revives_a_cached_block_and_no_other_free_one():
    allocator = BlockAllocator(4)
    allocator.allocate(3)
    allocator.release([2, 1, 0], cached=[2, 1])
    allocator.share([1, 1])
    assert (allocator.ref_count(1), allocator.queue(), allocator.num_cached) == (2, [0, 3, 2], 1)
    with refused(allocator, ValueError, "block 0 is free"):
        allocator.share([2, 0])
    check_invariants(allocator)


@pytest.mark.parametrize("times", [0, -1, 1.5, "1", None, True])
def test_owners_are_added_a_whole_number_of_times(times):
    allocator = BlockAllocator(2)
    allocator.allocate()
    with refused(allocator, ValueError, "times"):
        allocator.share([0], times)


def test_several_owners_are_added_at_once():
    allocator = BlockAllocator(2)
    allocator.allocate(2)
    allocator.share([0, 1, 0], times=3)
    assert allocator.ref_counts.tolist() == [7, 4]


def test_forgetting_keeps_the_order_of_the_queue():
    allocator = BlockAllocator(6)
    allocator.allocate(5)
    allocator.release([4, 3, 2], cached=[2, 3, 4]), allocator.release([0])
    before = allocator.queue()
    allocator.forget_cached()
    assert (allocator.queue(), allocator.num_cached) == (before, 0)
    assert allocator.allocate(5).tolist() == before
    allocator.release([1])
    assert allocator.queue() == [1]


def test_an_eviction_is_part_of_the_event_of_its_allocation():
    events = []
    allocator = BlockAllocator(3, observers=[events.append])
    allocator.allocate(3), allocator.release([0, 1], cached=[1]), allocator.allocate(2)
    allocator.release([0, 2], cached=[2]), allocator.forget_cached()
    told = [(e.kind, {role: ids.tolist() for role, ids in e.blocks.items()}, e.counts) for e in events]
    assert told[2:] == [
        ("allocate", {"new": [0, 1], "evicted": [1]}, {"free": 0}),
        ("release", {"released": [0, 2], "freed": [0, 2]}, {"free": 2}),
        ("forget_cached", {"evicted": [2]}, {"free": 2}),
    ]
    assert events[-1].blocks["evicted"].dtype == np.int32


# What callers may say


@pytest.mark.parametrize(
    "prompt, says",
    [
        ({"tokens": [1.5]}, "tokens must be whole numbers"),
        ({"tokens": [True]}, "tokens must be whole numbers"),
        ({"tokens": ["1"]}, "tokens"),
        ({"tokens": [[1, 2]]}, "one row of token ids"),
        ({"tokens": 7}, "one row of token ids"),
        ({"tokens": "text"}, "one row of token ids"),
        ({"tokens": [None]}, "tokens"),
        ({"tokens": np.array([2**63], np.uint64)}, r"below 2\*\*63"),
        ({"tokens": [1], "block_hashes": [1], "num_tokens": 1}, "not by both"),
        ({"tokens": [1], "num_tokens": 1}, "go together"),
        ({"block_hashes": [1, 2]}, "go together"),
        ({"num_tokens": 4}, "go together"),
        ({"block_hashes": [1], "num_tokens": 9}, "9 tokens fill 2 blocks, got 1"),
        ({"block_hashes": [1, 2, 3, 4], "num_tokens": 9}, "got 4"),
        ({"block_hashes": [1, 2], "num_tokens": -8}, "-8"),
        ({"block_hashes": [1, 2], "num_tokens": 8.0}, "8.0"),
        ({"block_hashes": [1, 2.5], "num_tokens": 8}, "2.5"),
        ({"block_hashes": [1, None], "num_tokens": 8}, "None"),
        ({"block_hashes": [1, True], "num_tokens": 8}, "True"),
        ({"block_hashes": "ab", "num_tokens": 8}, "a row of hashes, got 'ab'"),
        ({"block_hashes": 7, "num_tokens": 8}, "a row of hashes, got 7"),
        ({"cache_salt": 7}, "cache_salt must be str or bytes, got 7"),
        ({"adapter": ["a"]}, "adapter must be str or bytes"),
    ],
)
def test_a_prompt_that_is_none_is_refused(prompt, says):
    manager = BlockManager(4, 4, prefix_cache=True)
    with refused(manager, ValueError, says):
        manager.add("a", **prompt)


@pytest.mark.parametrize("namespace", [{}, {"namespace": "model"}])
def test_digests_begin_with_all_that_keys_and_values_depend_on(namespace):
    """Every process must begin alike, or nothing is found in a store that several of them share."""
    manager = BlockManager(8, 4, **namespace)
    manager.add("a"), manager.add("b", cache_salt="x"), manager.add("c", cache_salt="x", adapter="y")
    expected = [
        root_link(4, **namespace, **who)
        for who in ({}, {"cache_salt": "x"}, {"cache_salt": "x", "adapter": "y"})
    ]
    assert [root.tobytes() for root in manager.snapshot().roots] == [root.digest for root in expected]


@pytest.mark.parametrize("namespace", [None, 7, ["m"]])
def test_a_namespace_is_a_name(namespace):
    with pytest.raises(ValueError, match="namespace must be str or bytes"):
        BlockManager(4, 4, namespace=namespace)


@pytest.mark.parametrize("value", [True, 1.5, ["x"]])
def test_a_field_of_another_type_is_refused(value):
    with pytest.raises(ValueError, match="name must be str, bytes or a whole number"):
        tagged(name=value)


def committed(**options):
    """A manager with a sequence "a" of 6 tokens in blocks of 4, of which 5 are committed, and an empty "b"."""
    manager = BlockManager(8, 4, prefix_cache=True, **options)
    manager.add("a", tokens=[1, 2, 3, 4, 5, 6, 7]), manager.add("b")
    manager.extend("a", 6)
    manager.commit("a", [1, 2, 3, 4, 5])
    return manager


@pytest.mark.parametrize(
    "seqs, tokens, options, says",
    [
        ("a", [6, 7], {}, "sequence 'a': it has room for 6 tokens, cannot commit 7"),
        ("a", [9], {}, "sequence 'a': it was announced with other tokens"),
        ("a", [6.0], {}, "whole numbers"),
        ("a", [6], {"block_hashes": [1]}, "not by both"),
        ("a", None, {"block_hashes": [1]}, "known by tokens, not by block_hashes"),
        ("b", None, {"block_hashes": [1]}, "0 full blocks, cannot commit 1"),
        ("b", [1], {}, "sequence 'b': it has room for 0 tokens"),
        (["a", "b"], [[6], [1]], {}, "sequence 'b'"),
        (["a", "b"], [6], {}, "one row for each of 2 sequences"),
        (["a", "b"], "67", {}, "one row for each"),
        (["a", "a"], [6, 6], {}, "named twice"),
    ],
)
def test_a_commit_that_cannot_be_changes_nothing(seqs, tokens, options, says):
    manager = committed()
    with refused(manager, ValueError, says):
        manager.commit(seqs, tokens, **options)


def test_a_trace_does_not_go_on_by_tokens_nor_by_other_hashes():
    manager = BlockManager(8, 4, prefix_cache=True)
    manager.add("t", block_hashes=["x", "y", "z"], num_tokens=10)
    manager.extend("t", None)
    for tokens, options, says in (
        ([1], {}, "known by block_hashes, not by tokens"),
        (None, {"block_hashes": ["x", "w"]}, "other block_hashes"),
        (None, {"block_hashes": ["x", "y", "z"]}, "2 full blocks, cannot commit 3"),
    ):
        with refused(manager, ValueError, says):
            manager.commit("t", tokens, **options)
    manager.commit("t", block_hashes=["x"])
    assert manager.is_cached(range(8)).tolist() == [True] + [False] * 7
    manager.commit("t")
    assert manager.is_cached(range(8)).tolist() == [True] * 2 + [False] * 6


def test_several_traces_go_on_by_a_row_of_hashes_each():
    manager = BlockManager(8, 4, prefix_cache=True)
    for seq in "ab":
        manager.add(seq)
    manager.extend(["a", "b"], [4, 9])
    for rows in (["x"], "xy"):
        with refused(manager, ValueError, "block_hashes must be one row for each of 2 sequences"):
            manager.commit(["a", "b"], block_hashes=rows)
    manager.commit(["a", "b"], block_hashes=[["x"], ["y", "z"]])
    assert manager.is_cached(range(4)).tolist() == [True, True, True, False]


def test_two_forks_cannot_say_different_things_about_one_block():
    manager = BlockManager(8, 4, prefix_cache=True)
    manager.add("a")
    manager.extend("a", 4)
    manager.fork("a", ["b"])
    with refused(manager, ValueError, "sequence 'b': its block 0 holds another text already"):
        manager.commit(["a", "b"], [[1, 2, 3, 4], [1, 2, 3, 5]])
    manager.commit("a", [1, 2, 3, 4])
    with refused(manager, ValueError, "another text"):
        manager.commit("b", [1, 2, 3, 5])
    manager.commit("b", [1, 2, 3, 4])
    check_invariants(manager)


def test_rows_of_different_lengths_are_committed_together():
    events = []
    manager = BlockManager(8, 4, prefix_cache=True, observers=[events.append])
    for seq in "ab":
        manager.add(seq)
    manager.extend(["a", "b"], [4, 9])
    manager.commit(["a", "b"], [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 12, 13]])
    sealed = events[-1].blocks["sealed"]
    assert sealed.dtype == np.int32 and sealed.tolist() == [0, 1, 2]


def test_commit_takes_a_row_or_a_number_per_sequence():
    models = [ManagerModel(8, 4, prefix_cache=True) for _ in range(3)]
    for model, rows in zip(models, ([[1, 2], [3, 4]], np.array([[1, 2], [3, 4]]), None), strict=True):
        for seq in "ab":
            model.pool.add(seq)
        model.pool.extend(["a", "b"], 2)
        if rows is not None:
            model.pool.commit(["a", "b"], rows)
        else:
            model.pool.commit(["a", "b"], [1, 3])
            model.pool.commit(["a", "b"], np.array([2, 4]))
    states = [state_of(model.pool) for model in models]
    texts = [
        {seq: (text["committed"], text["rest"]) for seq, text in state["texts"].items()} for state in states
    ]
    assert texts[0] == texts[1] == texts[2] and texts[0]["a"][0] == 2


@pytest.mark.parametrize("block", [-1, 8, 1.0])
def test_no_block_of_another_pool_is_cached(block):
    with pytest.raises(ValueError, match=f"block.*{block}"):
        committed().is_cached([0, block])


def test_commits_do_not_touch_versions():
    manager = committed()
    before = manager.versions(["a"])
    manager.commit("a", [6])
    assert manager.versions(["a"]) == before


@pytest.mark.parametrize("count, says", [(3, "can be 2 at most, got 3"), (-1, "-1"), (1.5, "1.5")])
def test_the_first_step_of_a_prompt_ends_with_the_prompt_at_most(count, says):
    """Whoever forgets the hit and asks for the whole prompt would otherwise get slots beyond it."""
    manager = BlockManager(8, 4, prefix_cache=True)
    manager.add("a", tokens=range(8)), manager.extend("a", None), manager.commit("a")
    manager.add("b", tokens=[*range(4), 9, 9])
    with refused(manager, ValueError, says):
        manager.extend("b", count)
    assert manager.extend("b", 2).start.tolist() == [4]


def test_none_is_what_the_prompt_still_lacks():
    manager = BlockManager(8, 4, prefix_cache=True)
    manager.add("a", tokens=range(7)), manager.add("b", tokens=range(5)), manager.add("c")
    manager.extend("a", 2)
    reservation = manager.extend(["a", "b", "c"], [None, None, 1])
    assert reservation.counts.tolist() == [5, 5, 1]
    assert manager.extend(manager.add(tokens=[7]), None).counts.tolist() == [1]
    for call in (lambda: manager.extend("a", None), lambda: manager.extend(["a", "c"], None)):
        with refused(manager, ValueError, "num_tokens"):
            call()


def test_a_prompt_that_has_begun_finds_nothing_more():
    manager = committed()
    assert manager.match("a") == 0


def test_a_first_step_of_one_token_attaches_what_is_cached_too():
    manager = committed()
    manager.add("c", tokens=[1, 2, 3, 4, 5, 6])
    assert manager.extend(["a", "c"]).start.tolist() == [6, 4]
    assert manager.prefix_stats.total_hits == 4


def test_a_first_step_of_two_tokens_is_too_long_for_a_prompt_of_one():
    manager = BlockManager(4, 4)
    manager.add("a", tokens=[7])
    with refused(manager, ValueError, "num_tokens can be 1 at most, got 2"):
        manager.extend("a", 2)


def test_a_block_of_its_own_that_is_cut_in_two_is_found_no_more():
    manager = BlockManager(8, 4, prefix_cache=True)
    for seq, prompt in (("a", [1, 2, 3, 4, 5]), ("b", [1, 2, 3, 4, 6, 7, 8, 9])):
        manager.add(seq, tokens=prompt), manager.extend(seq, None), manager.commit(seq)
    assert manager.block_tables(["a", "b"]).tolist() == [[0, 1], [0, 2]]
    manager.truncate("b", 6)
    assert manager.is_cached([0, 2]).tolist() == [True, False]


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_shared_block_that_is_cut_in_two_is_found_while_another_owns_it(tokens):
    manager = BlockManager(8, 4, prefix_cache=True)
    manager.add("a", tokens=range(8)), manager.extend("a", None), manager.commit("a")
    manager.fork("a", ["b", "c"]), manager.truncate("b", 6), manager.truncate("c", 6)
    manager.extend("b", tokens)  # into a copy
    assert manager.is_cached([1, 2]).tolist() == [True, False]
    manager.free("a")
    manager.extend("c", tokens)  # in place
    assert manager.is_cached([1]).tolist() == [False]


def test_a_prompt_of_which_nothing_is_asked_is_not_begun():
    manager = BlockManager(8, 4, prefix_cache=True)
    manager.add("a", tokens=range(8)), manager.extend("a", None), manager.commit("a")
    manager.add("b", tokens=range(8))
    assert manager.extend("b", 0).start.tolist() == [0]
    assert manager.length("b") == 0 and manager.match("b") == 4
    assert manager.prefix_stats.total_requests == 1


def test_a_refused_prompt_is_not_counted_and_its_hits_stay():
    manager = BlockManager(3, 4, prefix_cache=True)
    manager.add("a", tokens=range(8)), manager.extend("a", None), manager.commit("a"), manager.free("a")
    manager.add("b", tokens=[*range(8), *range(8)])
    with refused(manager, PoolExhausted):
        manager.extend("b", None)
    assert manager.prefix_stats.total_requests == 1


def test_two_prompts_of_one_step_revive_a_block_once():
    manager = BlockManager(8, 4, prefix_cache=True)
    manager.add("a", tokens=range(9)), manager.extend("a", None), manager.commit("a"), manager.free("a")
    manager.add("b", tokens=range(9)), manager.add("c", tokens=range(9))
    assert manager.blocks_needed(["b", "c"], None) == 2 + 2
    manager.extend(["b", "c"], None)
    assert manager.block_tables(["b", "c"]).tolist() == [[0, 1, 2], [0, 1, 3]] and manager.num_free == 4
    assert (manager.prefix_stats.queries, manager.prefix_stats.hits) == (27, 16)
    check_invariants(manager)


def test_a_last_block_that_a_prompt_of_the_same_step_finds_is_copied():
    manager = BlockManager(8, 4, prefix_cache=True)
    manager.add("a", tokens=range(8)), manager.extend("a", None), manager.commit("a")
    manager.fork("a", ["b"]), manager.truncate("b", 6), manager.free("a")
    manager.add("c", tokens=range(9))
    assert manager.is_cached([1]).all() and manager.extend(["b", "c"], [1, None]).copies.tolist() == [
        [1, 2, 2]
    ]
    assert manager.block_tables(["b", "c"]).tolist() == [[0, 2, -1], [0, 1, 3]]
    check_invariants(manager)


def test_a_fork_of_a_prompt_that_is_not_begun_begins_by_itself():
    manager = BlockManager(8, 4, prefix_cache=True)
    manager.add("a", tokens=range(5))
    manager.fork("a", ["b"])
    manager.extend("a", None), manager.commit("a")
    assert manager.match("b") == 4
    manager.extend("b", None), manager.commit("b")
    check_invariants(manager)


def test_after_a_reorder_each_text_goes_on_by_itself():
    manager = BlockManager(8, 4, prefix_cache=True)
    for seq in "ab":
        manager.add(seq), manager.extend(seq, 3), manager.commit(seq, [1, 2, 3])
    manager.reorder(["a", "b"], [0, 0])
    manager.extend(["a", "b"]), manager.commit(["a", "b"], [4, 5])
    for last in (4, 5):
        found = manager.add(tokens=[1, 2, 3, last, 0])
        assert manager.match(found) == 4
    check_invariants(manager)


def test_a_reset_begins_a_new_window_of_the_statistics():
    manager = BlockManager(8, 4, prefix_cache=True)
    for seq in "ab":
        manager.add(seq, tokens=range(5)), manager.extend(seq, None), manager.commit(seq)
    manager.free(["a", "b"])
    assert manager.prefix_stats.hit_rate == 0.4
    assert manager.reset_prefix_cache() and manager.prefix_stats.hit_rate == 0
    assert manager.prefix_stats.total_hits == 4


def test_a_text_that_begins_by_hashes_goes_on_by_hashes():
    manager = BlockManager(8, 4, prefix_cache=True)
    manager.add("a"), manager.extend("a", 9), manager.commit("a", block_hashes=["x"])
    with refused(manager, ValueError, "known by block_hashes, not by tokens"):
        manager.commit("a", [1, 2])
    manager.commit("a", block_hashes=["y"])
    assert manager.is_cached([0, 1, 2]).tolist() == [True, True, False]


# Events


def test_events_carry_hits_evictions_and_what_can_be_found():
    events = []
    manager = BlockManager(3, 4, prefix_cache=True, observers=[events.append])
    manager.add("a", tokens=range(8)), manager.extend("a", None), manager.commit("a"), manager.free("a")
    manager.add("b", tokens=[*range(4), 9]), manager.extend("b", None), manager.free("b")
    manager.add("c"), manager.extend("c", 12), manager.free("c"), manager.reset_prefix_cache()
    told = [(e.kind, {role: ids.tolist() for role, ids in e.blocks.items() if ids.size}) for e in events]
    assert [event for event in told if event[0] != "add"] == [
        ("extend", {"new": [0, 1]}),
        ("commit", {"sealed": [0, 1]}),
        ("free", {"freed": [1, 0]}),
        ("extend", {"new": [2], "hits": [0]}),
        ("free", {"freed": [2, 0]}),
        ("extend", {"new": [2, 1, 0], "evicted": [1, 0]}),
        ("free", {"freed": [0, 1, 2]}),
        ("reset_prefix_cache", {}),
    ]
    assert [e.counts["hit_tokens"] for e in events if e.kind == "extend"] == [0, 4, 0]


def test_a_step_of_decoding_is_told_in_full():
    """An observer sees the same roles and counts as for any other growth, a block that was evicted among them."""
    events = []
    manager = BlockManager(3, 4, prefix_cache=True, observers=[events.append])
    manager.add("old", tokens=range(4)), manager.extend("old", None), manager.commit("old")
    manager.add("a"), manager.extend("a", 4), manager.add("b"), manager.extend("b", 1)
    manager.free("old"), events.clear()
    manager.extend("b"), manager.extend(["b", "a"])
    assert [(e.kind, e.seq_ids, {role: ids.tolist() for role, ids in e.blocks.items()}) for e in events] == [
        ("extend", ("b",), {"new": [], "copies": [], "hits": [], "evicted": []}),
        ("extend", ("b", "a"), {"new": [0], "copies": [], "hits": [], "evicted": [0]}),
    ]
    assert [e.counts for e in events] == [
        {"tokens": 1, "free": 1, "hit_tokens": 0},
        {"tokens": 2, "free": 0, "hit_tokens": 0},
    ]


def test_a_restore_tells_whose_texts_it_evicts():
    events = []
    manager = BlockManager(2, 4, prefix_cache=True, observers=[events.append])
    manager.add("old", tokens=range(4)), manager.extend("old", None), manager.commit("old")
    manager.free("old"), manager.restore(committed().snapshot(["a"]))
    assert {role: ids.tolist() for role, ids in events[-1].blocks.items()} == {"new": [1, 0], "evicted": [0]}


# The cache: pages


def test_cached_pages_keep_their_numbers_until_they_are_taken_for_another_text():
    model = Model(3, 4, prefix_cache=True)
    text = list(range(10, 18))
    model.start(text, "a")
    model.free("a")
    assert model.num_cached == 2
    model.check()  # cached pages hold numbers, plain free ones NaN
    model.pool.add("b")
    model.tokens["b"] = []
    model.append("b", 9)  # evicts both; the last block has one token
    for array in model.pool.storage.arrays.values():
        last = array[:, model.table("b")[-1]]
        assert np.isnan(last[:, 1:]).all(), "the unfilled slots of an evicted block still hold its old text"
    model.free("b")
    model.check()


def test_a_copy_into_an_evicted_block_leaves_no_old_numbers_behind_it():
    model = Model(3, 4, prefix_cache=True)
    model.start(list(range(8)), "old")
    model.free("old")
    model.alloc(2, "a")
    model.fork("a", ["b"])
    (copied,) = model.append("b").copies.tolist()
    assert copied[1] == 1
    assert np.isnan(model.pool.storage.arrays["keys"][:, copied[1], 3:]).all()


def test_a_reset_poisons_what_was_cached():
    model = Model(3, 4, prefix_cache=True)
    model.start(list(range(8)), "a")
    model.free("a")
    assert model.pool.reset_prefix_cache()
    assert np.isnan(model.pool.storage.arrays["keys"]).all()


def test_a_hit_reads_what_the_first_sequence_wrote():
    model = Model(8, 4, prefix_cache=True)
    text = list(range(50, 60))
    model.start(text, "a")
    model.free("a")
    model.start(text, "b")
    assert model.read("b") == contents(model.pool.manager._texts["b"].root.digest, text)
    assert model.pool.prefix_stats.hits == 8


# Snapshots


def packed(**changes):
    """A snapshot of a sequence "a" (6 tokens, 5 committed, 7 announced) as a dict of arrays."""
    taken = vars(committed().snapshot(["a"]))
    return Snapshot(**{**taken, **changes})


def test_a_snapshot_says_what_is_known_of_a_text():
    taken = packed()
    assert taken.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7] and taken.token_indptr.tolist() == [0, 7]
    assert (taken.committed.tolist(), taken.prompts.tolist()) == ([5], [7])
    assert taken.digests.shape == (1, 32) and taken.roots.shape == (1, 32)
    assert all(
        isinstance(a, np.ndarray) for n, a in vars(taken).items() if n not in ("block_size", "seq_ids")
    )


@pytest.mark.parametrize("keeps", [True, False])
def test_a_text_goes_on_where_it_was_after_a_move(keeps):
    """Also through a pool without a prefix cache: a host pool need not find anything."""
    here, host = committed(), BlockManager(8, 4, prefix_cache=keeps)
    host.restore(here.snapshot(["a"]))
    here.free("a")
    assert host.is_cached([0]).tolist() == [keeps]
    back = BlockManager(8, 4, prefix_cache=True)
    back.restore(host.snapshot())
    assert back.extend("a", None).start.tolist() == [6]
    back.commit("a")
    back.add("c", tokens=[1, 2, 3, 4, 5])
    assert back.match("c") == 4
    with refused(back, ValueError, "room for 7 tokens"):
        back.commit("a", [8])
    check_invariants(back)


def test_a_trace_moves_too():
    manager, other = (BlockManager(8, 4, prefix_cache=True) for _ in range(2))
    manager.add("t", block_hashes=[5, 6, 7], num_tokens=11), manager.extend("t", 6), manager.commit("t")
    other.restore(manager.snapshot())
    assert other.extend("t", None).counts.tolist() == [5]
    other.commit("t"), other.extend("t", 1), other.commit("t", block_hashes=[7])
    other.add("u", block_hashes=[5, 6, 7, 8], num_tokens=16)
    assert other.match("u") == 12


def test_an_announced_prompt_moves_before_it_is_begun():
    manager, other = (BlockManager(8, 4, prefix_cache=True) for _ in range(2))
    manager.add("a", tokens=range(9), cache_salt="x")
    for pool in (manager, other):
        pool.add("first", tokens=range(9), cache_salt="x"), pool.extend("first", None), pool.commit("first")
    manager.free("first")
    other.restore(manager.snapshot())
    assert other.match("a") == 8


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"tokens": None}, "the snapshot has no tokens"),
        ({"roots": np.zeros((1, 31), np.uint8)}, r"roots must be uint8 \(n, 32\)"),
        ({"digests": np.zeros((1, 32), np.int64)}, "digests must be uint8"),
        ({"digests": np.zeros((1, 32), np.uint8)}, "sequence 'a': its digests are not those of its tokens"),
        ({"tokens": np.array([1, 2, 3, 9, 5, 6, 7])}, "not those of its tokens"),
        ({"tokens": np.array([1.0])}, "tokens must be whole numbers"),
        ({"tokens": np.arange(6), "token_indptr": np.array([0, 6])}, "6 tokens are not 7"),
        ({"token_indptr": np.array([0, 6])}, "must rise from 0 to 7"),
        ({"token_indptr": np.array([7, 0])}, "must rise from 0 to 7"),
        ({"token_indptr": np.array([0])}, "must rise"),
        ({"digest_indptr": np.array([0, 2])}, "must rise from 0 to 1"),
        ({"committed": np.array([7])}, "7 of 6 tokens cannot be committed"),
        ({"committed": np.array([-1])}, "cannot be committed"),
        ({"committed": np.array([5, 5])}, "as many roots, committed and prompts"),
        ({"prompts": np.array([-7])}, "announced"),
        ({"prompts": np.array([8])}, "7 tokens are not 8"),
        ({"roots": np.zeros((2, 32), np.uint8)}, "as many roots"),
        (
            {"tokens": np.zeros(0, int), "token_indptr": np.array([0, 0])},
            "1 digests do not fit 7 tokens|committed",
        ),
    ],
)
def test_a_text_that_does_not_fit_its_sequence_is_refused(changes, says):
    manager = BlockManager(8, 4, prefix_cache=True)
    with refused(manager, ValueError, says):
        manager.restore(packed(**changes))


def test_two_texts_that_share_a_block_must_agree_on_it():
    source, target = (BlockManager(8, 4, prefix_cache=True) for _ in range(2))
    for seq, prompt in (("a", [1, 2, 3, 4, 5]), ("b", [6, 7, 8, 9, 10])):
        source.add(seq, tokens=prompt), source.extend(seq, None), source.commit(seq)
    taken = vars(source.snapshot())
    assert taken["indices"].tolist() == [0, 1, 2, 3]
    with refused(target, ValueError, "sequence 'b': another text shares its block 0"):
        target.restore(Snapshot(**{**taken, "indices": np.array([0, 1, 0, 3])}))
    target.restore(Snapshot(**taken))


def test_a_snapshot_without_texts_has_none():
    taken = packed()
    bare = Snapshot(taken.block_size, taken.seq_ids, taken.indptr, taken.indices, taken.lengths)
    manager = BlockManager(8, 4, prefix_cache=True)
    manager.restore(bare)
    manager.commit("a", [1, 2, 3, 4])  # whoever knows the text may say it from the beginning
    manager.add("b", tokens=[1, 2, 3, 4, 5])
    assert manager.match("b") == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.append("a", 1),
        lambda s: s.truncate("a", 3),
        lambda s: s.free("a"),
        lambda s: s.reorder(["a", "b"], [1, 1]),
    ],
    ids=["append", "truncate", "free", "reorder"],
)
def test_a_snapshot_of_sequences_that_changed_since_is_refused(change):
    source, target = Model(8, 4), new_cache(8, 4)
    source.alloc(6, "a"), source.alloc(2, "b")
    taken = source.pool.snapshot(["a"])
    change(source)
    with refused(target, StalePlan, "'a'"):
        target.restore(taken, source.pool)
    if "a" in source.tokens:
        assert len(target.restore(source.pool.snapshot(["a"]), source.pool)) == len(source.table("a"))


def test_pages_alone_have_no_versions_to_compare():
    source, target = Model(8, 4), Model(8, 4)
    source.alloc(6, "a")
    taken, pages = source.pool.snapshot(["a"]), copy.deepcopy(source.pool.storage)
    source.append("a")
    assert isinstance(pages, KVStorage) and len(target.pool.restore(taken, pages)) == 2


# Odds and ends


def test_a_long_text_can_be_copied():
    """A chain of digests is as deep as the text is long: no recursion may follow it."""
    manager = BlockManager(5000, 1, prefix_cache=True)
    manager.add("a", tokens=range(5000)), manager.extend("a", None), manager.commit("a")
    twin = copy.deepcopy(manager)
    twin.add("b", tokens=range(4000))
    assert twin.match("b") == 3999 and len(repr(twin._texts["a"].tip)) < 20
    manager.restore(BlockManager(1, 1).snapshot())
    assert queue(manager) == []


def test_a_text_copies_by_reference():
    text = Text(root_link(4))
    text.announce(b"\0" * 64, 4, hashed=True)
    twin = text.copy()
    twin.cut(4, 4)
    assert (text.prompt_length, twin.prompt_length) == (8, 4) and len(text.digests) == 2


def test_the_window_of_the_statistics_keeps_at_least_one_step():
    stats = PrefixStats(window=2)
    stats.observe(5, 10, 5)
    assert stats.hit_rate == 0.5 and stats.requests == 5
    stats.observe(1, 10, 0)
    assert stats.hit_rate == 0.0 and stats.requests == 1
