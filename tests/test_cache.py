"""Manager, pages and attention behind one face: contents, copies, poison, stale reservations, observers."""

import numpy as np
import pytest
from pools import (
    HEAD_DIM,
    HEADS,
    LAYERS,
    Model,
    all_layers,
    check_invariants,
    new_cache,
    queue,
    refused,
    vectors,
)

from pagedkv import BlockManager, KVStorage, PagedKVCache, StalePlan

BLOCK_SIZES = [1, 2, 4, 16]


def nan_slots(cache, block):
    """Offsets of one block that hold NaN in all layers, keys and values alike."""
    nan = np.stack([np.isnan(array[:, block]) for array in cache.storage.arrays.values()])
    per_slot = nan.transpose(2, 0, 1, 3, 4).reshape(cache.block_size, -1)
    assert (per_slot.all(axis=1) == per_slot.any(axis=1)).all(), "a slot that is filled in some layers only"
    return np.flatnonzero(per_slot.all(axis=1)).tolist()


# Contents


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_sequence_reads_back_exactly_at_every_boundary(block_size, dtype):
    bs = block_size
    model = Model(64, bs, dtype=dtype)
    for length in sorted({0, 1, bs - 1, bs, bs + 1, 2 * bs - 1, 2 * bs, 2 * bs + 1}):
        model.alloc(length, f"at once {length}")
        model.add(f"one by one {length}")
        for _ in range(length):
            model.append(f"one by one {length}")


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_where_the_blocks_lie_does_not_change_what_is_read(block_size):
    """Bit for bit, gathered and attended."""
    results = []
    for seed in (None, 1, 2):
        cache = new_cache(12, block_size)
        order = list(range(12)) if seed is None else np.random.default_rng(seed).permutation(12).tolist()
        ids = [cache.add() for _ in order]
        cache.extend(ids)
        cache.free([ids[i] for i in order])
        assert queue(cache) == order
        for seq, n in (("a", block_size + 1), ("b", 3)):
            cache.add(seq)
            cache.append(seq, *all_layers(range(n)), n)
        cache.fork("a", ["c"])
        cache.append(["c", "a"], *all_layers([50, 51]))
        query = np.random.default_rng(0).standard_normal((3, HEADS, HEAD_DIM), np.float32)
        out = cache.attend(1, query, cache.plan(["a", "b", "c"]))
        results.append([out.tobytes(), *(array.tobytes() for s in "abc" for array in cache.gather(1, s))])
    assert results[0] == results[1] == results[2]


def test_layers_may_be_written_one_by_one():
    cache = new_cache(2, 4)
    cache.add("a")
    reservation = cache.extend("a", 3)
    for layer in range(LAYERS):
        cache.write(layer, reservation, *vectors(layer, [1, 2, 3]))
        assert np.array_equal(cache.gather(layer, "a"), vectors(layer, [1, 2, 3]))
    check_invariants(cache)


def test_gather_of_what_a_window_left_behind_is_refused():
    model = Model(4, 4)
    model.alloc(6, "a"), model.release_before("a", 5)
    with refused(model.pool, ValueError, "position 0 has no block any more"):
        model.pool.gather(0, "a")


# Copies and poison


def test_a_copy_takes_only_the_filled_slots_and_leaves_the_rest_poisoned():
    model = Model(4, 4)
    model.alloc(4, "a")
    model.fork("a", ["b"])
    model.truncate("b", 2)  # the shared tail keeps a's four tokens
    reservation = model.append("b")
    assert reservation.copies.tolist() == [[0, 1, 2]]
    assert nan_slots(model.pool, 1) == [3]


def test_extend_has_copied_before_it_returns():
    model = Model(4, 4)
    model.alloc(3, "a")
    model.fork("a", ["b"])
    model.pool.extend("b")
    for array in model.pool.storage.arrays.values():
        assert np.array_equal(array[:, 1, :3], array[:, 0, :3])
    assert nan_slots(model.pool, 1) == [3]


