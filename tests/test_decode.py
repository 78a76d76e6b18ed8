"""The planned kernel over a cache: equal to dense attention, blind to where blocks lie, and never stale."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from paging import boundary_lengths, cached, random_query, random_sequence, shuffled_cache

from pagedkv import AttentionPlan, KVStorage, PoolExhausted, StalePlan, dense_attention, paged_attention

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


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_sequence_in_a_batch_gets_the_bits_of_its_own_run(rng, block_size):
    sequences, counts = [random_sequence(rng, n, 2, 64) for n in (9, 0, 40, 33, 1)], [1, 1, 3, 0, 1]
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
