"""Sequences over one pool, accounting only: ids, growth, sharing, shrinking, moving, events."""

import numpy as np
import pytest
from pools import ManagerModel, check_invariants, queue, refs, refused, table

from pagedkv import BlockManager, PoolExhausted, Snapshot


@pytest.mark.parametrize("number", [0, -1, 2.5, "4", True, None])
@pytest.mark.parametrize("name", ["num_blocks", "block_size"])
def test_sizes_are_whole_numbers_of_at_least_one(name, number):
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got {number!r}"):
        BlockManager(**{"num_blocks": 4, "block_size": 4, name: number})


def test_more_slots_than_int32_can_number_are_refused_before_they_are_made():
    with pytest.raises(ValueError, match="exceed the 2\\*\\*31 slots"):
        BlockManager(2**40, 16)
    with pytest.raises(ValueError, match="2049 blocks of 1048576 exceed"):
        BlockManager(2049, 2**20)
    assert BlockManager(2048, 2**20).num_free == 2048


def test_ids_are_given_or_counted_and_never_counted_twice():
    manager = BlockManager(4, 4)
    manager.add(1)
    assert [manager.add(), manager.add("text"), manager.add(), manager.add(np.int64(9))] == [0, "text", 2, 9]
    manager.free(2)
    assert manager.add() == 3
    assert manager.fork(0, 2) == [4, 5] and manager.fork(0) == [6]
    assert manager.seq_ids == [1, 0, "text", 9, 3, 4, 5, 6]
    assert type(manager.seq_ids[3]) is int


@pytest.mark.parametrize("seq_id", [2.5, b"x", True, np.True_, ("a",), [1], {}])
def test_an_id_of_another_type_is_refused(seq_id):
    manager = BlockManager(4, 4)
    with refused(manager, ValueError, "a sequence id must be an int or a str, got"):
        manager.add(seq_id)


@pytest.mark.parametrize("seq_id", ["gone", 7, 2.5, None, ("a",), [1]])
def test_a_sequence_that_is_not_there_is_named(seq_id):
    """A freed sequence included: a late second free must not touch who has its block now."""
    manager = BlockManager(4, 4)
    manager.add("here")
    manager.add("gone")
    manager.extend("gone")
    manager.free("gone")
    manager.extend("here")  # takes the block
    for call in (
        manager.length,
        manager.fork,
        lambda s: manager.truncate(s, 0),
        lambda s: manager.free(["here", s]),
    ):
        with refused(manager, KeyError, "never added, or freed already") as caught:
            call(seq_id)
        assert repr(seq_id) in str(caught.value)


def test_nothing_to_do_is_done():
    manager = BlockManager(2, 4)
    reservation = manager.extend([])
    assert reservation.slots.tolist() == [] and reservation.copies.shape == (0, 3)
    assert manager.free([]).tolist() == manager.reorder([], []).tolist() == []
    assert manager.block_tables([]).shape == (0, 0)
    assert manager.restore(manager.snapshot([])).shape == (0, 2)
    manager.add("a")
    before = manager.versions(["a"])
    for call in (
        lambda: manager.extend("a", 0),
        lambda: manager.truncate("a", 0),
        lambda: manager.release_before("a", 0),
    ):
        call()
    assert manager.versions(["a"]) == before, "what did not change stays current"
    check_invariants(manager)


def test_adding_takes_no_block():
    manager = BlockManager(1, 4)
    for _ in range(20):
        manager.add()
    assert manager.num_free == 1


@pytest.mark.parametrize(
    "counts",
    [
        *[-1, 1.5, 1.0, "1", True, None, [1], [1, 2, 3], [1, -1], [1, 1.5], [[1, 2]], 2**31, [2**62] * 2],
        *[np.ones(2), np.ones(2, bool), np.ones(1, int), np.ones((2, 1), int)],
    ],
)
@pytest.mark.parametrize("length", [0, 1])
def test_a_wrong_number_of_tokens_is_named(counts, length):
    manager = BlockManager(4, 4)
    manager.add("a"), manager.add("b")
    manager.extend(["a", "b"], length)
    for call in (manager.extend, manager.blocks_needed, manager.can_extend):
        with refused(manager, ValueError, "num_tokens"):
            call(["a", "b"], counts)