@pytest.mark.parametrize("action", ["free", "truncate", "release_before", "reorder"])
def test_what_becomes_free_is_poisoned(action):
    model = Model(4, 4)
    model.alloc(7, "a"), model.alloc(1, "b")
    freed = {
        "free": lambda: model.free("a"),
        "truncate": lambda: model.truncate("a", 0),
        "release_before": lambda: model.release_before("a", 4),
        "reorder": lambda: model.reorder(["a", "b"], [1, 1]),
    }[action]()
    assert freed
    for block in freed:
        assert nan_slots(model.pool, block) == [0, 1, 2, 3]


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 7])
def test_a_cut_tail_is_poisoned(length):
    model = Model(4, 4)
    model.alloc(7, "a")
    model.truncate("a", length)
    for entry, block in enumerate(model.table("a")):
        assert nan_slots(model.pool, block) == [o for o in range(4) if entry * 4 + o >= length]


def test_a_shared_tail_is_not_poisoned_under_its_other_owner():
    model = Model(4, 4)
    model.alloc(4, "a")
    model.fork("a", ["b"])
    model.truncate("b", 1)
    assert nan_slots(model.pool, 0) == []


def test_without_poison_pages_are_left_as_they_are():
    cache = PagedKVCache(2, 4, HEADS, HEAD_DIM, num_layers=LAYERS)
    cache.add("a")
    cache.append("a", *all_layers([1]))
    before = cache.storage.page(0)
    cache.truncate("a", 0), cache.free("a")
    assert all(np.array_equal(before[name], page) for name, page in cache.storage.page(0).items())


# Reservations and plans go stale


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.extend("a"),
        lambda cache: cache.truncate("a", 1),
        lambda cache: cache.release_before("a", 4),
        lambda cache: cache.reorder(["a", "b"], [1, 0]),
        lambda cache: cache.free("a"),
        lambda cache: (cache.free("a"), cache.add("a"), cache.extend("a", 6)),
    ],
    ids=["extend", "truncate", "release_before", "reorder", "free", "another of its name"],
)
def test_a_change_makes_reservations_and_plans_stale(change):
    cache = new_cache(8, 4)
    cache.add("a"), cache.add("b")
    cache.append("b", *all_layers([1]))
    reservation, plan = cache.append("a", *all_layers(range(6)), 6), cache.plan(["a", "b"])
    change(cache)
    with refused(cache, StalePlan, "sequence 'a'"):
        cache.write(0, reservation, *vectors(0, range(6)))
    with refused(cache, StalePlan, "sequence 'a'"):
        cache.attend(0, np.zeros((2, HEADS, HEAD_DIM), np.float32), plan)


def test_changes_of_others_leave_them_current():
    cache = new_cache(8, 4)
    cache.add("a"), cache.add("b")
    reservation, plan = cache.append("a", *all_layers(range(3)), 3), cache.plan("a")
    (
        cache.extend("b", 5),
        cache.truncate("b", 1),
        cache.fork("a", ["c"]),
        cache.extend("c"),
        cache.free(["b", "c"]),
    )
    cache.write(0, reservation, *vectors(0, range(3)))
    cache.attend(0, np.zeros((1, HEADS, HEAD_DIM), np.float32), plan)


def test_a_page_pulled_away_during_attention_is_noticed(monkeypatch):
    """The lock is open while attention computes; the result over another's page must not be handed out."""
    cache = new_cache(4, 4)
    cache.add("a")
    cache.append("a", *all_layers([1, 2]), 2)
    plan, stored = cache.plan("a"), cache.storage.stored

    def pulled_away(name, layer):
        if name == "keys":
            cache.free("a")
        return stored(name, layer)

    monkeypatch.setattr(cache.storage, "stored", pulled_away)
    with pytest.raises(StalePlan, match="'a'"):
        cache.attend(0, np.zeros((1, HEADS, HEAD_DIM), np.float32), plan)


# Bad input


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


GOOD = zeros(LAYERS, 2, HEADS, HEAD_DIM)


