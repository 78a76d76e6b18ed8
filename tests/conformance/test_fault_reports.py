"""Public fault reports of engines in this field, one scenario each; the number is the row of the fault table.

A: lifetime, counts, free lists, atomicity. B: positions and sharing. D: the contract of transformers' caches,
in the words of this cache. E: moving pages. Rows about prefix reuse, files and servers are not here.
Every step is checked against a list model on poisoned pages (tests/pools.py).
"""

import pytest
from pools import Model, all_layers, new_cache, refused, state_of

from pagedkv import BlockAllocator, BlockManager, KVStorage, PagedKVCache, slots_of

# A. Lifetime, reference counts, free lists, atomicity


def test_a1_one_release_names_a_block_twice():
    """vllm#42571: an error with nothing changed; never twice in the queue."""
    allocator = BlockAllocator(8)
    allocator.allocate()
    with refused(allocator, ValueError, "block 0 has 1 owners, cannot release 2"):
        allocator.release([0, 0])


def test_a2_a_block_is_not_reused_while_someone_reads_it():
    """vllm#37076."""
    model = Model(2, 4)
    model.alloc(8, "a")
    model.fork("a", ["b"])
    model.free("a")
    model.add("c")
    with refused(model.pool):
        model.append("c")
    assert (model.num_free, model.refs) == (0, [1, 1])


def test_a11_no_room_on_the_host_when_swapping_out():
    """vllm#190, #588: the device keeps its sequence, and the caller may drop it."""
    device, host = Model(4, 4), Model(1, 4)
    device.alloc(8, "a")
    before = state_of(device.pool)
    with refused(host.pool):
        host.swap_in(device, ["a"])
    assert state_of(device.pool) == before
    assert device.free("a") == [1, 0]


def test_a13_a_late_free_does_not_hit_the_next_owner():
    """sglang PR#27586."""
    model = Model(1, 4)
    model.alloc(3, "a")
    model.free("a")
    model.alloc(3, "c")
    with refused(model.pool, KeyError, "'a'"):
        model.free("a")
    model.check()


def test_a17_a_refused_request_keeps_nothing_of_its_batch():
    """sglang PR#16067: neither the row nor the page of its neighbour."""
    model = Model(4, 4)
    model.alloc(12, "old")
    model.add("x"), model.add("y")
    with refused(model.pool):
        model.append(["x", "y"], [4, 8])
    assert model.num_free == 1 and len(model.append("x", 4).slots) == 4


def test_a22_equal_sequences_of_one_step_both_stay():
    """mini-sglang PR#142: no deduplication, so no table can point to pages that were freed."""
    model = Model(6, 4)
    model.add("a"), model.add("b")
    twins = [*range(1, 9), *range(1, 9)]
    model.pool.append(["a", "b"], *all_layers(twins), 8)
    model.tokens = {"a": twins[:8], "b": twins[8:]}
    model.check()
    assert (model.table("a"), model.table("b"), model.refs) == ([0, 1], [2, 3], [1, 1, 1, 1, 0, 0])
    model.free("a")
    model.alloc(16, "c")
    assert set(model.table("c")) >= {0, 1}


@pytest.mark.parametrize("owners", [1, 2, 3])
def test_a26_one_release_too_many_is_an_error_at_any_count(owners):
    """LMCache#987, #5090, #3381, #1365: counts never go below 0 and are never repaired in silence."""
    allocator = BlockAllocator(2)
    allocator.allocate()
    allocator.share([0] * (owners - 1))
    with refused(allocator, ValueError, f"has {owners} owners"):
        allocator.release([0] * (owners + 1))
    for _ in range(owners):
        allocator.release([0])
    with refused(allocator, ValueError, "has 0 owners"):
        allocator.release([0])


def test_a29_all_of_five_pages_move():
    """LMCache#4701: byte for byte."""
    source, target = Model(5, 4), Model(8, 4)
    source.alloc(20, "a")
    pages = [source.pool.storage.page(block) for block in source.table("a")]
    pairs = target.swap_in(source, ["a"])
    assert len(pairs) == 5
    for page, (_, block) in zip(pages, pairs, strict=True):
        moved = target.pool.storage.page(block)
        assert all(moved[name].tobytes() == array.tobytes() for name, array in page.items())


