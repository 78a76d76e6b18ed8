"""The planned kernel over a cache: equal to dense attention, blind to where blocks lie, and never stale."""

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from needs import need_module
from numpy.testing import assert_allclose, assert_array_equal
from paging import boundary_lengths, cached, random_query, random_sequence, shuffled_cache

from pagedkv import (
    AttentionPlan,
    KVStorage,
    PagedKVCache,
    PoolExhausted,
    StalePlan,
    decode,
    dense_attention,
    paged_attention,
    slots_of,
    tiles,
)

pytestmark = pytest.mark.filterwarnings("error")

BLOCK_SIZES = [1, 2, 3, 4, 8, 16, 32]
HEADS = [pytest.param(4, 4, id="MHA"), pytest.param(6, 2, id="GQA"), pytest.param(4, 1, id="MQA")]
OPTIONS = [
    pytest.param(None, {}, id="plain"),
    pytest.param(None, {"scale": 0.3}, id="scale"),
    pytest.param(1, {}, id="window-1"),
    pytest.param(3, {}, id="window-3"),
    pytest.param(None, {"soft_cap": 0.7}, id="soft-cap"),
    pytest.param(5, {"soft_cap": 1.5, "scale": 0.9}, id="all"),
]


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def expected(query, sequences, counts, **options):
    """The dense reference for each sequence of a batch, end to end."""
    starts = np.cumsum(counts) - counts
    return np.concatenate(
        [
            dense_attention(query[start : start + n], keys, values, **options)
            for start, n, (keys, values) in zip(starts, counts, sequences, strict=True)
        ]
    )


def assert_attends(cache, ids, sequences, counts, query, window=None, **options):
    """Plan, run, compare with dense attention over the plain lists; returns the output."""
    out = cache.attend(0, query, cache.plan(ids, counts, window=window), **options)
    assert out.dtype == np.float32
    assert_allclose(out, expected(query, sequences, counts, window=window, **options), 1e-5, 1e-5)
    return out


# Equal to dense attention


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_decode_step_equals_dense_at_every_boundary(rng, block_size, heads, kv_heads):
    sequences = [random_sequence(rng, n, kv_heads, 8) for n in boundary_lengths(block_size)]
    cache, ids = cached(sequences, block_size, rng)
    query = random_query(rng, len(ids), heads, 8)
    assert_attends(cache, ids, sequences, [1] * len(ids), query)


@pytest.mark.parametrize(("window", "options"), OPTIONS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_decode_prefill_and_idle_sequences_mix_in_one_batch(rng, block_size, window, options):
    lengths = boundary_lengths(block_size)
    counts = [(1, 4, 0, 3)[i % 4] for i in range(len(lengths))]  # some ask more queries than they have keys
    sequences = [random_sequence(rng, n, 2, 8) for n in lengths]
    cache, ids = cached(sequences, block_size, rng)
    query = random_query(rng, sum(counts), 4, 8)
    assert_attends(cache, ids, sequences, counts, query, window, **options)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8])
def test_queries_before_the_first_key_and_of_an_empty_sequence_give_zeros(rng, length):
    sequence = random_sequence(rng, length, 2, 8)
    cache, (a,) = cached([sequence], 4, rng)
    plan = cache.plan(a, length + 2)
    query = random_query(rng, length + 2, 4, 8)
    out, lse = plan.run(0, query, cache.storage, return_lse=True)
    assert_array_equal(out[:2], 0)
    assert_array_equal(lse[:2], -np.inf)
    assert np.isfinite(lse[2:]).all()
    assert_allclose(out[2:], dense_attention(query[2:], *sequence), 1e-5, 1e-5)


@pytest.mark.parametrize(("window", "options"), OPTIONS)
def test_the_kernel_and_the_readable_reference_agree_in_output_and_log_sum_exp(rng, window, options):
    sequences, counts = [random_sequence(rng, n, 2, 8) for n in (9, 0, 4, 13)], [1, 2, 0, 5]
    cache, ids = cached(sequences, 4, rng)
    query = random_query(rng, sum(counts), 4, 8)
    fast = cache.plan(ids, counts, window=window).run(0, query, cache.storage, return_lse=True, **options)
    arrays = cache.storage.arrays
    simple = paged_attention(
        query,
        arrays["keys"][0],
        arrays["values"][0],
        cache.block_tables(ids),
        cache.lengths(ids),
        num_queries=counts,
        window=window,
        return_lse=True,
        **options,
    )
    for ours, reference in zip(fast, simple, strict=True):
        assert_allclose(ours, reference, 1e-5, 1e-5)