@pytest.mark.parametrize(
    "keys, counts, says",
    [
        (GOOD, 1, r"shape \(2, 1, 2, 2\), got \(2, 2, 2, 2\)"),
        (GOOD, 3, r"shape \(2, 3, 2, 2\)"),
        (GOOD, -2, "-2"),
        (GOOD, 1.5, "1.5"),
        (GOOD, [2, 2], r"shape \(2, 4, 2, 2\)|\[2, 2\]"),
        (GOOD, [1, 1], r"\[1, 1\]"),
        (GOOD[:1], 2, r"got \(1, 2, 2, 2\)"),
        (GOOD[0], 2, r"got \(2, 2, 2\)"),
        (GOOD[:, :, :1], 2, r"got \(2, 2, 1, 2\)"),
        (GOOD[..., :1], 2, r"got \(2, 2, 2, 1\)"),
        (GOOD.astype(int), 2, "got int64"),
        (GOOD.astype(complex), 2, "got complex128"),
        (GOOD.astype(object), 2, "got object"),
    ],
)
def test_append_takes_all_or_nothing(keys, counts, says):
    cache = new_cache(4, 4)
    cache.add("a")
    for pair in ((keys, keys), (keys, GOOD), (GOOD, keys)):
        if keys is GOOD or pair[0] is not pair[1]:
            with refused(cache, ValueError, says):
                cache.append("a", *pair, counts)


def test_append_to_nobody_or_beyond_max_length_changes_nothing():
    cache = new_cache(4, 4, max_length=1)
    cache.add("a")
    with refused(cache, KeyError, "'b'"):
        cache.append(["a", "b"], GOOD, GOOD)
    with refused(cache, ValueError, "max_length is 1"):
        cache.append("a", GOOD, GOOD, 2)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_whole_blocks_of_prompts_are_written_where_slots_say(block_size, dtype):
    """Long chunks from anywhere in a block, short ones and single tokens in one batch: as if slot by slot."""
    random, counts = np.random.default_rng(block_size), [1, 17, 3, 30, 0, 16, 1]
    for layers in (False, True):
        cache = PagedKVCache(80, block_size, 2, 2, dtype=dtype, num_layers=2)
        ids = [cache.add() for _ in counts]
        cache.extend(ids, [2, 3, 0, block_size, 1, 5, 0])
        keys, values = random.standard_normal((2, 2, sum(counts), 2, 2)).astype(np.float32)
        if layers:
            slots = cache.append(ids, keys, values, counts).slots
        else:
            reservation = cache.extend(ids, counts)
            slots = reservation.slots
            for layer in range(2):
                cache.write(layer, reservation, keys[layer], values[layer])
        apart = KVStorage(2, 80, block_size, 2, 2, dtype)
        for layer in range(2):
            apart.write(layer, slots, keys[layer], values[layer])
        for name, array in apart.arrays.items():
            np.testing.assert_array_equal(cache.storage.arrays[name], array)


def test_a_number_too_large_for_float16_reserves_no_slot():
    cache = new_cache(4, 4, dtype="float16")
    cache.add("a")
    with refused(cache, ValueError, "keys holds 70000: float16 ends at 65504"):
        cache.append("a", GOOD + 70000, GOOD, 2)


@pytest.mark.parametrize(
    "layer, keys, says",
    [
        (LAYERS, GOOD[0], "there is no layer 2"),
        (-1, GOOD[0], "layer .* got -1"),
        (0.0, GOOD[0], "layer .* got 0.0"),
        (0, GOOD, r"shape \(2, 2, 2\), got \(2, 2, 2, 2\)"),
        (0, GOOD[0, :1], r"got \(1, 2, 2\)"),
        (0, GOOD[0].astype(int), "got int64"),
    ],
)
def test_a_wrong_write_writes_nothing(layer, keys, says):
    cache = new_cache(4, 4)
    cache.add("a")
    reservation = cache.extend("a", 2)
    for pair in ((keys, GOOD[0]), (GOOD[0], keys)):
        if pair[0] is not pair[1] or layer != 0:
            with refused(cache, ValueError, says):
                cache.write(layer, reservation, *pair)


@pytest.mark.parametrize("number", [0, -1, 2.5, "4", True])
@pytest.mark.parametrize("name", ["num_blocks", "block_size", "num_kv_heads", "head_dim", "num_layers"])
def test_sizes_are_whole_numbers_of_at_least_one(name, number):
    sizes = {"num_blocks": 1, "block_size": 1, "num_kv_heads": 1, "head_dim": 1, "num_layers": 1}
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got {number!r}"):
        PagedKVCache(**{**sizes, name: number})