def test_a_batch_mixes_prefill_and_decode_all_or_nothing():
    model = ManagerModel(5, 4)
    model.alloc(3, "a"), model.add("b")
    reservation = model.append(["b", "a"], [9, 1])
    assert reservation.seq_ids == ("b", "a")
    assert reservation.start.tolist() == [0, 3] and reservation.counts.tolist() == [9, 1]
    assert model.table("b") == [1, 2, 3] and reservation.slots.tolist() == [*range(4, 13), 3]
    assert reservation.versions.tolist() == model.pool.versions(["b", "a"]).tolist()
    with refused(model.pool) as caught:
        model.append(["a", "b"], [1, 4])  # 1 + 1 blocks, 1 is free
    assert (caught.value.requested, caught.value.available) == (2, 1)


@pytest.mark.parametrize("counts", [[1, 1], [1, 2], [2, 2], [0, 1], [2, 0]])
def test_numbers_of_tokens_may_be_an_array(counts):
    manager = BlockManager(4, 4)
    for seq in "ab":
        manager.add(seq), manager.extend(seq, 3)
    assert manager.extend(["a", "b"], np.array(counts)).counts.tolist() == counts
    assert manager.lengths(["a", "b"]).tolist() == [3 + counts[0], 3 + counts[1]]
    assert manager.extend(["a", "b"], np.int64(2)).counts.tolist() == [2, 2]


def test_a_question_may_name_a_sequence_twice():
    manager = BlockManager(4, 4)
    manager.add("a"), manager.extend("a", 3)
    assert manager.lengths(["a", "a"]).tolist() == [3, 3]
    assert manager.block_tables(["a", "a"]).tolist() == [[0], [0]]