def grow(cache, text, ids, n, rng):
    """Append n random tokens to each sequence, in the cache and in the plain lists of keys and values."""
    new = [random_sequence(rng, n, 2, 8) for _ in ids]
    keys, values = (np.concatenate(arrays)[None] for arrays in zip(*new, strict=True))
    cache.append(ids, keys, values, n)
    for seq_id, more in zip(ids, new, strict=True):
        text[seq_id] = tuple(map(np.concatenate, zip(text[seq_id], more, strict=True)))


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_forked_and_diverged_histories_each_see_their_own(rng, block_size):
    for length in boundary_lengths(block_size):
        cache = shuffled_cache(64, block_size, 2, 8, rng)
        text = {cache.add("a"): random_sequence(rng, 0, 2, 8)}
        grow(cache, text, ["a"], length, rng)
        cache.fork("a", ["b", "c"])
        text["b"] = text["c"] = text["a"]
        for step in range(2 * block_size + 1):
            writers = [["b"], ["a", "c"], ["c", "b", "a"]][step % 3]
            grow(cache, text, writers, 1 + step % 2, rng)
            assert_attends(cache, list(text), text.values(), [1, 1, 1], random_query(rng, 3, 4, 8))


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_float16_pages_lose_nothing_beyond_their_storage(rng, block_size):
    sequences = [
        tuple(array.astype(np.float16) for array in random_sequence(rng, n, 2, 8))
        for n in boundary_lengths(block_size)
    ]
    cache, ids = cached(sequences, block_size, rng, dtype="float16")
    assert_attends(cache, ids, sequences, [2] * len(ids), random_query(rng, 2 * len(ids), 4, 8))


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 4, 7])
def test_a_window_needs_no_block_in_front_of_it(rng, block_size, window):
    """Decode with a window: at each step everything below the first visible key is given up, and poisoned."""
    steps = 3 * max(block_size, window)
    keys, values = random_sequence(rng, steps, 2, 8)
    cache = shuffled_cache(2 + -(-window // block_size), block_size, 2, 8, rng)
    a = cache.add()
    for n in range(1, steps + 1):
        cache.append(a, keys[None, n - 1 : n], values[None, n - 1 : n])
        cache.release_before(a, max(0, n - window))
        assert_attends(cache, [a], [(keys[:n], values[:n])], [1], random_query(rng, 1, 4, 8), window)


def test_a_plan_serves_every_layer_and_each_layer_reads_its_own_pages(rng):
    cache = shuffled_cache(8, 4, 2, 8, rng, num_layers=3)
    layers = [random_sequence(rng, 6, 2, 8) for _ in range(3)]
    a = cache.add()
    cache.append(a, *map(np.stack, zip(*layers, strict=True)), 6)
    plan = cache.plan(a)
    for layer, sequence in enumerate(layers):
        query = random_query(rng, 1, 4, 8)
        assert_allclose(cache.attend(layer, query, plan), dense_attention(query, *sequence), 1e-5, 1e-5)


@given(st.data())
def test_any_ragged_batch_equals_dense(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    block_size = data.draw(st.integers(1, 9), "block_size")
    kv_heads, group = data.draw(st.integers(1, 3), "kv_heads"), data.draw(st.integers(1, 4), "group")
    lengths = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=6), "lengths")
    counts = [data.draw(st.integers(0, 7), "queries") for _ in lengths]
    window = data.draw(st.none() | st.integers(1, 40), "window")
    soft_cap = data.draw(st.none() | st.floats(0.1, 50), "soft_cap")
    sequences = [random_sequence(rng, n, kv_heads, 4) for n in lengths]
    cache, ids = cached(sequences, block_size, rng)
    query = random_query(rng, sum(counts), kv_heads * group, 4)
    assert_attends(cache, ids, sequences, counts, query, window, soft_cap=soft_cap)


# The same bits


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_where_the_blocks_lie_does_not_change_a_bit(rng, block_size):
    sequences, counts = [random_sequence(rng, n, 2, 64) for n in (9, 0, 40, 33)], [1, 1, 3, 0]
    query = random_query(rng, sum(counts), 8, 64)
    outs, tables = [], []
    for seed in range(4):
        cache, ids = cached(sequences, block_size, np.random.default_rng(seed), spare=seed)
        outs.append(cache.attend(0, query, cache.plan(ids, counts)))
        tables.append(cache.block_tables(ids).tolist())
    assert any(table != tables[0] for table in tables)
    for out in outs[1:]:
        assert_array_equal(out, outs[0])


@pytest.mark.parametrize("block_size", [7, 16])
def test_a_sequence_in_a_batch_gets_the_bits_of_its_own_run(rng, block_size):
    lengths, counts = (
        (9, 0, 40, 33, 1, 250, 255, 210, 900, 1100, 38, 1025),
        (1, 1, 3, 0, 1, 1, 1, 1, 1, 200, 1, 1),
    )
    sequences = [random_sequence(rng, n, 2, 64) for n in lengths]
    cache, ids = cached(sequences, block_size, rng)
    query = random_query(rng, sum(counts), 8, 64)
    batch = cache.attend(0, query, cache.plan(ids, counts))
    first = 0
    for seq_id, n in zip(ids, counts, strict=True):
        rows = slice(first, first + n)
        assert_array_equal(cache.attend(0, query[rows], cache.plan(seq_id, n)), batch[rows])
        first += n


def test_repeating_a_run_repeats_its_bits_and_leaves_query_and_pages_alone(rng):
    cache, ids = cached([random_sequence(rng, 9, 2, 8)], 4, rng)
    query, pages = random_query(rng, 1, 4, 8), {n: a.copy() for n, a in cache.storage.arrays.items()}
    plan, before = cache.plan(ids), query.copy()
    assert_array_equal(cache.attend(0, query, plan), cache.attend(0, query, plan))
    assert_array_equal(query, before)
    for name, page in pages.items():
        assert_array_equal(cache.storage.arrays[name], page)


# The fast paths: every kind of task, every type of page


def assert_exact(cache, ids, counts, query, plan, window=None, **options):
    """Within 2e-6 of the largest value of dense attention in float64 over what the pages hold, read back."""
    out, lse = plan.run(0, query, cache.storage, return_lse=True, **options)
    first = 0
    for seq_id, n in zip(ids, counts, strict=True):
        rows = slice(first, first + n)
        keys, values = cache.gather(0, seq_id)
        want, want_lse = dense_attention(query[rows], keys, values, window=window, return_lse=True, **options)
        assert np.abs(out[rows] - want).max(initial=0) <= 2e-6 * np.abs(values).max(initial=0)
        assert_allclose(lse[rows], want_lse, 1e-5, 1e-5)
        first += n
    return out


def tasks_of(plan, cache):
    """The kinds of tasks in a plan: members of a task, and of each of its pieces."""
    return [
        (
            task.members,
            [(run.members.stop - run.members.start, run.count) for p in task.pieces for run in p.runs],
        )
        for task in plan.tasks(cache.storage)
    ]


@contextmanager
def small_limits():
    """Limits that small sequences reach: chunks of 16 keys, short up to 12, tiles of 4, tasks of 6 queries …"""
    width = 2 * 8
    limits = {
        "CHUNK": 16 * width,
        "SHORT": 12 * width,
        "UNIT": 4,
        "TOGETHER": 12 * width,
        "SCORES": 200,
        "LEAST_SHARED": 4 * width,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            **limits,
            "MOST_QUERIES": 6,
            "MOST_ASKED": 4,
            "LEAST_QUERIES": 2,
            "TILE": 4,
        }.items():
            patch.setattr(decode, name, value)
        patch.setattr(tiles, "TILE", 4)
        patch.setattr(tiles, "VECTOR", 6 * 8)
        patch.setattr(tiles, "PRODUCT", 4 * 4 * 8)
        yield


@pytest.fixture
def small_tasks():
    with small_limits():
        yield


DTYPES = ["float32", "float16", "bfloat16", "int8"]


@pytest.mark.parametrize(
    ("dtype", "block_size", "window"),
    [("float32", 100, None), ("float16", 16, 200), ("bfloat16", 16, None), ("int8", 3, None)],
)
def test_lengths_around_tiles_and_chunks_are_exact(rng, dtype, block_size, window):
    """kv_heads · head_dim is 512: sequences are short up to 256 keys, a chunk has 1024, a product 512 of them."""
    lengths, counts = [1, 127, 128, 257, 0, 640, 1025, 1300], [1, 1, 3, 1, 1, 1, 2, 1]
    sequences = [random_sequence(rng, n, 8, 64) for n in lengths]
    cache, ids = cached(sequences, block_size, rng, dtype=dtype)
    query = random_query(rng, sum(counts), 32, 64)
    plan = cache.plan(ids, counts, window=window)
    assert_exact(cache, ids, counts, query, plan, window)


@given(st.data())
def test_any_batch_is_exact_with_limits_that_small_sequences_reach(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    block_size = data.draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16, 20]), "block_size")
    kv_heads, group = data.draw(st.integers(1, 2), "kv_heads"), data.draw(st.integers(1, 8), "group")
    length = st.sampled_from([0, 1, 2, 3, 4, 5, 8, 11, 12, 13, 15, 16, 17, 31, 32, 33, 47, 50])
    lengths = data.draw(st.lists(length, min_size=1, max_size=6), "lengths")
    counts = [data.draw(st.sampled_from([1, 1, 0, 2, 5, 13, 60]), "queries") for _ in lengths]
    window = data.draw(st.none() | st.integers(1, 40), "window")
    soft_cap = data.draw(st.none() | st.floats(0.5, 50), "soft_cap")
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    threads = data.draw(st.sampled_from([None, 1, 3]), "threads")
    sequences = [random_sequence(rng, n, kv_heads, 8) for n in lengths]
    cache, ids = cached(sequences, block_size, rng, dtype=dtype)
    query = random_query(rng, sum(counts), kv_heads * group, 8)
    with small_limits():
        plan = cache.plan(ids, counts, window=window, threads=threads)
        assert_exact(cache, ids, counts, query, plan, window, soft_cap=soft_cap)