@pytest.mark.parametrize(
    "manager, storage",
    [
        (BlockManager(5, 4), None),
        (BlockManager(4, 2), None),
        (None, KVStorage(1, 5, 4, 1, 1)),
        (BlockManager(8, 4), KVStorage(1, 8, 4, 1, 1)),
    ],
)
def test_parts_of_another_size_are_refused(manager, storage):
    with pytest.raises(ValueError, match=r"\(num_blocks, block_size\) is \(4, 4\)"):
        PagedKVCache(4, 4, 1, 1, manager=manager, storage=storage)


# Moving between caches


def test_restore_from_pages_of_another_shape_changes_nothing():
    source = Model(4, 4)
    source.alloc(5, "a")
    for shape in ((LAYERS + 1, 4, 4, HEADS, HEAD_DIM), (LAYERS, 4, 4, HEADS, HEAD_DIM + 1)):
        target = PagedKVCache(4, 4, *shape[3:], num_layers=shape[0], poison=True)
        with refused(target, ValueError, "pages of the source"):
            target.restore(source.pool.snapshot(), source.pool)
    for options in ({"dtype": "float16"}, {}):
        target = new_cache(4, 4 if options else 8, **options)
        with refused(target, ValueError, "pages of the source"):
            target.restore(source.pool.snapshot(), source.pool)


def test_restore_from_no_pages_at_all_changes_nothing():
    source, target = Model(4, 4), new_cache(4, 4)
    source.alloc(5, "a")
    with refused(target, ValueError, "must be a KVStorage, got None"):
        target.restore(source.pool.snapshot(), None)


def test_restore_of_blocks_that_the_source_does_not_have_changes_nothing():
    source, target = Model(8, 4), new_cache(8, 4)
    source.alloc(24)
    with refused(target, ValueError, "there is no block 4"):
        target.restore(source.pool.snapshot(), new_cache(4, 4))


def test_sequences_swap_out_and_in_again_with_their_sharing():
    device, host = Model(6, 4), Model(4, 4)
    device.alloc(6, "a")
    device.fork("a", ["b", "c"])
    device.append("b")
    host.swap_in(device, ["c", "b"])
    assert (device.num_free, host.num_free, host.refs) == (4, 1, [2, 1, 1, 0])
    device.swap_in(host, ["b", "c"])
    assert (device.num_free, host.num_free) == (1, 4), "a and its twin c hold two copies now"
    device.append(["a", "b", "c"], 2)


# Observers


def test_the_cache_tells_what_its_manager_does_once_a_call():
    kinds = []
    cache = new_cache(4, 4, observers=[lambda event: kinds.append(event.kind)])
    cache.add("a")
    cache.append("a", *all_layers(range(5)), 5)
    cache.fork("a", ["b"])
    cache.append("b", *all_layers([1]))
    cache.attend(0, zeros(1, HEADS, HEAD_DIM), cache.plan("b"))
    cache.truncate("b", 4), cache.reorder(["a", "b"], [0, 0]), cache.release_before("b", 4)
    with refused(cache):
        cache.append("a", *all_layers(range(20)), 20)
    cache.free(["a", "b"])
    assert kinds == [
        "add",
        "extend",
        "fork",
        "extend",
        "truncate",
        "reorder",
        "release_before",
        "refuse",
        "free",
    ]


@pytest.mark.parametrize("warnings_are", ["default", "error"])
@pytest.mark.filterwarnings("ignore")
def test_an_observer_that_raises_does_not_leave_the_cache_half_done(warnings_are):
    """The copies are made, the pages poisoned and the later observers told, even where warnings are errors."""
    import warnings

    def broken(event):
        raise RuntimeError("no display")

    kinds = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always" if warnings_are == "default" else "error")
        model = Model(4, 4, observers=[broken, lambda event: kinds.append(event.kind)])
        model.alloc(3, "a")
        model.fork("a", ["b"])
        assert len(model.append("b").copies) == 1
        model.truncate("b", 1)
        with refused(model.pool):
            model.append("a", 99)
        model.free(["a", "b"])
    assert kinds == ["add", "extend", "fork", "extend", "truncate", "refuse", "free"]
    if warnings_are == "default":
        assert [w.category for w in caught] == [RuntimeWarning] * len(kinds)
        assert "failed on 'add': RuntimeError('no display')" in str(caught[0].message)
