"""Attention to be read: the dense reference against a loop, and pages against the dense reference."""

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from paging import boundary_lengths, paged, random_query, random_sequence

from pagedkv import dense_attention, merge, paged_attention
from pagedkv.attention import softmax, visible

pytestmark = pytest.mark.filterwarnings("error")

BLOCK_SIZES = [1, 2, 3, 4, 8, 16, 32]
HEADS = [pytest.param(4, 4, id="MHA"), pytest.param(6, 2, id="GQA"), pytest.param(4, 1, id="MQA")]
OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"scale": 0.3}, id="scale"),
    pytest.param({"scale": -1.0}, id="negative-scale"),
    pytest.param({"window": 1}, id="window-1"),
    pytest.param({"window": 3}, id="window-3"),
    pytest.param({"soft_cap": 0.7}, id="soft-cap"),
    pytest.param({"window": 4, "soft_cap": 1.5, "scale": 0.9}, id="all"),
]
SHAPES = [(1, 1), (1, 6), (4, 6), (6, 6), (8, 5), (3, 0), (0, 4), (0, 0)]  # queries, keys


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def by_hand(query, keys, values, scale=None, window=None, soft_cap=None):
    """Attention one number at a time, in Python's floats: out [n][heads][dim] and log-sum-exp [n][heads]."""
    n, heads, dim = query.shape
    length, kv_heads, value_dim = values.shape
    scale = 1 / math.sqrt(dim) if scale is None else scale
    out, lse = np.zeros((n, heads, value_dim)), np.full((n, heads), -math.inf)
    for i in range(n):
        position = length - n + i
        oldest = 0 if window is None else max(0, position - window + 1)
        for h in range(heads):
            g = h * kv_heads // heads
            scores = {}
            for j in range(oldest, position + 1):
                score = scale * math.fsum(
                    float(a) * float(b) for a, b in zip(query[i, h], keys[j, g], strict=True)
                )
                scores[j] = score if soft_cap is None else soft_cap * math.tanh(score / soft_cap)
            if scores:
                total = math.fsum(math.exp(score) for score in scores.values())
                lse[i, h] = math.log(total)
                for d in range(value_dim):
                    out[i, h, d] = math.fsum(
                        math.exp(s) / total * float(values[j, g, d]) for j, s in scores.items()
                    )
    return out, lse


# The dense reference


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 1e-5)])
def test_dense_attention_equals_a_loop(rng, heads, kv_heads, options, dtype, tolerance):
    for num_queries, length in SHAPES:
        query = random_query(rng, num_queries, heads, 5)
        keys, values = random_sequence(rng, length, kv_heads, 5, value_dim=3)
        out, lse = dense_attention(query, keys, values, dtype=dtype, return_lse=True, **options)
        expected, expected_lse = by_hand(query, keys, values, **options)
        assert (out.dtype, lse.dtype) == (dtype, np.float64)
        assert_allclose(out, expected, tolerance, tolerance)
        assert_allclose(lse, expected_lse, tolerance, tolerance)


def test_dense_attention_computes_in_float64_unless_told_otherwise(rng):
    query, (keys, values) = random_query(rng, 1, 2, 4), random_sequence(rng, 3, 2, 4)
    assert dense_attention(query, keys, values).dtype == np.float64


def test_options_of_a_wider_type_do_not_widen_the_computation(rng):
    query, (keys, values) = random_query(rng, 1, 2, 4), random_sequence(rng, 3, 2, 4)
    plain = dense_attention(query, keys, values, scale=0.3, soft_cap=1.1, dtype=np.float32)
    wide = dense_attention(
        query, keys, values, scale=np.float64(0.3), soft_cap=np.float64(1.1), dtype=np.float32
    )
    assert wide.dtype == np.float32
    assert_array_equal(wide, plain)