def family_tree(rng, block_size, lengths, dtype="float32"):
    """A cache where each (parent, own tokens) of `lengths` forks an earlier one (None: nobody) and goes on alone."""
    cache = shuffled_cache(
        sum(-(-n // block_size) + 1 for _, n in lengths) + 1, block_size, 2, 8, rng, dtype=dtype
    )
    ids = []
    for parent, own in lengths:
        ids += [cache.add()] if parent is None else cache.fork(ids[parent])
        keys, values = random_sequence(rng, own, 2, 8)
        cache.append(ids[-1], keys[None], values[None], own)
    return cache, ids


@given(st.data())
def test_shared_prefixes_are_exact_however_they_nest(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    own = st.sampled_from([0, 1, 3, 4, 7, 8, 12, 20, 33])
    lengths = [(None, data.draw(own, "root"))]
    for i in range(1, data.draw(st.integers(2, 9), "sequences")):
        lengths.append((data.draw(st.none() | st.integers(0, i - 1), "parent"), data.draw(own, "own")))
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    cache, ids = family_tree(rng, data.draw(st.sampled_from([1, 2, 4]), "block_size"), lengths, dtype)
    ids = data.draw(st.permutations(ids), "order")
    counts = [data.draw(st.sampled_from([1, 1, 1, 0, 3]), "queries") for _ in ids]
    window = data.draw(st.none() | st.integers(1, 60), "window")
    query = random_query(rng, sum(counts), 2 * data.draw(st.integers(1, 4), "group"), 8)
    for share in (True, False):
        plan = cache.plan(ids, counts, window=window, share=share)
        with small_limits():
            assert_exact(cache, ids, counts, query, plan, window)


def test_a_shared_prefix_is_gathered_once_for_all_who_begin_with_it(rng, small_tasks):
    cache, ids = family_tree(rng, 4, [(None, 32), (0, 5), (0, 2), (None, 32)])
    kinds = tasks_of(cache.plan(ids), cache)
    assert sorted(members for members, _ in kinds) == [1, 3]
    (family,) = [pieces for members, pieces in kinds if members == 3]
    assert family[:2] == [(3, 1), (3, 1)]  # two chunks of 16 shared keys
    assert all(members == 1 for members, _ in tasks_of(cache.plan(ids, share=False), cache))


def test_one_sequence_in_two_groups_reads_each_shared_run_once(rng, small_tasks):
    """a and b go on from one prefix, c and d from b's: d is in the group of all and in that of b."""
    cache, ids = family_tree(rng, 4, [(None, 16), (0, 3), (0, 16), (2, 5), (2, 6)])
    plan, query = cache.plan(ids), random_query(rng, 5, 4, 8)
    ((members, pieces),) = tasks_of(plan, cache)
    assert members == 5 and pieces[:2] == [(5, 1), (3, 1)]
    assert_exact(cache, ids, [1] * 5, query, plan)


def test_a_prefix_that_is_not_worth_a_gather_is_read_with_the_longer_one_behind_it(rng, small_tasks):
    """All begin with one block, three of them with eleven: these read the first one, too."""
    cache, ids = family_tree(rng, 2, [(None, 3), (0, 20), (1, 2), (1, 3)])
    plan, query = cache.plan(ids), random_query(rng, 4, 4, 8)
    assert sorted(members for members, _ in tasks_of(plan, cache)) == [1, 3]
    assert_exact(cache, ids, [1] * 4, query, plan)


def test_tails_of_a_family_that_are_long_are_read_one_by_one(rng, small_tasks):
    cache, ids = family_tree(rng, 4, [(None, 16), (0, 30), (0, 1)])
    plan, query = cache.plan(ids), random_query(rng, 3, 4, 8)
    assert (1, 1) in [piece for _, pieces in tasks_of(plan, cache) for piece in pieces]
    assert_exact(cache, ids, [1] * 3, query, plan)


def test_members_that_have_no_room_for_their_scores_are_split(rng, small_tasks):
    cache, ids = family_tree(rng, 4, [(None, 40), *[(0, 3)] * 8])
    plan = cache.plan(ids)
    assert len(tasks_of(plan, cache)) == 3  # 4 times about 44 scores have room in 200
    assert_exact(cache, ids, [1] * 9, random_query(rng, 9, 4, 8), plan)


def test_short_sequences_that_fill_as_many_units_are_multiplied_together(rng, small_tasks):
    cache, ids = cached([random_sequence(rng, n, 2, 8) for n in (3, 7, 4, 1, 12, 13, 12)], 2, rng)
    plan = cache.plan(ids)
    assert sorted(tasks_of(plan, cache)) == [
        (1, [(1, 1)]),  # 13 is too long
        (
            6,
            [(3, 3), (1, 1), (1, 1), (1, 1)],
        ),  # one unit, two, and three: a call each
    ]
    (task,) = (task for task in plan.tasks(cache.storage) if task.segments)
    assert [len(piece.blocks) * 2 for piece in task.pieces] == [12, 20, 12]


def test_no_product_is_so_large_that_blas_would_use_threads(rng, small_tasks):
    cache, ids = cached([random_sequence(rng, n, 2, 8) for n in (3, 7, 12, 11, 8)], 2, rng)
    for heads, most in ((2, 47), (16, 4 * 4 * 8)):
        plan, query = cache.plan(ids), random_query(rng, len(ids), heads, 8)
        cache.attend(0, query, plan)
        (laid,) = [laid for lane in plan._laid.values() for laid in lane if laid.segments]
        products = [p for gather in laid.gathers for p in gather.products]
        sizes = [p.keys.shape[-2] * p.keys.shape[-1] * p.q.shape[-2] for p in products]
        assert max(sizes) <= most, sizes
        plan._laid.clear()
        plan._ready.clear()


@given(st.integers(1, 600), st.integers(1, 300), st.sampled_from([1, 3, 16, 64, 97]))
def test_runs_are_cut_into_equal_products_of_a_good_size(units, most, unit):
    tokens = units * unit
    tiles_ = tiles.tiles_of(tokens, most, unit)
    assert tokens % tiles_ == 0
    assert tokens // tiles_ == unit or most / 3 < tokens / tiles_ <= most or (tiles_ == 1 and tokens <= most)


def test_a_task_stays_within_the_memory_that_was_promised(rng):
    """However long a prompt: scores of 2**17 per head, or of 16 queries; chunks of 2**19 numbers."""
    storage = KVStorage(1, 200, 64, 2, 64)
    plan = AttentionPlan(np.arange(200)[None], [200 * 64], 64, 9000)
    tasks = plan.tasks(storage)
    assert sum(task.queries for task in tasks) == 9000
    assert max(task.queries * task.width for task in tasks) <= max(1 << 17, 16 * 12800)
    assert max(len(piece.blocks) for task in tasks for piece in task.pieces) * 64 * 128 <= 1 << 19
    behind = AttentionPlan(np.arange(200)[None], [200 * 64], 64, 9000, window=100).tasks(storage)
    assert max(task.width for task in behind) <= 128 + 100  # nobody gathers what no query of a task sees


def test_many_short_sequences_are_several_tasks(rng, small_tasks):
    """Each sequence in one of them; 4 chunks of 16 keys at most, or the last sequence's parts more."""
    lengths = [12, 3, 9, 1, 12, 12, 6, 8, 2, 12, 11, 5]
    cache, ids = cached([random_sequence(rng, n, 2, 8) for n in lengths], 2, rng)
    plan, query = cache.plan(ids), random_query(rng, len(ids), 4, 8)
    tasks = plan.tasks(cache.storage)
    assert sum(task.members for task in tasks) == len(ids)
    assert len(tasks) == 2
    assert max(task.width for task in tasks) <= 64 + 12
    assert_exact(cache, ids, [1] * len(ids), query, plan)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_in_unfilled_slots_never_matters(rng, dtype):
    """The same tokens over pages of zeros, of NaN and of infinities give the same bits."""
    lengths, outs = [5, 30, 300], []
    query = random_query(rng, 3, 4, 64)
    sequences = [random_sequence(rng, n, 2, 64) for n in lengths]
    for junk in (0, np.nan, np.inf):
        cache = PagedKVCache(64, 16, 2, 64, dtype=dtype)
        for array in cache.storage.arrays.values():
            if array.dtype.kind == "f":
                array[...] = junk
            else:
                array.view(np.uint8)[...] = 0xFF if junk else 0  # NaN as bfloat16, −1 as int8
        ids = [cache.add() for _ in lengths]
        for seq_id, (keys, values) in zip(ids, sequences, strict=True):
            cache.append(seq_id, keys[None], values[None], len(keys))
        outs.append(cache.attend(0, query, cache.plan(ids)))
    assert np.isfinite(outs[0]).all()
    for out in outs[1:]:
        assert_array_equal(out, outs[0])


def test_a_part_has_the_same_products_beside_others_and_alone(rng, small_tasks):
    """Short sequences, gathered together or by itself: the same bits."""
    cache, ids = cached([random_sequence(rng, n, 2, 8) for n in (8, 7, 5, 7)], 2, rng)
    query, plan = random_query(rng, 4, 6, 8), cache.plan(ids)
    assert [members for members, _ in tasks_of(plan, cache)] == [4]
    batch = cache.attend(0, query, plan)
    for i, seq_id in enumerate(ids):
        assert_array_equal(cache.attend(0, query[i : i + 1], cache.plan(seq_id)), batch[i : i + 1])


@pytest.mark.parametrize("share", [True, False])
def test_what_an_earlier_task_left_in_the_workspace_never_matters(rng, small_tasks, share):
    cache, ids = family_tree(rng, 4, [(None, 16), (0, 30), (0, 1), (None, 5), (None, 33)])
    counts, query = [1, 1, 1, 3, 1], random_query(rng, 7, 6, 8)
    plan = cache.plan(ids, counts, share=share)
    clean = assert_exact(cache, ids, counts, query, plan)
    for workspace in decode._idle:
        for memory in workspace._memory.values():
            memory.view(np.uint8)[...] = 0xFF  # NaN, as a float32
    assert_array_equal(cache.attend(0, query, plan), clean)


@pytest.mark.parametrize("length", [30, 3000])
def test_what_lies_in_front_of_the_window_never_matters(rng, length):
    cache, ids = cached([random_sequence(rng, length, 2, 64)], 16, rng)
    query = random_query(rng, 1, 4, 64)
    plan = cache.plan(ids, window=length - 5)
    before = cache.attend(0, query, plan)
    slots = slots_of(cache.block_tables(ids)[0], np.arange(5), 16)
    cache.storage.write(0, slots, *np.full((2, 5, 2, 64), np.nan))
    assert_array_equal(cache.attend(0, query, plan), before)


def test_float16_infinities_and_nan_are_seen_as_such(rng):
    cache, (a,) = cached([random_sequence(rng, 20, 2, 8)], 4, rng, dtype="float16")
    query = random_query(rng, 1, 4, 8)
    plan = cache.plan(a)
    slot = int(cache.block_tables([a])[0, 1]) * 4
    values = cache.storage.arrays["values"].reshape(-1, 2, 8)
    for number in (np.inf, -np.inf, np.nan):
        values[slot] = number
        with np.errstate(all="ignore"):
            assert_array_equal(cache.attend(0, query, plan), np.full((1, 4, 8), number, np.float32))


@pytest.mark.parametrize("size", [1e-7, 1, 1e3, 6e4])
def test_float16_pages_keep_small_and_large_numbers(rng, size):
    """Subnormal halves, halves near the end, and queries that would overflow with the whole factor."""
    keys, values = random_sequence(rng, 40, 2, 8)
    keys, values = (np.clip(array, -1, 1) * np.float32(size) for array in (keys, values))
    cache, ids = cached([(keys, values)], 4, rng, dtype="float16")
    for large in (1, 1e5):
        query = random_query(rng, 1, 4, 8) * np.float32(large)
        assert_exact(cache, ids, [1], query, cache.plan(ids), scale=float(1 / large / size))


def test_a_query_in_bfloat16_is_taken_as_it_is(rng):
    ml_dtypes = need_module("ml_dtypes", "onnx")
    cache, ids = cached([random_sequence(rng, 20, 2, 8)], 4, rng)
    query = random_query(rng, 1, 4, 8).astype(ml_dtypes.bfloat16)
    plan = cache.plan(ids)
    assert_array_equal(cache.attend(0, query, plan), cache.attend(0, query.astype(np.float32), plan))


# Threads


@pytest.fixture
def long_batch(rng):
    """Singles, short ones, a family, prefill: enough for several threads."""
    need_module("threadpoolctl", "bench")
    sequences = [random_sequence(rng, n, 2, 64) for n in (600, 40, 1100, 5, 60, 70)]
    cache, ids = cached(sequences, 16, rng, spare=100)
    ids += cache.fork(ids[0], 2)
    keys, values = random_sequence(rng, 20, 2, 64)
    cache.append(ids[-2:], keys[None], values[None], 10)
    counts = [1, 1, 140, 1, 3, 1, 1, 1]
    return cache, ids, counts, random_query(rng, sum(counts), 8, 64)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_give_the_bits_of_one_thread(long_batch, threads):
    cache, ids, counts, query = long_batch
    one = cache.attend(0, query, cache.plan(ids, counts, threads=1))
    plan = cache.plan(ids, counts, threads=threads)
    for _ in range(2):
        assert_array_equal(cache.attend(0, query, plan), one)
    assert len(plan._lanes(cache.storage)[0]) == min(threads, len(plan.tasks(cache.storage)))


@pytest.mark.parametrize("threads", [1, 2])
def test_two_users_may_run_one_plan_at_once(long_batch, rng, threads):
    cache, ids, counts, query = long_batch
    plan = cache.plan(ids, counts, threads=threads)
    queries = [query * np.float32(f) for f in (1, 0.5, 0.25)]
    alone = [cache.attend(0, q, cache.plan(ids, counts, threads=1)) for q in queries]
    wrong = []

    def user(i):
        for _ in range(3):
            if not np.array_equal(cache.attend(0, queries[i], plan), alone[i]):
                wrong.append(i)

    users = [threading.Thread(target=user, args=[i]) for i in range(3)]
    for thread in users:
        thread.start()
    for thread in users:
        thread.join()
    assert not wrong


def test_a_run_in_threads_leaves_blas_as_it_was(long_batch):
    from threadpoolctl import ThreadpoolController

    blas = ThreadpoolController().select(user_api="blas")
    cache, ids, counts, query = long_batch

    def now():
        return {library["num_threads"] for library in blas.info()}

    before, inside = now(), []
    decode.in_threads(2, lambda lane, workspace: inside.append(now()), large=True)
    assert inside == [{1}, {1}]
    decode.in_threads(2, lambda lane, workspace: inside.append(now()))
    assert inside[2:] == [before] * 2, "small products stay in one thread anyway, and setting it takes time"
    cache.attend(0, query, cache.plan(ids, counts, threads=2))
    with pytest.raises(ZeroDivisionError):
        decode.in_threads(2, lambda lane, workspace: 1 // (lane - 1), large=True)
    with decode.one_blas_thread:  # entered here and left elsewhere, as by several users
        other = threading.Thread(target=decode.in_threads, args=[2, lambda lane, workspace: None, True])
        other.start()
        other.join()
        assert now() == {1}, "another one is still inside"
    assert now() == before


def test_an_error_in_any_thread_comes_out_after_all_have_ended(long_batch):
    ended = []

    def compute(lane, workspace):
        if lane == 2:
            raise ZeroDivisionError
        time.sleep(0.05)
        ended.append(lane)

    with pytest.raises(ZeroDivisionError):
        decode.in_threads(4, compute)
    assert sorted(ended) == [0, 1, 3]


def test_threads_come_by_size_and_never_without_threadpoolctl(long_batch, monkeypatch):
    cache, ids, _, _ = long_batch

    def lanes():
        return len(fresh_plan(cache, ids)._lanes(cache.storage)[0])

    assert lanes() == 1, "too little for threads"
    monkeypatch.setattr(decode, "PER_THREAD", 1000)
    monkeypatch.setattr(decode, "available_threads", lambda: 3)
    assert lanes() == 3
    monkeypatch.undo()
    monkeypatch.setattr(decode, "PER_THREAD", 1000)
    monkeypatch.setattr(decode.one_blas_thread, "_found", (None,))
    assert lanes() == 1
    with pytest.raises(ImportError, match=r'pip install "pagedkv\[bench\]"'):
        cache.plan(ids, threads=2)


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2", True])
def test_a_number_of_threads_is_checked_when_planning(rng, threads):
    cache, _, _ = planned(rng, ["a"])
    with pytest.raises(ValueError, match=f"threads.*{threads}"):
        cache.plan("a", threads=threads)


def test_pages_that_replace_those_of_earlier_layers_are_the_ones_that_are_read(rng):
    """A plan knows blocks and not arrays: with other pages, of another type even, it reads those."""
    sequence, query = random_sequence(rng, 40, 2, 8), random_query(rng, 1, 4, 8)
    cache, ids = cached([sequence], 4, rng)
    plan = cache.plan(ids)
    before = cache.attend(0, query, plan)
    for dtype in DTYPES:
        cache.storage = KVStorage(1, cache.num_blocks, 4, 2, 8, dtype, poison=True)
        slots = slots_of(cache.block_tables(ids)[0], np.arange(40), 4)
        cache.storage.write(0, slots, *(array * 2 for array in sequence))
        after = assert_exact(cache, ids, [1], query, plan)
        assert np.abs(after - before).max() > 0.1


# Stale plans

CHANGES = {
    "extend": lambda cache: cache.extend("a"),
    "extend by a block": lambda cache: cache.extend("a", 4),
    "truncate": lambda cache: cache.truncate("a", 5),
    "truncate to nothing": lambda cache: cache.truncate("a", 0),
    "free": lambda cache: cache.free("a"),
    "free and add again": lambda cache: (cache.free("a"), cache.add("a"), cache.extend("a", 6)),
    "release_before": lambda cache: cache.release_before("a", 4),
    "reorder": lambda cache: cache.reorder(["a", "b"], [1, 0]),
    "reorder away": lambda cache: cache.reorder(["a", "b"], [1, 1]),
    "fork and write": lambda cache: (cache.fork("a", ["c"]), cache.extend("a")),
}


def refused_extend(cache):
    with pytest.raises(PoolExhausted):
        cache.extend("a", 1000)


NO_CHANGES = {
    "fork": lambda cache: cache.fork("a", ["c"]),
    "the fork writes": lambda cache: (cache.fork("a", ["c"]), cache.extend("c"), cache.free("c")),
    "another grows": lambda cache: cache.extend("b"),
    "another leaves": lambda cache: cache.free("b"),
    "reorder that keeps it": lambda cache: cache.reorder(["a", "b"], [0, 0]),
    "extend by nothing": lambda cache: cache.extend("a", 0),
    "truncate to the same": lambda cache: cache.truncate("a", 6),
    "release_before within the first block": lambda cache: cache.release_before("a", 3),
    "a refused extend": refused_extend,
}


def planned(rng, seq_ids):
    """A cache with sequences "a" (6 tokens) and "b" (6 tokens), a plan for some of them, and a query."""
    cache = shuffled_cache(16, 4, 2, 8, rng)
    for seq_id in "ab":
        keys, values = random_sequence(rng, 6, 2, 8)
        cache.append(cache.add(seq_id), keys[None], values[None], 6)
    return cache, cache.plan(seq_ids), random_query(rng, len(seq_ids), 4, 8)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_plan_is_stale_once_its_sequence_changes(rng, change):
    cache, plan, query = planned(rng, ["a"])
    cache.attend(0, query, plan)
    change(cache)
    with pytest.raises(StalePlan, match="'a'"):
        cache.attend(0, query, plan)


@pytest.mark.parametrize("change", NO_CHANGES.values(), ids=NO_CHANGES.keys())
def test_a_plan_stays_valid_while_its_sequence_is_untouched(rng, change):
    cache, plan, query = planned(rng, ["a"])
    before = cache.attend(0, query, plan)
    change(cache)
    assert_array_equal(cache.attend(0, query, plan), before)


def grown_apart(rng, steps, lengths=(9, 14, 3, 17), spare=4):
    """Yield, step by step, a cache that plans every step and the ids; blocks lie at random, so do their numbers."""
    sequences = [random_sequence(rng, n, 2, 8) for n in lengths]
    cache, ids = cached(sequences, 2, rng, spare=spare * steps)
    for _ in range(steps):
        new = rng.standard_normal((2, 1, len(ids), 2, 8)).astype(np.float32)
        cache.append(ids, *new)
        yield cache, ids


def fresh_plan(cache, ids, **options):
    """A plan that nothing was kept for."""
    return AttentionPlan(cache.block_tables(ids), cache.lengths(ids), cache.block_size, **options)


def test_a_plan_that_takes_over_the_last_one_gives_the_bits_of_a_new_one(rng):
    """Through edges of blocks and parts, and from short to long: 64 keys a part, short up to 8192."""
    taken_over, last = 0, None
    for cache, ids in grown_apart(rng, 70):
        query, plan = random_query(rng, len(ids), 4, 8), cache.plan(ids)
        laid = plan._laid
        taken_over += bool(laid) and last is not None and laid is not last._laid
        out = cache.attend(0, query, plan)
        assert_array_equal(out, fresh_plan(cache, ids).run(0, query, cache.storage))
        last = plan
    assert taken_over > 60


def test_a_sequence_that_outgrows_the_short_ones_is_planned_anew(rng, small_tasks, monkeypatch):
    monkeypatch.setattr(decode, "SHORT", 11 * 2 * 8)  # 11 keys, which is not at the edge of a part
    for cache, ids in grown_apart(rng, 12, (9, 3, 7)):
        query, plan = random_query(rng, len(ids), 4, 8), cache.plan(ids)
        assert_array_equal(cache.attend(0, query, plan), fresh_plan(cache, ids).run(0, query, cache.storage))
        assert tasks_of(plan, cache) == tasks_of(fresh_plan(cache, ids), cache)


def test_a_plan_that_was_taken_over_still_knows_its_own_step(rng):
    steps = grown_apart(rng, 2)
    cache, ids = next(steps)
    query, plan = random_query(rng, len(ids), 4, 8), cache.plan(ids)
    before = plan.run(0, query, cache.storage)
    next(steps)
    later = cache.plan(ids)
    assert later._laid and not plan._laid, "taken over"
    assert (later.run(0, query, cache.storage) != before).any()
    assert_array_equal(plan.run(0, query, cache.storage), before)


def test_a_plan_serves_until_something_changes(rng):
    cache, plan, _ = planned(rng, ["a", "b"])
    assert cache.plan(["a", "b"]) is plan
    cache.fork("a", ["c"])
    assert cache.plan(["a", "b"]) is plan, "neither has changed"
    assert cache.plan(["b", "a"]) is not plan
    plan = cache.plan(["a", "b"])
    cache.extend("b")
    assert cache.plan(["a", "b"]) is not plan


BETWEEN = {
    "a step that the cache has not granted": lambda cache, ids: cache.manager.extend(ids),
    "two steps": lambda cache, ids: (cache.extend(ids), cache.extend(ids)),
    "a look at another one, and a step": lambda cache, ids: (cache.versions(ids[:1]), cache.extend(ids)),
    "a step of some": lambda cache, ids: cache.extend(ids[:2]),
    "a step in another order": lambda cache, ids: cache.extend(ids[::-1]),
    "two tokens each": lambda cache, ids: cache.extend(ids, 2),
    "somebody else's step": lambda cache, ids: (cache.extend(ids), cache.extend(cache.add())),
    "a fork": lambda cache, ids: (cache.fork(ids[1]), cache.extend(ids)),
    "a token less, and two more": lambda cache, ids: (cache.truncate(ids[3], 7), cache.extend(ids)),
    "a reorder": lambda cache, ids: (cache.reorder(ids, [1, 0, 2, 3]), cache.extend(ids)),
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN.keys())
def test_a_plan_is_taken_over_by_the_very_next_step_only(rng, between):
    for cache, ids in grown_apart(rng, 3, spare=16):
        query = random_query(rng, len(ids), 4, 8)
        cache.attend(0, query, cache.plan(ids))
        between(cache, ids)
        cache.storage.arrays["keys"][...] = rng.standard_normal(cache.storage.arrays["keys"].shape)
        cache.storage.arrays["values"][...] = rng.standard_normal(cache.storage.arrays["values"].shape)
        out = cache.attend(0, query, cache.plan(ids))
        assert_array_equal(out, fresh_plan(cache, ids).run(0, query, cache.storage))


def test_steps_that_only_the_manager_granted_are_planned(rng):
    cache = PagedKVCache(8, 2, 2, 8)
    ids = (cache.add(), cache.add())
    query = random_query(rng, len(ids), 4, 8)
    for _ in range(5):
        cache.manager.extend(ids)
        cache.storage.arrays["keys"][...] = rng.standard_normal(cache.storage.arrays["keys"].shape)
        out = cache.attend(0, query, cache.plan(ids))
        assert_array_equal(out, fresh_plan(cache, ids).run(0, query, cache.storage))


def test_a_plan_that_was_taken_over_serves_pages_of_another_shape(rng):
    """What it was cut for says nothing about them: it is cut again, from tables that have grown with it."""
    for cache, ids in grown_apart(rng, 7):
        plan = cache.plan(ids)
        cache.attend(0, random_query(rng, len(ids), 4, 8), plan)
    other = KVStorage(1, cache.num_blocks, 2, 1, 8)
    for array in other.arrays.values():
        array[...] = rng.standard_normal(array.shape)
    query, fresh = random_query(rng, len(ids), 4, 8), fresh_plan(cache, ids)
    assert_array_equal(plan.run(0, query, other), fresh.run(0, query, other))
    next(iter(plan._tasks.values()))[0].blocks.ids[...] = 0  # what is cut for one kind is not the other's
    assert_array_equal(plan.run(0, query, other), fresh.run(0, query, other))


def test_a_plan_that_was_taken_over_names_a_block_that_other_pages_lack(rng):
    for cache, ids in grown_apart(rng, 8):
        query, plan = random_query(rng, len(ids), 4, 8), cache.plan(ids)
        cache.attend(0, query, plan)
    tables = cache.block_tables(ids)
    size, highest = 2, int(tables.max())
    row = int(np.nonzero(tables == highest)[0][0])
    smaller = KVStorage(1, highest, size, 2, 8)
    with pytest.raises(ValueError, match=f"row {row} names block {highest}, the pool has 0 … {highest - 1}"):
        plan.run(0, query, smaller)
    just = KVStorage(1, highest + 1, size, 2, 8)
    for name, array in just.arrays.items():
        array[...] = cache.storage.arrays[name][:, : highest + 1]
    assert_array_equal(plan.run(0, query, just), cache.attend(0, query, plan))


def test_short_sequences_with_nothing_but_minus_infinity_to_weigh_give_zeros_as_dense_does(rng):
    lengths = [5, 3, 9]
    sequences = [random_sequence(rng, n, 2, 8) for n in lengths]
    sequences[1][0][...] = 1e30
    cache, ids = cached(sequences, 4, rng)
    query = random_query(rng, 3, 2, 8)
    query[1] = -1e30
    with np.errstate(over="ignore"):
        dense = dense_attention(query[1:2], *sequences[1], dtype=np.float32)
        out, lse = cache.plan(ids).run(0, query, cache.storage, return_lse=True)
    assert_array_equal(out[1:2], dense)
    assert_array_equal(out[1], 0)
    assert np.isfinite(lse[[0, 2]]).all() and (lse[1] == -np.inf).all()
    for i in (0, 2):
        alone = cache.plan(ids[i]).run(0, query[i : i + 1], cache.storage)
        assert_array_equal(out[i : i + 1], alone)


def test_a_step_after_a_fork_reads_the_shared_prefix_once(rng, small_tasks):
    cache, (a, b) = cached([random_sequence(rng, n, 2, 8) for n in (12, 12)], 4, rng, spare=9)
    query = random_query(rng, 2, 4, 8)
    cache.attend(0, query, cache.plan([a, b]))
    cache.reorder([a, b], [0, 0])
    plan = cache.plan([a, b])
    assert_exact(cache, [a, b], [1, 1], query, plan)
    assert tasks_of(plan, cache) == tasks_of(fresh_plan(cache, [a, b]), cache)
    assert plan.tasks(cache.storage)[0].members == 2


def test_a_block_that_a_window_left_behind_is_named_in_a_later_step_too(rng):
    cache, (a,) = cached([random_sequence(rng, 9, 2, 8)], 4, rng)
    cache.attend(0, random_query(rng, 1, 4, 8), cache.plan(a))
    cache.release_before(a, 4)
    with pytest.raises(ValueError, match="row 0 has no block for position 0"):
        cache.plan(a)


def test_a_block_that_is_missing_in_a_restored_sequence_is_named_too(rng):
    cache, (a,) = cached([random_sequence(rng, 9, 2, 8)], 4, rng)
    cache.release_before(a, 4)
    other = PagedKVCache(cache.num_blocks, 4, 2, 8)
    other.restore(cache.snapshot([a]), cache)
    with pytest.raises(ValueError, match="row 0 has no block for position 0"):
        other.plan(a)
    assert other.plan(a, window=3).total_queries == 1


def test_one_stale_sequence_makes_the_plan_of_a_batch_stale(rng):
    cache, plan, query = planned(rng, ["a", "b"])
    cache.extend("b")
    with pytest.raises(StalePlan, match="'b'"):
        cache.attend(0, query, plan)


# Callers' mistakes


@pytest.mark.parametrize(
    ("query", "named"),
    [
        (np.zeros((2, 4, 8), np.float32), "2 rows.*1"),
        (np.zeros((0, 4, 8), np.float32), "0 rows.*1"),
        (np.zeros((1, 4, 7), np.float32), r"\(1, 4, 7\)"),
        (np.zeros((1, 32), np.float32), r"\(1, 32\)"),
        (np.float32(1), r"\(\)"),
        (np.zeros((1, 3, 8), np.float32), "3 query heads.*2 KV heads"),
        (np.zeros((1, 0, 8), np.float32), "0 query heads"),
        (np.zeros((1, 4, 8), int), "int64"),
        (np.zeros((1, 4, 8), complex), "complex128"),
        (np.zeros((1, 4, 8), bool), "bool"),
    ],
)
def test_queries_that_do_not_fit_are_named(rng, query, named):
    cache, plan, _ = planned(rng, ["a"])
    with pytest.raises(ValueError, match=named):
        cache.attend(0, query, plan)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"soft_cap": 0}, "soft_cap.*0"),
        ({"soft_cap": np.nan}, "soft_cap.*nan"),
        ({"soft_cap": 1e-60}, "soft_cap.*1e-60"),
        ({"scale": np.inf}, "scale.*inf"),
        ({"scale": 1e39}, r"scale.*1e\+39"),
    ],
)
def test_options_that_float32_cannot_carry_are_named(rng, options, named):
    cache, plan, query = planned(rng, ["a"])
    with pytest.raises(ValueError, match=named):
        cache.attend(0, query, plan, **options)


