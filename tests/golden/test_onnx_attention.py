"""Attention as the onnx standard records it, computed through pages."""

import itertools

import numpy as np
import pytest
from needs import need_module
from numpy.testing import assert_allclose
from onnx_attention import read_calls
from paging import cached, paged

from pagedkv import dense_attention, paged_attention

pytestmark = pytest.mark.filterwarnings("error")

TOLERANCE = {  # relative, absolute: of the backend tests; results in float16 are rounded on the way
    "float64": (1e-3, 1e-7),
    "float32": (1e-3, 1e-7),
    "float16": (2e-2, 2e-3),
}


@pytest.fixture(scope="module")
def recorded():
    onnx = need_module("onnx", "onnx")
    assert onnx.__version__ == "1.22.0", "later versions ship no recorded vectors"
    return read_calls(onnx)


@pytest.fixture
def batches(recorded):
    """Calls of one test together: each row is a sequence of its own."""
    return [list(calls) for _, calls in itertools.groupby(recorded[0], key=lambda call: call.test)]


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def test_which_rows_are_decode_calls(recorded):
    calls, left_out = recorded
    assert len(calls) == 322
    assert len({call.test for call in calls}) == 37
    assert left_out == {  # paged attention has neither an additive bias nor a graph of its own for scores
        "rows with a bias on visible keys": 264,
        "tests with a graph that modifies scores": 5,
    }


def through_the_cache(query, sequences, block_size, rng, dtype, **options):
    """A cache has one head_dim for keys and values; where values are wider, zeros behind keys change no score."""
    width = sequences[0][1].shape[-1]
    sequences = [(widened(keys, width), values) for keys, values in sequences]
    cache, ids = cached(sequences, block_size, rng, dtype=dtype)
    return cache.attend(0, widened(query, width), cache.plan(ids), **options)


def widened(vectors, width):
    return np.pad(vectors, [(0, 0)] * (vectors.ndim - 1) + [(0, width - vectors.shape[-1])])


def through_pages(query, sequences, block_size, rng, dtype, **options):
    return paged_attention(query, *paged(sequences, block_size, rng, dtype), **options)


def through_dense(query, sequences, block_size, rng, dtype, **options):
    each = zip(query[:, None], sequences, strict=True)
    return np.concatenate([dense_attention(q, *sequence, **options) for q, sequence in each])


def check(batch, kernel, *args):
    """Compare one batch with what is recorded; returns how many rows that were."""
    call = batch[0]
    kind = call.query.dtype.name
    out = kernel(
        np.stack([c.query for c in batch]),
        [(c.keys, c.values) for c in batch],
        *args,
        "float16" if kind == "float16" else "float32",
        scale=call.scale,
        soft_cap=call.soft_cap,
    )
    rtol, atol = TOLERANCE[kind]
    for row, c in zip(out, batch, strict=True):
        assert_allclose(row, c.expected.astype(float), rtol, atol, err_msg=call.test)
    return len(batch)


def test_the_dense_reference_computes_every_recorded_row(batches, rng):
    assert sum(check(batch, through_dense, None, rng) for batch in batches) == 322


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_pages_compute_every_recorded_row(batches, rng, block_size):
    assert sum(check(batch, through_pages, block_size, rng) for batch in batches) == 322


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_the_cache_computes_every_recorded_row(batches, rng, block_size):
    assert sum(check(batch, through_the_cache, block_size, rng) for batch in batches) == 322