def test_a_causal_chunk_equals_its_queries_one_by_one(rng):
    query, (keys, values) = random_query(rng, 4, 6, 8), random_sequence(rng, 9, 2, 8)
    whole = dense_attention(query, keys, values)
    for i in range(4):
        seen = 9 - 4 + i + 1
        assert_allclose(whole[i], dense_attention(query[i : i + 1], keys[:seen], values[:seen])[0], 1e-12)


def test_a_key_behind_the_query_cannot_be_felt_whatever_it_holds(rng):
    query, (keys, values) = random_query(rng, 2, 4, 8), random_sequence(rng, 6, 2, 8)
    before = dense_attention(query, keys, values)[0]
    keys[-1], values[-1] = 1e4, 1e4
    assert_array_equal(dense_attention(query, keys, values)[0], before)


# Softmax, mask and merge


def test_softmax_of_large_scores_does_not_overflow():
    weights, lse = softmax(np.array([1e4, 1e4, -1e4]))
    assert_array_equal(weights, [0.5, 0.5, 0])
    assert lse == 1e4 + math.log(2)


@pytest.mark.parametrize("scores", [[], [-np.inf], [-np.inf, -np.inf]])
def test_softmax_of_nothing_visible_is_zero_and_minus_infinity(scores):
    weights, lse = softmax(np.array(scores, np.float32))
    assert_array_equal(weights, np.zeros(len(scores)))
    assert lse == -np.inf


@pytest.mark.parametrize(
    ("num_queries", "length", "window", "rows"),
    [
        (1, 4, None, ["1111"]),
        (2, 4, None, ["1110", "1111"]),
        (2, 4, 1, ["0010", "0001"]),
        (2, 4, 2, ["0110", "0011"]),
        (2, 4, 4, ["1110", "1111"]),
        (2, 4, 10**30, ["1110", "1111"]),
        (3, 2, None, ["00", "10", "11"]),
        (3, 2, 1, ["00", "10", "01"]),
        (2, 0, None, ["", ""]),
        (0, 3, 2, []),
    ],
)
def test_visible_keys(num_queries, length, window, rows):
    mask = visible(num_queries, length, window)
    assert mask.shape == (num_queries, length)
    assert ["".join("01"[bit] for bit in row) for row in mask.astype(int)] == rows


def parts(rng, length, *cuts):
    """Attention of one query over pieces of the same keys: the whole, then each piece, as (out, lse)."""
    query, (keys, values) = random_query(rng, 1, 4, 8), random_sequence(rng, length, 2, 8)
    edges = [0, *cuts, length]
    slices = [slice(0, length), *map(slice, edges, edges[1:])]
    return [dense_attention(query, keys[s], values[s], return_lse=True) for s in slices]


def assert_same(a, b):
    assert_allclose(a[0], b[0], 1e-12, 1e-12)
    assert_allclose(a[1], b[1], 1e-12, 1e-12)


def test_merge_joins_two_parts_into_the_whole(rng):
    for cut in range(8):
        whole, a, b = parts(rng, 7, cut)
        assert_same(merge(*a, *b), whole)


def test_merge_does_not_mind_the_order_or_the_brackets(rng):
    whole, a, b, c = parts(rng, 9, 2, 6)
    for merged in (merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c)), merge(*c, *merge(*a, *b))):
        assert_same(merged, whole)


def test_no_keys_are_the_identity_of_merge(rng):
    (a,) = parts(rng, 5)[:1]
    nothing = np.zeros_like(a[0]), np.full_like(a[1], -np.inf)
    for merged in (merge(*a, *nothing), merge(*nothing, *a)):
        assert_array_equal(merged[0], a[0])
        assert_array_equal(merged[1], a[1])


def test_merge_of_distant_parts_neither_overflows_nor_loses_the_larger():
    out, lse = merge(np.array([[1.0]]), np.array([5e4]), np.array([[9.0]]), np.array([-5e4]))
    assert (out, lse) == ([[1.0]], [5e4])


# Pages