@pytest.mark.parametrize("layer", [-1, 1, 0.5])
def test_a_layer_that_does_not_exist_is_named(rng, layer):
    cache, plan, query = planned(rng, ["a"])
    with pytest.raises(ValueError, match=f"layer.*{layer}"):
        cache.attend(layer, query, plan)


@pytest.mark.parametrize("window", [0, -1, 2.5, "4", True])
def test_a_window_is_checked_when_planning(rng, window):
    cache, _, _ = planned(rng, ["a"])
    with pytest.raises(ValueError, match=f"window.*{window}"):
        cache.plan("a", window=window)


@pytest.mark.parametrize("num_queries", [-1, 1.5, [1, 1]])
def test_query_counts_are_checked_when_planning(rng, num_queries):
    cache, _, _ = planned(rng, ["a"])
    with pytest.raises(ValueError, match="num_queries"):
        cache.plan("a", num_queries)


def test_only_registered_sequences_can_be_planned(rng):
    cache, _, _ = planned(rng, ["a"])
    with pytest.raises(KeyError, match="'z'"):
        cache.plan(["a", "z"])


def test_a_visible_block_that_was_left_behind_is_named_when_planning(rng):
    cache, _, _ = planned(rng, ["a"])
    cache.release_before("a", 4)
    cache.plan("a", window=2)
    with pytest.raises(ValueError, match=r"row 1.*position 3.*window"):
        cache.plan(["b", "a"], window=3)