def test_max_length_is_the_last_position_not_rounded_to_a_block():
    model = ManagerModel(9, 4, max_length=10)
    model.alloc(9, "a")
    model.append("a")
    with refused(model.pool, ValueError, "sequence 'a' would hold 11 tokens, max_length is 10"):
        model.append("a")
    assert model.table("a") == [0, 1, 2]
    model.alloc(9, "b"), model.alloc(8, "c")
    with refused(model.pool, ValueError, "sequence 'b' would hold 11 tokens"):
        model.append(["c", "b"], 2)
    assert len(model.append("c", 2).slots) == 2, "the last position can be had"


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_csr_tables_at_every_boundary(block_size):
    manager, bs = BlockManager(40, block_size), block_size
    lengths = sorted({0, 1, bs - 1, bs, bs + 1, 2 * bs - 1, 2 * bs, 2 * bs + 1})
    manager.extend([manager.add(str(n)) for n in lengths], lengths)
    ids = [str(n) for n in lengths]
    indptr, indices, last = manager.to_csr(ids)
    assert {array.dtype for array in (indptr, indices, last)} == {np.dtype(np.int32)}
    for i, n in enumerate(lengths):
        pages = indices[indptr[i] : indptr[i + 1]].tolist()
        assert pages == table(manager, ids[i])[: len(pages)] and len(pages) == -(-n // bs)
        assert last[i] == (n - (len(pages) - 1) * bs if n else 0)


def test_two_sequences_that_write_into_their_shared_block_copy_once():
    """All r owners write: r − 1 copies, the last writes in place. m < r owners write: m copies."""
    for writers, copies in ((1, 1), (2, 2), (3, 3), (4, 3)):
        model = ManagerModel(8, 4)
        model.alloc(3, 0)
        model.fork(0, 3)
        assert len(model.append([0, 1, 2, 3][:writers]).copies) == copies


def test_each_writer_takes_its_copy_before_its_new_blocks():
    model = ManagerModel(8, 4)
    model.alloc(3, "a")
    model.fork("a", ["b", "c", "d"])
    assert model.append(["a", "b", "c"], [1, 6, 1]).copies.tolist() == [[0, 1, 3], [0, 2, 3], [0, 5, 3]]
    assert [model.table(seq) for seq in "abcd"] == [[1], [2, 3, 4], [5], [0]]


def test_a_step_of_decoding_is_granted_as_any_growth():
    model = ManagerModel(4, 4)
    model.alloc(4, "a"), model.alloc(2, "b")
    reservation = model.append(["b", "a"])
    assert reservation.seq_ids == ("b", "a") and reservation.copies.shape == (0, 3)
    assert reservation.start.tolist() == [2, 4] and reservation.counts.tolist() == [1, 1]
    assert reservation.slots.dtype == np.int32 and reservation.slots.tolist() == [6, 8]
    assert reservation.versions.tolist() == model.pool.versions(["b", "a"]).tolist()


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_full_last_block_is_not_copied(tokens):
    model = ManagerModel(4, 4)
    model.alloc(4, "a")
    model.fork("a", ["b"])
    assert len(model.append(["a", "b"], tokens).copies) == 0


def test_who_writes_nothing_copies_nothing():
    model = ManagerModel(4, 4)
    model.alloc(3, "a")
    model.fork("a", ["b"])
    assert model.append(["a", "b"], [0, 1]).copies.tolist() == [[0, 1, 3]]
    assert (model.table("a"), model.table("b")) == ([0], [1])


def test_reorder_takes_references_before_it_drops_any():
    model = ManagerModel(2, 4)
    model.alloc(4, "a"), model.alloc(4, "b")
    assert model.reorder(["a", "b"], [1, 0]) == [], "a swap frees nothing, even in a full pool"
    assert (model.table("a"), model.table("b")) == ([1], [0])


@pytest.mark.parametrize(
    "parents", [[0], [0, 1, 1], [0, 2], [-1, 0], [0.0, 1.0], ["0", "1"], [[0, 1]], [True, False]]
)
def test_parents_that_are_none_are_refused(parents):
    model = ManagerModel(4, 4)
    model.alloc(3, "a"), model.alloc(3, "b")
    with refused(model.pool, ValueError, "parents must be"):
        model.reorder(["a", "b"], parents)


def test_truncate_cannot_end_in_a_block_that_was_left_behind():
    model = ManagerModel(4, 4)
    model.alloc(10, "a")
    assert model.release_before("a", 9) == [1, 0]
    assert model.table("a") == [-1, -1, 2]
    with refused(model.pool, ValueError, "position 6 of sequence 'a' was left behind"):
        model.truncate("a", 7)
    assert model.truncate("a", 8) == [2], "a cut between blocks needs none"
    model.append("a")
    assert model.table("a") == [-1, -1, 2]


def test_a_fork_into_nobody_changes_nothing():
    manager = BlockManager(8, 4)
    manager.add("a")
    manager.extend("a", 6)
    before = refs(manager), manager.seq_ids, queue(manager)
    assert manager.fork("a", []) == []
    assert (refs(manager), manager.seq_ids, queue(manager)) == before
    manager.extend("a", 1)  # and the last block is still its own
    assert manager.num_free == 6


@pytest.mark.parametrize("children", [0, -1, 1.5, None, True])
def test_a_parent_has_a_whole_number_of_children(children):
    manager = BlockManager(8, 4)
    manager.add("a")
    with refused(manager, ValueError, f"^the number of children must be .* at least 1, got {children!r}"):
        manager.fork("a", children)


def test_a_window_moves_over_a_fork():
    model = ManagerModel(6, 4)
    model.alloc(10, "a")
    model.fork("a", ["b"])
    assert model.release_before("a", 8) == []
    assert model.release_before("a", 8) == [], "twice is once"
    assert refs(model.pool) == [1, 1, 2, 0, 0, 0]
    model.append("a")
    assert model.free("b") == [2, 1, 0]


def snapshot(**changes):
    """Two sequences that share block 5, then own one each: 6 and 4 + 1 tokens in blocks of 4."""
    arrays = {
        "block_size": 4,
        "seq_ids": ("a", "b"),
        "indptr": np.array([0, 2, 4]),
        "indices": np.array([5, 2, 5, 9]),
        "lengths": np.array([6, 5]),
    }
    return Snapshot(**{**arrays, **changes})


def test_restore_builds_the_tables_and_the_sharing():
    manager = BlockManager(4, 4)
    pairs = manager.restore(snapshot())
    assert pairs.dtype == np.int32 and pairs.tolist() == [[5, 0], [2, 1], [9, 2]]
    assert table(manager, "a") == [0, 1] and table(manager, "b") == [0, 2]
    assert refs(manager) == [2, 1, 1, 0]
    check_invariants(manager)


def test_a_snapshot_is_plain_arrays_that_later_steps_do_not_touch():
    model = ManagerModel(4, 4)
    model.alloc(5, "a")
    model.fork("a", ["b"])
    taken = model.pool.snapshot()
    assert (taken.block_size, taken.seq_ids) == (4, ("a", "b"))
    model.append(["a", "b"])
    assert [taken.indptr.tolist(), taken.indices.tolist(), taken.lengths.tolist()] == [
        [0, 2, 4],
        [0, 1, 0, 1],
        [5, 5],
    ]


def test_restore_keeps_what_a_window_left_behind():
    source, target = ManagerModel(4, 4), ManagerModel(4, 4)
    source.alloc(10, "a"), source.release_before("a", 8)
    assert target.swap_in(source, ["a"]) == [[2, 0]]
    assert target.table("a") == [-1, -1, 0]


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"block_size": 8}, "blocks of 8, this pool 4"),
        ({"block_size": "4"}, "blocks of '4', this pool 4"),
        ({"lengths": np.array([4, 5])}, "sequence 'a' has 2 pages for 4 tokens"),  # 0 in the last page
        ({"lengths": np.array([9, 5])}, "sequence 'a' has 2 pages for 9 tokens"),  # block_size + 1
        ({"lengths": np.array([-1, 5])}, "for -1 tokens"),
        ({"lengths": np.array([6.0, 5.0])}, "lengths must be whole numbers"),
        ({"lengths": np.array([6])}, "2 lengths"),
        ({"indices": np.array([5, 5, 5, 9])}, r"sequence 'a' has an impossible table \[5, 5\]"),
        ({"indices": np.array([5, -2, 5, 9])}, r"impossible table \[5, -2\]"),
        ({"indices": np.array([5, -1, 5, 9])}, r"impossible table \[5, -1\]"),
        ({"indices": np.array([5, 2, 5])}, "indptr must rise from 0 to 3"),
        ({"indices": np.array([[5], [2], [5], [9]])}, r"shape \(4, 1\)"),
        ({"indices": np.array([5.0, 2.0, 5.0, 9.0])}, "indices must be whole numbers"),
        ({"indptr": np.array([0, 5, 4])}, "indptr must rise"),
        ({"indptr": np.array([1, 2, 4])}, "indptr must rise"),
        ({"indptr": np.array([0, 4])}, "3 numbers in indptr"),
        ({"seq_ids": ("a", "a")}, "'a' exists already"),
        ({"seq_ids": ("a", "old")}, "'old' exists already"),
        ({"seq_ids": ("a", 2.5)}, "2.5"),
    ],
)
def test_a_snapshot_that_does_not_fit_changes_nothing(changes, says):
    manager = BlockManager(8, 4)
    manager.add("old")
    manager.extend("old", 3)
    with refused(manager, ValueError, says):
        manager.restore(snapshot(**changes))