def dense_batch(query, sequences, counts, **options):
    """The dense reference for each sequence of a batch, end to end: out and log-sum-exp in float64."""
    parts, first = [], 0
    for (keys, values), n in zip(sequences, counts, strict=True):
        parts.append(dense_attention(query[first : first + n], keys, values, return_lse=True, **options))
        first += n
    return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_pages_equal_dense_at_every_boundary(rng, block_size, options):
    sequences = [random_sequence(rng, n, 2, 8, value_dim=6) for n in boundary_lengths(block_size)]
    counts = [i % 4 for i in range(len(sequences))]  # 0 … 3 queries; some have more queries than keys
    query = random_query(rng, sum(counts), 6, 8)
    out, lse = paged_attention(
        query, *paged(sequences, block_size, rng), num_queries=counts, return_lse=True, **options
    )
    expected, expected_lse = dense_batch(query, sequences, counts, **options)
    assert (out.dtype, lse.dtype) == (np.float32, np.float64)
    assert_allclose(out, expected, 1e-5, 1e-5)
    assert_allclose(lse, expected_lse, 1e-5, 1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_pages_equal_dense_for_every_grouping_of_heads(rng, heads, kv_heads):
    sequences = [random_sequence(rng, n, kv_heads, 16) for n in (5, 8, 1)]
    query = random_query(rng, 3, heads, 16)
    out = paged_attention(query, *paged(sequences, 4, rng))
    assert_allclose(out, dense_batch(query, sequences, [1, 1, 1])[0], 1e-5, 1e-5)


def test_float16_pages_lose_nothing_beyond_their_storage(rng):
    sequences = [
        [array.astype(np.float16) for array in random_sequence(rng, n, 2, 8)] for n in boundary_lengths(4)
    ]
    query = random_query(rng, len(sequences), 4, 8)
    out = paged_attention(query, *paged(sequences, 4, rng, dtype=np.float16))
    assert_allclose(out, dense_batch(query, sequences, [1] * len(sequences))[0], 1e-5, 1e-5)


def test_where_the_blocks_lie_does_not_change_a_bit(rng):
    sequences = [random_sequence(rng, n, 2, 8) for n in (9, 4, 6)]
    query = random_query(rng, 3, 4, 8)
    one, other = (paged_attention(query, *paged(sequences, 4, rng, spare=spare)) for spare in (0, 7))
    assert_array_equal(one, other)


def test_two_tables_may_name_the_same_block(rng):
    keys, values = random_sequence(rng, 6, 2, 8)
    key_pages, value_pages, table, _ = paged([(keys, values)], 4, rng)
    query = random_query(rng, 2, 4, 8)
    out = paged_attention(query, key_pages, value_pages, np.repeat(table, 2, axis=0), [6, 3])
    expected = dense_batch(query, [(keys, values), (keys[:3], values[:3])], [1, 1])[0]
    assert_allclose(out, expected, 1e-5, 1e-5)


def test_an_empty_batch_gives_an_empty_result():
    pages = np.zeros((2, 4, 2, 8))
    out = paged_attention(np.zeros((0, 4, 8)), pages, pages, np.zeros((0, 0), int), [])
    assert out.shape == (0, 4, 8)


# Callers' mistakes: the value is named, whichever kernel is asked


def dense_call(query=(1, 4, 8), keys=(3, 2, 8), values=None, **options):
    return dense_attention(np.zeros(query), np.zeros(keys), np.zeros(values or keys), **options)


def paged_call(query=(1, 4, 8), keys=(6, 4, 2, 8), values=None, tables=((5, 0),), lengths=(7,), **options):
    return paged_attention(
        np.zeros(query), np.zeros(keys), np.zeros(values or keys), tables, lengths, **options
    )


@pytest.mark.parametrize("call", [dense_call, paged_call])
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"window": 0}, "window.*0"),
        ({"window": -1}, "window.*-1"),
        ({"window": 2.5}, "window.*2.5"),
        ({"window": True}, "window.*True"),
        ({"soft_cap": 0}, "soft_cap.*0"),
        ({"soft_cap": -1.0}, "soft_cap.*-1.0"),
        ({"soft_cap": np.nan}, "soft_cap.*nan"),
        ({"soft_cap": np.inf}, "soft_cap.*inf"),
        ({"soft_cap": "2"}, "soft_cap.*'2'"),
        ({"scale": np.inf}, "scale.*inf"),
        ({"scale": np.nan}, "scale.*nan"),
        ({"scale": "a"}, "scale.*'a'"),
        ({"query": (1, 8)}, r"query.*\(1, 8\)"),
        ({"query": ()}, r"query.*\(\)"),
        ({"query": (1, 4, 7)}, r"\(1, 4, 7\)"),
        ({"query": (1, 3, 8)}, "3 query heads.*2 KV heads"),
        ({"query": (1, 0, 8)}, "0 query heads"),
    ],
)
def test_bad_options_and_queries_are_named(call, options, named):
    call()  # what is left when the mistake is taken away is fine
    with pytest.raises(ValueError, match=named):
        call(**options)


