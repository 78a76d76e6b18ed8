"""Sequences laid out on pages for the tests of attention: blocks in random order, NaN wherever no token lies."""

import numpy as np

from pagedkv import PagedKVCache


def random_sequence(rng, length, kv_heads, head_dim, value_dim=None):
    """Keys and values of one sequence: float32 [length, kv_heads, head_dim] and [..., value_dim]."""
    dims = (head_dim, value_dim or head_dim)
    return tuple(rng.standard_normal((length, kv_heads, dim)).astype(np.float32) for dim in dims)


def random_query(rng, num_queries, heads, head_dim):
    """float32 [num_queries, heads, head_dim]."""
    return rng.standard_normal((num_queries, heads, head_dim)).astype(np.float32)


def boundary_lengths(block_size):
    """The lengths at which a block begins, ends or is one short."""
    return sorted({m * block_size + off for m in (0, 1, 2) for off in (-1, 0, 1) if m or off >= 0})


def paged(sequences, block_size, rng, dtype=np.float32, spare=3):
    """Scatter [(keys, values), …] over pages made by hand.

    Returns: pages of keys and of values, each [num_blocks, block_size, kv_heads, dim]; block tables int32
        [batch, max_blocks], padded with −1; lengths [batch].
    """
    lengths = np.array([len(keys) for keys, _ in sequences], int)
    needed = -(-lengths // block_size)
    blocks = iter(rng.permutation(needed.sum() + spare).tolist())
    tables = np.full((len(sequences), needed.max(initial=0)), -1, np.int32)
    pages = [
        np.full((needed.sum() + spare, block_size, *array.shape[1:]), np.nan, dtype) for array in sequences[0]
    ]
    for row, arrays in enumerate(sequences):
        for entry in range(needed[row]):
            tables[row, entry] = next(blocks)
            for page, array in zip(pages, arrays, strict=True):
                part = array[entry * block_size : (entry + 1) * block_size]
                page[tables[row, entry], : len(part)] = part
    return *pages, tables, lengths


def shuffled_cache(num_blocks, block_size, kv_heads, head_dim, rng, **options):
    """A poisoned cache whose free blocks wait in random order."""
    cache = PagedKVCache(num_blocks, block_size, kv_heads, head_dim, poison=True, **options)
    ids = [cache.add() for _ in range(num_blocks)]
    cache.extend(ids, block_size)
    cache.free(rng.permutation(ids).tolist())
    return cache


def cached(sequences, block_size, rng, spare=3, **options):
    """A shuffled cache that holds [(keys, values), …] of one layer, and the sequences' ids."""
    num_blocks = sum(-(-len(keys) // block_size) for keys, _ in sequences) + spare
    cache = shuffled_cache(num_blocks, block_size, *sequences[0][0].shape[1:], rng, **options)
    ids = [cache.add() for _ in sequences]
    for start in range(0, max(len(keys) for keys, _ in sequences), block_size):  # in turn: blocks interleave
        part = slice(start, start + block_size)
        new = [(keys[part], values[part]) for keys, values in sequences]
        keys, values = (np.concatenate(arrays)[None] for arrays in zip(*new, strict=True))
        cache.append(ids, keys, values, [len(keys) for keys, _ in new])
    return cache, ids
