"""The allocator alone: ids, owners and the queue of free blocks."""

import itertools
import pickle

import numpy as np
import pytest
from pools import check_invariants, refused

from pagedkv import BlockAllocator, PoolExhausted


def test_the_queue_begins_in_ascending_order():
    assert BlockAllocator(4).queue() == [0, 1, 2, 3]


def test_four_allocations_a_refusal_and_four_releases():
    allocator = BlockAllocator(4)
    for free in (3, 2, 1, 0):
        allocator.allocate()
        assert allocator.num_free == free
    with refused(allocator) as caught:
        allocator.allocate()
    assert (caught.value.requested, caught.value.available) == (1, 0)
    assert str(caught.value) == "requested 1, free 0"
    for block, free in zip(range(4), (1, 2, 3, 4), strict=True):
        allocator.release([block])
        assert allocator.num_free == free
        with refused(allocator, ValueError, f"block {block} has 0 owners, cannot release 1"):
            allocator.release([block])


def test_allocation_is_all_or_nothing():
    allocator = BlockAllocator(4)
    allocator.allocate(3)
    with refused(allocator):
        allocator.allocate(2)
    assert allocator.allocate(1).tolist() == [3]


def test_nothing_can_be_allocated_shared_and_released():
    allocator = BlockAllocator(1)
    assert allocator.allocate(0).tolist() == []
    allocator.share([])
    assert allocator.release([]).tolist() == []
    check_invariants(allocator)


def test_blocks_released_tail_first_are_handed_out_tail_first():
    allocator = BlockAllocator(5)
    allocator.allocate(4)
    assert allocator.release([3, 2, 1]).tolist() == [3, 2, 1]
    assert allocator.allocate(3).tolist() == [3, 2, 1]


@pytest.mark.parametrize(
    "owners, named, freed, left",
    [
        (1, [0], [0], 0),
        (2, [0], [], 1),
        (2, [0, 0], [0], 0),
        (3, [0, 0], [], 1),
    ],
)
def test_an_id_named_twice_counts_twice(owners, named, freed, left):
    allocator = BlockAllocator(2)
    allocator.allocate()
    allocator.share([0] * (owners - 1))
    assert allocator.ref_count(0) == owners
    assert allocator.release(named).tolist() == freed
    assert allocator.ref_count(0) == left
    check_invariants(allocator)


@pytest.mark.parametrize("named", [[0, 0, 0], [0, 1, 0, 0], [0, 1, 1]])
def test_more_releases_than_owners_in_one_call_release_nothing(named):
    allocator = BlockAllocator(3)
    allocator.share(allocator.allocate(2)[:1])
    with refused(allocator, ValueError, f"block {named[-1]} has . owners, cannot release"):
        allocator.release(named)


def test_a_block_is_freed_by_its_last_release():
    """[0, 1, 2, 0] frees 1 and 2 before 0, since 0 had two owners."""
    allocator = BlockAllocator(3)
    allocator.share(allocator.allocate(3)[:1])
    freed = allocator.release([0, 1, 2, 0])
    assert freed.dtype == np.int32 and freed.tolist() == [1, 2, 0]
    assert allocator.queue() == [1, 2, 0]


@pytest.mark.parametrize(
    "blocks", [[0, 1], [1, 1], [0, 0, 0, 2], [0, 3], [-1], [4], [0.0], ["0"], [True], [None]]
)
@pytest.mark.parametrize("method", ["share", "release"])
def test_one_bad_id_spoils_the_whole_call(method, blocks):
    allocator = BlockAllocator(4)
    allocator.allocate(1)
    allocator.share([0])
    with refused(allocator, ValueError, "block"):
        getattr(allocator, method)(blocks)


@pytest.mark.parametrize("block", [-1, 4, 1.0, "1", True])
def test_the_owners_of_no_block_cannot_be_asked(block):
    with pytest.raises(ValueError, match=f"block.*{block}"):
        BlockAllocator(4).ref_count(block)


def test_the_first_id_that_is_none_is_named():
    allocator = BlockAllocator(4)
    with refused(allocator, ValueError, "there is no block 4: it must be 0 … 3$"):
        allocator.release([0, 4, 5])


@pytest.mark.parametrize("number", [0, -1, 2.5, "4", True, None])
def test_a_pool_needs_a_whole_number_of_blocks(number):
    with pytest.raises(ValueError, match=f"num_blocks must be a whole number of at least 1, got {number!r}"):
        BlockAllocator(number)


@pytest.mark.parametrize("number", [-1, 2.5, "4", True, None])
def test_only_a_whole_number_can_be_allocated(number):
    allocator = BlockAllocator(4)
    with refused(allocator, ValueError, f"got {number!r}"):
        allocator.allocate(number)


def test_a_refusal_can_be_sent_to_another_process():
    with pytest.raises(PoolExhausted) as caught:
        BlockAllocator(4).allocate(5)
    sent = pickle.loads(pickle.dumps(caught.value))
    assert sent.args == (sent.requested, sent.available) == (5, 4)


def test_counts_cannot_be_changed_from_outside():
    allocator = BlockAllocator(2)
    with pytest.raises(ValueError, match="read-only"):
        allocator.ref_counts[0] = 1


def test_every_call_is_one_event_with_its_blocks():
    events = []
    allocator = BlockAllocator(3, observers=[events.append])
    allocator.allocate(2)
    allocator.share([0])
    allocator.release([1, 0])
    with pytest.raises(PoolExhausted):
        allocator.allocate(3)
    told = [(e.kind, {role: ids.tolist() for role, ids in e.blocks.items()}, e.counts) for e in events]
    assert told == [
        ("allocate", {"new": [0, 1]}, {"free": 1}),
        ("share", {"shared": [0]}, {}),
        ("release", {"released": [1, 0], "freed": [1]}, {"free": 2}),
        ("refuse", {}, {"requested": 3, "available": 2}),
    ]


def test_an_event_says_how_long_its_call_took(monkeypatch):
    events, clock = [], itertools.count(100)
    monkeypatch.setattr("pagedkv.allocator.time.perf_counter", lambda: next(clock))
    BlockAllocator(4, observers=[events.append]).allocate()
    assert [event.seconds for event in events] == [1]