@pytest.mark.parametrize(
    ("shapes", "named"),
    [
        ({"keys": (3, 2, 7)}, r"\(3, 2, 7\)"),
        ({"keys": (3, 16)}, r"\(3, 16\)"),
        ({"keys": (3, 2, 8), "values": (4, 2, 8)}, r"\(4, 2, 8\)"),
        ({"keys": (3, 2, 8), "values": (3, 4, 8)}, r"\(3, 4, 8\)"),
        ({"keys": (3, 0, 8)}, "0 KV heads"),
        ({"query": (1, 4, 0), "keys": (3, 2, 0)}, r"\(1, 4, 0\)"),
    ],
)
def test_dense_shapes_that_do_not_fit_are_named(shapes, named):
    with pytest.raises(ValueError, match=named):
        dense_call(**shapes)


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        ({"keys": (4, 2, 8)}, r"\(4, 2, 8\)"),
        ({"values": (5, 4, 2, 8)}, r"\(5, 4, 2, 8\)"),
        ({"values": (6, 3, 2, 8)}, r"\(6, 3, 2, 8\)"),
        ({"keys": (6, 0, 2, 8), "lengths": [0]}, "block_size.*0"),
        ({"tables": [[5, -1]]}, "row 0.*position 4.*-1"),
        ({"tables": [[5, -7]]}, "row 0.*-7"),
        ({"tables": [[5, 6]]}, "row 0.*block 6.*0 … 5"),
        ({"tables": [[5, 0], [0, 9]], "lengths": [7, 5], "query": (2, 4, 8)}, "row 1.*block 9"),
        ({"tables": [[5.0, 0.0]]}, "block tables.*5.0"),
        ({"tables": [5, 0]}, r"tables \(2,\)"),
        ({"lengths": [9]}, "row 0.*9.*0 … 8"),
        ({"lengths": [-1]}, "row 0.*-1"),
        ({"lengths": [7.0]}, "lengths.*7.0"),
        ({"lengths": [7, 7]}, r"lengths \(2,\)"),
        ({"num_queries": 2}, "1 rows.*2"),
        ({"num_queries": [1, 0]}, r"num_queries \(2,\)"),
        ({"num_queries": -1}, "num_queries.*-1"),
        ({"num_queries": 1.0}, "num_queries.*1.0"),
    ],
)
def test_pages_and_tables_that_do_not_fit_are_named(mistake, named):
    with pytest.raises(ValueError, match=named):
        paged_call(**mistake)


def test_a_block_that_no_query_sees_may_be_missing(rng):
    sequence = random_sequence(rng, 11, 2, 8)
    keys, values, tables, lengths = paged([sequence], 4, rng)
    tables[0, :2] = -1, 10**6  # positions 0 … 7
    query = random_query(rng, 1, 4, 8)
    out = paged_attention(query, keys, values, tables, lengths, window=3)
    assert_allclose(out, dense_attention(query, *sequence, window=3), 1e-5, 1e-5)
    with pytest.raises(ValueError, match="row 0 names block 1000000"):
        paged_attention(query, keys, values, tables, lengths, window=4)