def test_a_snapshot_longer_than_this_pool_allows_is_refused():
    manager = BlockManager(8, 4, max_length=5)
    with refused(manager, ValueError, "sequence 'a' has 6 tokens, max_length is 5"):
        manager.restore(snapshot())


def told(events):
    return [
        (e.kind, e.seq_ids, {role: ids.tolist() for role, ids in e.blocks.items()}, e.counts) for e in events
    ]


def test_every_call_is_one_event_refusals_included():
    events = []
    manager = BlockManager(4, 4, observers=[events.append])
    manager.add("a")
    manager.extend("a", 6)
    manager.fork("a", ["b"])
    manager.extend("b", 1)
    manager.reorder(["a", "b"], [0, 0])
    manager.truncate("b", 4)
    manager.release_before("a", 4)
    with pytest.raises(PoolExhausted):
        manager.extend(["a", "b"], 12)
    taken = manager.snapshot(["b"])
    manager.free(["b"])
    manager.restore(taken)
    manager.extend("b", 8)
    with pytest.raises(PoolExhausted):
        manager.extend("b")
    with pytest.raises(PoolExhausted):
        manager.restore(snapshot(seq_ids=("c", "d")))
    assert told(events) == [
        ("add", ("a",), {}, {}),
        ("extend", ("a",), {"new": [0, 1], "copies": []}, {"tokens": 6, "free": 2}),
        ("fork", ("a", "b"), {"shared": [0, 1]}, {}),
        ("extend", ("b",), {"new": [], "copies": [[1, 2, 2]]}, {"tokens": 1, "free": 1}),
        ("reorder", ("a", "b"), {"freed": [2]}, {"free": 2}),
        ("truncate", ("b",), {"freed": []}, {"tokens": 2, "free": 2}),
        ("release_before", ("a",), {"freed": []}, {"free": 2}),
        ("refuse", ("a", "b"), {}, {"requested": 6, "available": 2}),
        ("free", ("b",), {"freed": [0]}, {"free": 3}),
        ("restore", ("b",), {"new": [0]}, {"free": 2}),
        ("extend", ("b",), {"new": [2, 3], "copies": []}, {"tokens": 8, "free": 0}),
        ("refuse", ("b",), {}, {"requested": 1, "available": 0}),
        ("refuse", ("c", "d"), {}, {"requested": 3, "available": 0}),
    ]
    assert all(event.seconds >= 0 for event in events)