@pytest.mark.parametrize(
    ("tables", "lengths", "block_size", "named"),
    [
        ([[0, -1]], [5], 4, "row 0.*position 4.*-1"),
        ([[0, 1], [2, -7]], [5, 5], 4, "row 1.*-7"),
        ([[0, 1]], [9], 4, "row 0.*9.*0 … 8"),
        ([[0, 1]], [-1], 4, "row 0.*-1"),
        ([[0, 1]], [5, 5], 4, r"lengths \(2,\)"),
        ([0, 1], [5], 4, r"tables \(2,\)"),
        ([[0.0, 1.0]], [5], 4, "block tables"),
        ([[0, 1]], [5], 0, "block_size.*0"),
        ([[0, 1]], [5], 2.5, "block_size.*2.5"),
    ],
)
def test_tables_that_do_not_fit_are_named_when_planning(tables, lengths, block_size, named):
    with pytest.raises(ValueError, match=named):
        AttentionPlan(tables, lengths, block_size)


def test_a_plan_for_other_pages_is_refused():
    storage, query = KVStorage(1, 6, 4, 2, 8), np.zeros((2, 4, 8), np.float32)
    AttentionPlan([[0, 1], [5, 2]], [5, 7], 4).run(0, query, storage)
    with pytest.raises(ValueError, match=r"row 1 names block 6.*0 … 5"):
        AttentionPlan([[0, 1], [6, 2]], [5, 7], 4).run(0, query, storage)
    with pytest.raises(ValueError, match=r"blocks of 2.*4"):
        AttentionPlan([[0, 1], [5, 2]], [3, 3], 2).run(0, query, storage)


def test_an_entry_that_no_query_sees_may_hold_anything():
    storage, query = KVStorage(1, 6, 4, 2, 8), np.zeros((1, 4, 8), np.float32)
    AttentionPlan([[-1, 99, 3, -1]], [11], 4, window=3).run(0, query, storage)


def test_a_batch_of_none_gives_an_empty_result(rng):
    cache, _, _ = planned(rng, ["a"])
    assert cache.attend(0, np.zeros((0, 4, 8), np.float32), cache.plan([])).shape == (0, 4, 8)