def test_a31_the_maximum_length_is_not_rounded_up_to_a_page():
    """mini-sglang ab5d260: with 10 tokens in blocks of 4 the last position is 9, not 11."""
    model = Model(8, 4, max_length=10)
    model.alloc(10, "a")
    with refused(model.pool, ValueError, "max_length is 10"):
        model.append("a")


def test_a32_out_of_memory_during_copy_on_write():
    """A refused copy is not half made: tables, counts and pages stay."""
    model = Model(2, 4)
    model.alloc(3, "a")
    model.fork("a", ["b", "c"])
    assert model.append("b").copies.tolist() == [[0, 1, 3]]
    with refused(model.pool):
        model.append("c")
    assert ([model.table(s) for s in "abc"], model.refs) == ([[0], [1], [0]], [2, 1])
    model.free("a")
    assert model.append("c").copies.tolist() == [], "as the last owner, c needs no block any more"


def test_a34_the_parent_is_freed_before_the_child_writes():
    model = Model(4, 4)
    model.alloc(3, "a")
    model.fork("a", ["b"])
    model.free("a")
    free = model.num_free
    assert model.append("b").copies.tolist() == [] and model.num_free == free


# B. Positions, sharing, drafts


def test_b19_rejected_drafts_leave_no_trace():
    """vllm PR#18668: 6 tokens and 3 drafts, all rejected."""
    model = Model(4, 4)
    model.alloc(6, "a")
    model.append("a", 3)
    assert model.truncate("a", 6) == [2]
    model.append("a", 3)
    assert model.pool.length("a") == 9


@pytest.mark.parametrize("size", [0, -1, 2.5, "4"])
@pytest.mark.parametrize(
    "make",
    [
        lambda bs: BlockManager(4, bs),
        lambda bs: KVStorage(1, 4, bs, 1, 1),
        lambda bs: PagedKVCache(4, bs, 1, 1),
    ],
    ids=["manager", "storage", "cache"],
)
def test_b25_a_block_size_that_is_none_is_refused_at_once(make, size):
    """vllm#42510."""
    with pytest.raises(ValueError, match=f"block_size must be a whole number of at least 1, got {size!r}"):
        make(size)


def test_b25_blocks_of_one_token_work():
    model = Model(4, 1)
    model.alloc(3, "a")
    model.fork("a", ["b"])
    assert model.append("b").copies.tolist() == [] and model.truncate("b", 2) == [3]


@pytest.mark.parametrize("position, blocks", [(7, 1), (8, 1), (9, 1), (11, 2)])
def test_b26_a_window_of_four_begins_at_p_minus_w_plus_one(position, blocks):
    """vllm PR#40019, #23480: the first visible key of the query at p is p − W + 1."""
    model = Model(4, 4)
    model.alloc(position + 1, "a")
    model.release_before("a", position - 4 + 1)
    assert model.table("a").count(-1) == blocks
    model.pool.plan("a", window=4)
    with refused(model.pool, ValueError, "left behind"):
        model.pool.plan("a", window=position + 1)


def test_b28_the_token_after_seven_goes_to_position_seven():
    """nano-vllm f5b4840."""
    model = Model(4, 4)
    model.alloc(7, "a")
    reservation = model.append("a")
    second = model.table("a")[1]
    assert reservation.start.tolist() == [7] and reservation.slots.tolist() == [second * 4 + 3]
    assert slots_of(model.table("a"), [7], 4).tolist() == [second * 4 + 3]


@pytest.mark.parametrize("order", [["parent", "child"], ["child", "parent"]])
def test_b29_parent_and_child_write_different_tokens_in_one_step(order):
    """transformers#39748, PR#44379."""
    model = Model(8, 4)
    model.alloc(10, "parent")
    model.fork("parent", ["child"])
    assert len(model.append(order).copies) == 1
    assert model.table("parent")[:2] == model.table("child")[:2]
    assert model.table("parent")[2] != model.table("child")[2]
    assert model.tokens["parent"][10] != model.tokens["child"][10]


# D. The contract of transformers' caches


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_d1_crop_keeps_exactly_what_it_says(length):
    """transformers#47433, PR#47977, #47720: 0 is 0."""
    model = Model(4, 4)
    model.alloc(3, "a")
    model.truncate("a", length)
    assert model.pool.length("a") == length