def test_questions_and_mistakes_are_no_events():
    events = []
    manager = BlockManager(4, 4, observers=[events.append])
    manager.add("a")
    events.clear()
    manager.length("a"), manager.versions(["a"]), manager.block_tables(["a"]), manager.to_csr(["a"])
    manager.can_extend("a", 99), manager.blocks_needed("a", 99), manager.snapshot()
    for call in (lambda: manager.add("a"), lambda: manager.extend("b"), lambda: manager.truncate("a", 1)):
        with pytest.raises((KeyError, ValueError)):
            call()
    assert events == []


def test_without_observers_nothing_is_timed(monkeypatch):
    def clock():
        raise AssertionError("nobody observes, so nobody may ask for the time")

    monkeypatch.setattr("pagedkv.allocator.time.perf_counter", clock)
    model = ManagerModel(4, 4)
    model.alloc(5, "a")
    model.fork("a", ["b"])
    model.append("b")
    with refused(model.pool):
        model.append("b", 99)
    model.reorder(["a", "b"], [1, 1])
    model.truncate("a", 2), model.release_before("b", 4), model.free(["a", "b"])
    with pytest.raises(AssertionError, match="nobody observes"):
        BlockManager(1, 1, observers=[print]).add()


def test_an_observer_that_joins_late_is_told_from_then_on():
    manager, events = BlockManager(4, 4), []
    manager.add("a")
    manager.observers.append(events.append)
    manager.extend("a")
    assert [event.kind for event in events] == ["extend"]


def test_the_same_calls_on_shuffled_blocks_give_the_same_contents_and_counts():
    """Which physical blocks hold the data does not matter."""
    results = []
    for order in ([0, 1, 2, 3, 4, 5], [5, 2, 0, 4, 3, 1]):
        model = ManagerModel(6, 4)
        ids = [model.add() for _ in order]
        model.pool.extend(ids)
        model.pool.free([ids[i] for i in order])
        model.tokens.clear()
        assert queue(model.pool) == order
        model.alloc(7, "a")
        model.fork("a", ["b"])
        model.append(["a", "b"], [3, 1])
        model.truncate("a", 5)
        results.append((model.read("a"), model.read("b"), model.num_free, sorted(model.refs)))
        assert model.table("a")[0] == order[0]
    assert results[0] == results[1]


# Answers and refusals, word for word where a number stands in them


def pair():
    manager = BlockManager(4, 4)
    manager.add("a")
    manager.extend("a", 6)
    manager.fork("a", ["b"])
    return manager


@pytest.mark.parametrize("call", ["blocks_needed", "can_extend", "extend", "reorder", "free", "snapshot"])
def test_a_batch_names_a_sequence_once(call):
    manager = pair()
    more = ([0, 0],) if call == "reorder" else ()
    with refused(manager, ValueError, "'a'"):
        getattr(manager, call)(["a", "a"], *more)


