"""A workload is the same numbers twice: side by side and in shuffled pages; and it knows the right answer."""

import numpy as np
import pytest

from pagedkv import PagedKVCache, dense_attention
from pagedkv.bench import SHAPES, Shape, Workload
from pagedkv.bench.shapes import shuffle

PLAIN = Shape("plain", (1, 5, 16, 33), 4, 2, 8, num_layers=2, block_size=4)
BEAMS = Shape("beams", (19, 18, 17), 4, 2, 8, prefix=16, block_size=4)


@pytest.mark.parametrize("shape", [PLAIN, BEAMS])
@pytest.mark.parametrize("block_size", [None, 1, 3])
def test_pages_and_contiguous_arrays_hold_the_same_tokens(shape, block_size):
    workload = Workload(shape)
    cache = workload.cache(block_size=block_size)
    assert cache.lengths(workload.seq_ids).tolist() == list(shape.lengths)
    for layer in range(shape.num_layers):
        for row in workload.seq_ids:
            for paged, side_by_side in zip(
                cache.gather(layer, row), workload.contiguous(layer, row), strict=True
            ):
                np.testing.assert_array_equal(paged, side_by_side)


def test_beams_share_the_blocks_of_their_prefix_and_nothing_else():
    tables = Workload(BEAMS).cache().block_tables(range(3))
    assert (tables[:, :4] == tables[0, :4]).all()
    assert len(set(tables[:, 4])) == 3


def test_a_shared_prefix_is_read_once():
    assert PLAIN.num_bytes(10) == 55 * 2 * 10
    assert BEAMS.num_bytes(10) == (16 + 3 + 2 + 1) * 2 * 10


def test_the_expected_answer_is_dense_attention_in_float64():
    workload = Workload(PLAIN)
    expected, largest = workload.expected()
    for layer in range(2):
        for row in workload.seq_ids:
            right = dense_attention(workload.query[row : row + 1], *workload.contiguous(layer, row))
            np.testing.assert_array_equal(expected[layer, row], right[0])
    assert largest == np.abs(workload.values).max()


def test_block_ids_are_shuffled_and_none_is_lost():
    cache = PagedKVCache(64, 2, 1, 4)
    shuffle(cache)
    assert (cache.num_free, cache.seq_ids) == (64, [])
    cache.add(0)
    cache.extend(0, 128)
    (table,) = cache.block_tables([0]).tolist()
    assert sorted(table) == list(range(64))
    assert np.abs(np.diff(table)).mean() > 10  # a random order jumps by 21 on average, the plain one by 1


def test_the_shapes_are_those_that_the_goals_speak_of():
    assert {name: (s.batch, s.num_tokens) for name, s in SHAPES.items() if name != "d16"} == {
        "a": (4, 1217),
        "b8": (8, 24039),
        "b32": (32, 78369),
        "c": (16, 16667),
        "d64": (64, 64 * 2048 + 8 * sum(range(57, 65))),
    }


def test_smaller_keeps_everything_but_the_lengths():
    small = SHAPES["d16"].smaller(8)
    assert (small.name, small.batch, small.prefix, max(small.lengths)) == ("d16", 16, 256, 264)
    assert min(BEAMS.smaller(100).lengths) == 1
