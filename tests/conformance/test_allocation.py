"""Allocation, copy-on-write and growth: numbers restated from the test suites of engines in this field.

Every scenario runs on a poisoned cache beside a list model; all invariants and all contents are checked
after every operation (tests/pools.py).
"""

import pytest
from pools import Model, refused


def ceil(a, b):
    return -(-a // b)


def test_a_pool_of_four_is_allocated_four_times():
    model = Model(4, 4)
    for free in (3, 2, 1, 0):
        model.alloc(1)
        assert model.num_free == free
    fifth = model.add()
    with refused(model.pool):
        model.append(fifth)
    for seq, free in zip(range(4), (1, 2, 3, 4), strict=True):
        model.free(seq)
        assert model.num_free == free
        with refused(model.pool, KeyError, f"no sequence {seq}"):
            model.free(seq)


@pytest.mark.parametrize("writer", ["parent", "child"])
@pytest.mark.parametrize("appended", [1, 7, 8, 9, 16])
@pytest.mark.parametrize("prompt", [1, 2, 7, 8, 9, 16, 129])
def test_copy_on_write_takes_as_many_blocks_as_it_must(prompt, appended, writer):
    model, bs = Model(1024, 8), 8
    model.alloc(prompt, "parent")
    model.fork("parent", ["child"])
    other = "child" if writer == "parent" else "parent"
    before = model.table(other)
    copies = model.append(writer, appended).copies
    assert len(copies) == (1 if prompt % bs else 0)
    assert model.num_free == 1024 - ceil(prompt, bs) - (ceil(prompt + appended, bs) - prompt // bs)
    assert model.table(other) == before
    model.free(["parent", "child"])
    assert model.num_free == 1024


@pytest.mark.parametrize(
    "prompt, appended, free, copies", [(129, 16, 1004, 1), (16, 16, 1020, 0), (1, 1, 1022, 1)]
)
def test_copy_on_write_in_numbers(prompt, appended, free, copies):
    model = Model(1024, 8)
    model.alloc(prompt, "parent")
    model.fork("parent", ["child"])
    assert len(model.append("child", appended).copies) == copies
    assert model.num_free == free


def test_the_child_copies_then_the_parent_writes_in_place():
    model = Model(4, 4)
    model.alloc(3, "parent")
    model.fork("parent", ["child"])
    assert model.num_free == 3
    assert model.append("child").copies.tolist() == [[0, 1, 3]]
    assert model.num_free == 2
    assert model.append("parent").copies.tolist() == []
    assert (model.table("parent"), model.table("child"), model.num_free) == ([0], [1], 2)


def test_of_four_beams_the_last_owner_writes_in_place():
    model = Model(8, 4)
    model.alloc(10, 0)
    model.fork(0, [1, 2, 3])
    assert model.num_free == 8 - 3
    assert [len(model.append(beam).copies) for beam in range(4)] == [1, 1, 1, 0]
    assert model.num_free == 8 - 6


@pytest.mark.parametrize(
    "block_size, length, appended, blocks", [(8, 7, 1, 0), (8, 8, 1, 1), (8, 8, 129, 17), (1, 1, 8, 8)]
)
def test_growth_takes_the_blocks_it_needs(block_size, length, appended, blocks):
    model = Model(32, block_size)
    model.alloc(length, "a")
    free = model.num_free
    assert (
        model.pool.blocks_needed("a", appended)
        == blocks
        == ceil(length + appended, block_size) - ceil(length, block_size)
    )
    model.append("a", appended)
    assert free - model.num_free == blocks


def test_a_beam_step():
    model = Model(6, 4)
    model.alloc(4, "root")
    model.fork("root", ["a", "b", "c"])
    model.free("root")
    model.append(["a", "b", "c"])
    assert [model.table(s) for s in "abc"] == [[0, 1], [0, 2], [0, 3]]
    assert model.reorder(["a", "b", "c"], [0, 0, 1]) == [3]
    assert [model.table(s) for s in "abc"] == [[0, 1], [0, 1], [0, 2]]
    assert model.refs == [3, 2, 1, 0, 0, 0]
    assert model.pool.manager.allocator.queue()[0] == 3


@pytest.mark.parametrize(
    "step, blocks", [("crop 8", 2), ("crop 7", 2), ("append to 8", 2), ("append to 9", 3), ("crop 0", 0)]
)
def test_crop_and_append_one_after_the_other(step, blocks):
    model = Model(8, 4)
    model.alloc(13, "a")
    steps = {
        "crop 8": lambda: model.truncate("a", 8),
        "crop 7": lambda: model.truncate("a", 7),
        "append to 8": lambda: model.append("a"),
        "append to 9": lambda: model.append("a"),
        "crop 0": lambda: model.truncate("a", 0),
    }
    for name, action in steps.items():
        action()
        if name == step:
            break
    assert len(model.table("a")) == blocks and model.num_free == 8 - blocks


def test_the_parent_leaves_before_the_child_writes():
    model = Model(4, 4)
    model.alloc(3, "a")
    model.fork("a", ["b"])
    model.free("a")
    assert model.append("b").copies.tolist() == []


def test_exhaustion_in_copy_on_write():
    model = Model(2, 4)
    model.alloc(3, "a")
    model.fork("a", ["b", "c"])
    assert model.append("b").copies.tolist() == [[0, 1, 3]]
    with refused(model.pool):
        model.append("c")
    assert [model.table(s) for s in "abc"] == [[0], [1], [0]]
    assert model.refs == [2, 1]


def test_swap_out_and_in():
    device, host = Model(4, 4), Model(4, 4)
    device.alloc(9, "a")
    swapped_out = dict(host.swap_in(device, ["a"]))
    assert list(swapped_out) == [0, 1, 2] and list(swapped_out.values()) == host.table("a")
    assert (device.num_free, host.num_free) == (4, 1)
    swapped_in = dict(device.swap_in(host, ["a"]))
    assert list(swapped_in) == list(swapped_out.values()) and list(swapped_in.values()) == device.table("a")
    assert (device.num_free, host.num_free) == (1, 4)


def test_fork_and_free_of_the_child_change_nothing():
    model = Model(4, 4)
    model.alloc(6, "a")
    before = (model.table("a"), model.refs, model.pool.manager.allocator.queue())
    assert model.free(model.fork("a", 3)) == []
    assert (model.table("a"), model.refs, model.pool.manager.allocator.queue()) == before


def test_freed_blocks_are_handed_out_last_first():
    model = Model(4, 4)
    model.alloc(1, "keeps block 0")
    model.alloc(12, "a")
    assert model.free("a") == [3, 2, 1]
    model.alloc(12, "b")
    assert model.table("b") == [3, 2, 1]


def test_a_and_b_share_two_pages_and_own_one_each():
    source, target = Model(4, 4), Model(4, 4)
    source.alloc(8, "a")
    source.fork("a", ["b"])
    source.append(["a", "b"])
    assert len(target.swap_in(source, ["a", "b"])) == 4
    assert target.refs == [2, 2, 1, 1]