def test_the_last_free_block_may_be_taken():
    manager = pair()  # two blocks, both shared; two free
    assert (manager.blocks_needed("a", 6), manager.can_extend("a", 6)) == (2, True)
    assert type(manager.blocks_needed("a", 6)) is int and type(manager.can_extend("a", 6)) is bool
    assert (manager.blocks_needed("a", 7), manager.can_extend("a", 7)) == (3, False)
    manager.extend("a", 2)  # fills its own copy of the half-full block: one free
    assert (manager.blocks_needed("a"), manager.can_extend("a"), manager.num_free) == (1, True, 1)
    manager.add("c")
    manager.extend("c", 3)
    assert (manager.blocks_needed("c"), manager.can_extend("c")) == (0, True)  # one token, not two


def test_refusals_say_what_was_there():
    manager = pair()
    for call, said in (
        (lambda: manager.reorder(["a", "b"], [0, 2]), r"parents must be 2 numbers of 0 … 1, got \[0, 2\]"),
        (lambda: manager.truncate("a", 2.5), "length must be a whole number"),
        (lambda: manager.truncate("a", 7), "sequence 'a' has 6 tokens, cannot truncate it to 7"),
        (lambda: manager.release_before("a", -1), "position must be a whole number"),
        (lambda: manager.release_before("a", 7), "sequence 'a' has 6 tokens, none at 7"),
    ):
        with refused(manager, ValueError, said):
            call()


def test_truncate_may_end_in_the_first_block_behind_the_window():
    manager = BlockManager(4, 4)
    manager.add("a")
    manager.extend("a", 10)
    manager.release_before("a", 4)
    manager.truncate("a", 6)  # block 1 is there, block 0 was left behind
    assert (manager.length("a"), table(manager, "a")[0]) == (6, -1)


def test_reorder_releases_the_tail_first():
    manager = BlockManager(8, 4)
    for name, tokens in (("a", 12), ("b", 12)):
        manager.add(name)
        manager.extend(name, tokens)
    left = table(manager, "b")
    manager.reorder(["a", "b"], [0, 0])
    assert queue(manager)[:3] == left[::-1]


def test_a_step_to_a_new_block_leaves_the_last_block_of_the_pool_findable():
    """A row has −1 where its next block comes: that is no block, though NumPy takes it for the last one."""
    manager = BlockManager(4, 2, prefix_cache=True)
    for _ in range(3):
        manager.extend(manager.add(), 2)
    found = manager.add(tokens=[1, 2])
    manager.extend(found, None)
    manager.commit(found)
    assert manager.block_tables([found]).tolist() == [[3]]
    manager.free(0)
    manager.extend(1)
    assert manager.is_cached([3])[0]


def test_what_a_step_granted_cannot_be_changed_by_who_got_it():
    """The next step goes on from there."""
    manager = BlockManager(4, 4)
    ids = (manager.add(), manager.add())
    manager.extend(ids, 2)
    step = manager.extend(ids)
    for granted in (step.start, step.slots):
        with pytest.raises(ValueError, match="read-only"):
            granted += 1
    assert manager.extend(ids).slots.tolist() == [3, 7]


def test_a_step_after_a_step_copies_what_was_shared_in_between():
    manager = BlockManager(16, 4)
    a, b = manager.add(), manager.add()
    manager.extend([a, b], [5, 6])
    assert not len(manager.extend([a, b]).copies)
    assert not len(manager.extend([a, b]).copies)
    (child,) = manager.fork(a)
    copies = manager.extend([a, b]).copies
    assert copies[:, [0, 2]].tolist() == [[manager.block_tables([child])[0, -1], 3]]
    assert not len(manager.extend([a, b]).copies)


def test_a_step_after_a_step_leaves_what_was_committed_in_between_findable():
    manager = BlockManager(16, 4, prefix_cache=True)
    a, b = manager.add(), manager.add()
    manager.extend([a, b], [2, 3])
    manager.commit([a, b], [[1, 2], [3, 4, 5]])
    for token in range(20):
        manager.extend([a, b])
        manager.commit([a, b], [token, token])
    for seq, text in ((a, [1, 2]), (b, [3, 4, 5])):
        assert manager.is_cached(manager.block_tables([seq])[0])[:5].all()
        assert manager.match(manager.add(tokens=[*text, *range(20)])) == 20
