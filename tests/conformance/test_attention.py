"""Attention as other engines' test suites and public fault reports demand it; ids name the report's kind."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from paging import boundary_lengths, cached, paged, random_query, random_sequence

from pagedkv import (
    AttentionPlan,
    BlockManager,
    KVStorage,
    PagedKVCache,
    dense_attention,
    merge,
    paged_attention,
)
from pagedkv.attention import softmax

pytestmark = pytest.mark.filterwarnings("error")


def readable(query, sequences, block_size, rng, dtype="float32", **options):
    """The block-by-block reference, on pages made by hand with NaN in every unused slot."""
    return paged_attention(query, *paged(sequences, block_size, rng, dtype), **options)


def planned(query, sequences, block_size, rng, dtype="float32", num_queries=1, window=None, **options):
    """The planned kernel, on a cache in poison mode."""
    cache, ids = cached(sequences, block_size, rng, dtype=dtype)
    return cache.plan(ids, num_queries, window=window).run(0, query, cache.storage, **options)


def as_sequence(keys, values):
    """One KV head of width 1, from lists of numbers."""
    return [np.array(numbers, np.float32).reshape(-1, 1, 1) for numbers in (keys, values)]


@pytest.fixture
def rng():
    return np.random.default_rng(11)


@pytest.fixture(params=[readable, planned])
def kernel(request):
    return request.param


# Unused slots


def test_unused_slots_filled_with_nan_never_change_a_result(kernel, rng):
    sequence = as_sequence([1, 1, 1, 1, 1], [1, 2, 3, 4, 5])
    out = kernel(np.ones((1, 1, 1), np.float32), [sequence], 4, rng)
    assert out.item() == pytest.approx(3.0, abs=1e-6)


@pytest.mark.parametrize(("block_size", "lengths"), [(16, [1]), (16, [1, 100, 16, 33]), (4, [5, 0, 64])])
def test_a_page_filled_by_one_slot_and_a_batch_padded_to_the_longest(kernel, rng, block_size, lengths):
    sequences = [random_sequence(rng, n, 2, 8) for n in lengths]
    query = random_query(rng, len(lengths), 4, 8)
    out = kernel(query, sequences, block_size, rng)
    for i, sequence in enumerate(sequences):
        assert_allclose(out[i], dense_attention(query[i : i + 1], *sequence)[0], 1e-5, 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_bits_that_an_earlier_owner_left_do_not_reach_the_next(rng, dtype):
    """The same memory held another type before: as floats, its bytes are NaN, infinite or huge."""
    size = KVStorage(1, 4, 4, 2, 8, dtype).nbytes
    garbage = [b"\xff" * size, b"\x7c\x00" * (size // 2), b"\x00\x7c" * (size // 2), rng.bytes(size)]
    keys, values = (array[None] for array in random_sequence(rng, 1, 2, 8))
    query = random_query(rng, 1, 4, 8)
    outs = []
    for memory in [bytes(size), *garbage]:
        cache = PagedKVCache(4, 4, 2, 8, storage=KVStorage(1, 4, 4, 2, 8, dtype, buffer=bytearray(memory)))
        a = cache.add()
        cache.append(a, keys, values)
        outs.append(cache.attend(0, query, cache.plan(a)))
        pages = [array[0] for array in cache.storage.arrays.values()]
        outs.append(paged_attention(query, *pages, cache.block_tables([a]), [1]))
    for out in outs[2:]:
        assert_array_equal(out, outs[len(outs) % 2])


# Heads


def test_query_heads_of_a_group_are_neighbours(kernel, rng):
    keys = np.ones((3, 2, 4), np.float32)
    values = np.ones((3, 2, 4), np.float32) * [[0], [1]]  # V of head h is h
    out = kernel(np.ones((1, 4, 4), np.float32), [(keys, values)], 2, rng)
    assert_allclose(out[0, :, 0], [0, 0, 1, 1])


# Merging, in natural logarithms


def test_parts_are_merged_in_natural_logarithms():
    out, lse = merge(np.array([[1.0]]), np.array([1.0]), np.array([[4.0]]), np.array([0.0]))
    assert out.item() == pytest.approx(1.80682, abs=5e-6)  # base 2 gives 2.0, a mix of the two 2.1464
    assert lse.item() == pytest.approx(math.log(math.e + 1))


def test_two_empty_parts_merge_into_an_empty_one():
    out, lse = merge(np.zeros((1, 1)), np.array([-np.inf]), np.zeros((1, 1)), np.array([-np.inf]))
    assert (out, lse) == ([[0.0]], [-np.inf])


def test_an_empty_part_changes_nothing():
    empty, part = (np.zeros((1, 1)), np.array([-np.inf])), (np.array([[4.0]]), np.array([0.5]))
    assert merge(*empty, *part) == merge(*part, *empty) == part


def test_the_log_sum_exp_of_a_kernel_is_natural(kernel, rng):
    sequence = as_sequence([1, 0], [1, 4])
    out, lse = kernel(np.ones((1, 1, 1), np.float32), [sequence], 1, rng, return_lse=True, scale=1.0)
    assert out.item() == pytest.approx(1.80682, abs=5e-6)
    assert lse.item() == pytest.approx(math.log(math.e + 1), abs=1e-6)


# Rows without a key


def test_more_queries_than_keys(kernel, rng):
    """Three queries over two keys, aligned to the end: the first query sees nothing."""
    sequence = random_sequence(rng, 2, 2, 8)
    query = random_query(rng, 3, 4, 8)
    out, lse = kernel(query, [sequence], 4, rng, num_queries=3, return_lse=True)
    assert_array_equal(out[0], 0)
    assert_array_equal(lse[0], -np.inf)
    assert_allclose(out[1:], dense_attention(query[1:], *sequence), 1e-5, 1e-5)


# Short sequences


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_very_short_sequences_in_one_batch_equal_their_own_runs(kernel, rng, block_size):
    sequences = [random_sequence(rng, n, 2, 8) for n in [1, 2, *boundary_lengths(block_size)]]
    query = random_query(rng, len(sequences), 4, 8)
    batch = kernel(query, sequences, block_size, rng)
    for i, sequence in enumerate(sequences):
        assert_array_equal(kernel(query[i : i + 1], [sequence], block_size, rng)[0], batch[i])


# Precision


@pytest.mark.parametrize(
    ("dtype", "weight_error", "lse_error"), [(np.float64, 1e-10, 1e-4), (np.float32, 3e-4, 4e-3)]
)
def test_very_negative_scores_keep_their_proportions(dtype, weight_error, lse_error):
    weights, lse = softmax(np.array([-60000, -60000 + math.log(3)], dtype))
    assert_allclose(weights, [0.25, 0.75], rtol=0, atol=weight_error)
    assert_allclose(lse, -59998.6137, rtol=0, atol=lse_error)


@pytest.mark.parametrize("block_size", [16, 4096])
def test_4096_equal_weights_lose_no_mass(kernel, rng, block_size):
    """A running sum in float16 stops at 0.5."""
    ones = np.ones((4096, 1, 1), np.float16)
    out = kernel(np.ones((1, 1, 1), np.float32), [(ones, ones)], block_size, rng, dtype="float16")
    assert out.item() == pytest.approx(1.0, abs=1e-5)


def test_scores_beyond_float16_stay_finite(kernel, rng):
    """q · k = 80,000, which float16 cannot hold."""
    keys, values = np.full((3, 1, 2), 200, np.float16), np.full((3, 1, 2), 7, np.float16)
    query = np.full((1, 1, 2), 200, np.float16)
    out, lse = kernel(query, [(keys, values)], 2, rng, dtype="float16", return_lse=True)
    assert_allclose(out, 7, rtol=1e-6)
    assert_allclose(lse, 80000 / math.sqrt(2) + math.log(3), rtol=1e-6)


@pytest.mark.parametrize("block_size", [1, 2, 8])
def test_large_scores_are_merged_as_precisely_as_small_ones(kernel, rng, block_size):
    """Near 60,000 float32 has steps of 0.004: a log-sum-exp kept in it would be a weight wrong by 0.4 %."""
    keys, values = random_sequence(rng, 8, 1, 4)
    keys[:, 0, 0] = 60000 + np.arange(8) / 8
    query = np.array([[[1, 0, 0, 0]]], np.float32)
    out = kernel(query, [(keys, values)], block_size, rng, scale=1.0)
    assert_allclose(out, dense_attention(query, keys, values, scale=1.0), 1e-5, 1e-5)


# Sliding window


@pytest.mark.parametrize(("position", "droppable"), [(7, 1), (8, 1), (9, 1), (11, 2)])
def test_the_first_visible_key_of_a_window(rng, position, droppable):
    """Blocks of 4, window 4: the query at p sees p − 3 … p, and what lies wholly below may go."""
    keys, values = random_sequence(rng, position + 1, 2, 8)
    cache, (a,) = cached([(keys, values)], 4, rng)
    query = random_query(rng, 1, 4, 8)
    assert len(cache.release_before(a, position - 4 + 1)) == droppable
    out = cache.attend(0, query, cache.plan(a, window=4))
    assert_allclose(out, dense_attention(query, keys[-4:], values[-4:]), 1e-5, 1e-5)
    if cache.length(a) > 4 * (droppable + 1):
        cache.release_before(a, 4 * (droppable + 1))
        with pytest.raises(ValueError, match="row 0 has no block"):
            cache.plan(a, window=4)


# flashinfer's form of block tables


def test_csr_tables_name_the_same_slots(rng):
    lengths = [5, 0, 8, 1, 4]
    sequences = [random_sequence(rng, n, 2, 8) for n in lengths]
    cache, ids = cached(sequences, 4, rng)
    indptr, indices, last_page_len = cache.to_csr(ids)
    assert indptr.dtype == indices.dtype == last_page_len.dtype == np.int32
    assert np.diff(indptr).tolist() == [2, 0, 2, 1, 1]  # an empty sequence is no page
    assert [n for n, pages in zip(last_page_len, np.diff(indptr), strict=True) if pages] == [1, 4, 1, 4]

    tables = np.full((len(ids), 2), -1)
    for row, (start, stop) in enumerate(itertools.pairwise(indptr)):
        tables[row, : stop - start] = indices[start:stop]
    filled = np.where(np.diff(indptr) > 0, (np.diff(indptr) - 1) * 4 + last_page_len, 0)
    query = random_query(rng, len(ids), 4, 8)
    out = AttentionPlan(tables, filled, 4).run(0, query, cache.storage)
    assert_array_equal(out, cache.attend(0, query, cache.plan(ids)))


@pytest.mark.parametrize("last_page_len", [0, 5])
def test_a_snapshot_whose_last_page_cannot_be_filled_like_that_is_refused(last_page_len):
    manager = BlockManager(8, 4)
    manager.extend(manager.add("a"), 7)
    snapshot = dataclasses.replace(manager.snapshot(), lengths=np.array([4 + last_page_len]))
    other = BlockManager(8, 4)
    with pytest.raises(ValueError, match="'a' has 2 pages"):
        other.restore(snapshot)
    assert (other.num_free, other.seq_ids) == (8, [])