@pytest.mark.parametrize("length", [-1, -5, 4, 5, 2.5, "2", None, True])
def test_d1_crop_beyond_either_end_is_an_error(length):
    model = Model(4, 4)
    model.alloc(3, "a")
    with refused(model.pool, ValueError, "length|cannot truncate it to"):
        model.truncate("a", length)


def test_d2_both_beams_continue_row_one():
    """transformers#46612."""
    model = Model(4, 4)
    model.alloc(3, 0), model.alloc(2, 1)
    row = model.tokens[1]
    assert model.reorder([0, 1], [1, 1]) == [0]
    assert model.tokens == {0: row, 1: row} and model.table(0) == model.table(1) == [1]


def test_d4_after_a_crop_the_cropped_entries_are_gone():
    """transformers#30312: 3 old and 2 new tokens."""
    model = Model(2, 4)
    model.alloc(5, "a")
    old = model.tokens["a"][:3]
    model.truncate("a", 3)
    model.append("a", 2)
    assert model.read("a")[:3] == old and len(model.read("a")) == 5


def test_d5_offloading_between_beam_steps_changes_nothing():
    """transformers PR#37873."""
    read = []
    for offload in (False, True):
        model, host = Model(12, 4), Model(12, 4)
        model.alloc(6, 0)
        model.fork(0, [1, 2])
        for parents in ([0, 0, 1], [2, 1, 0], [1, 1, 1]):
            model.append([0, 1, 2])
            model.reorder([0, 1, 2], parents)
            if offload:
                host.swap_in(model, [0, 1, 2])
                model.swap_in(host, [0, 1, 2])
        read.append(([model.read(beam) for beam in range(3)], model.num_free))
    assert read[0] == read[1]


def test_d7_reorder_before_the_first_token_and_after_it():
    model = Model(4, 4)
    model.add(0), model.add(1)
    assert model.reorder([0, 1], [1, 0]) == []
    model.append([0, 1])
    model.reorder([0, 1], [1, 0])
    assert (model.table(0), model.table(1)) == ([1], [0])


def test_d10_two_rows_share_their_tail_and_are_cropped():
    """Row 0 copies once, row 1 then writes in place; each reads its own six tokens."""
    model = Model(4, 4)
    model.alloc(7, 0)
    model.fork(0, [1])
    model.truncate(0, 5), model.truncate(1, 5)
    assert model.append(0).copies.tolist() == [[1, 2, 1]]
    assert model.append(1).copies.tolist() == []
    assert (model.table(0), model.table(1)) == ([0, 2], [0, 1])
    assert model.tokens[0][5] != model.tokens[1][5] and len(model.read(1)) == 6


# E. Moving pages


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_e5_type_and_bytes_survive_a_move(dtype):
    """vmlx PR#18."""
    source, target = Model(2, 4, dtype=dtype), Model(2, 4, dtype=dtype)
    source.alloc(8, "a")
    page = source.pool.storage.page(1)
    target.swap_in(source, ["a"])
    moved = target.pool.storage.page(1)
    assert all(moved[n].dtype == dtype and moved[n].tobytes() == page[n].tobytes() for n in page)


@pytest.mark.parametrize(
    "target", [new_cache(8, 8), new_cache(8, 4, dtype="float16")], ids=["block_size", "dtype"]
)
def test_b13_pages_of_another_size_or_type_are_refused(target):
    """omlx#2045, #1693."""
    source = Model(8, 4)
    source.alloc(9, "a")
    with refused(target, ValueError, "pages of the source"):
        target.restore(source.pool.snapshot(), source.pool)


def test_e13_six_pages_do_not_fit_into_five_free_blocks():
    source, target = Model(6, 4), Model(8, 4)
    source.alloc(24, "a")
    target.alloc(9, "busy")
    before = state_of(source.pool)
    with refused(target.pool) as caught:
        target.swap_in(source, ["a"])
    assert (caught.value.requested, caught.value.available) == (6, 5)
    assert state_of(source.pool) == before
    target.free("busy")
    assert len(target.swap_in(source, ["a"])) == 6


# F. Counting


def test_f7_refused_copies_are_not_counted():
    events = []
    model = Model(2, 4, observers=[events.append])
    model.alloc(3, "a")
    model.fork("a", ["b", "c"])
    model.append("b")
    with refused(model.pool):
        model.append("c")
    assert sum(len(event.blocks.get("copies", ())) for event in events) == 1
    assert (events[-1].kind, events[-1].seq_ids) == ("refuse", ("c",))
