"""Caches to save, and what a loaded one must be: shared by the tests of this folder."""

import numpy as np
from pools import all_layers, check_invariants, new_cache, owners_of_blocks

CONTAINERS = ["snapshot.npz", "snapshot.h5", "checkpoint"]
STORY = {"a": "Good night, ", "b": "Good night! ", "c": "Good night. ", "d": "Good night; "}  # 12 tokens each


def wall(**options):
    """The four answers of the course: a [0,1,3] b [0,1,4] c [0,1,5] d [0,1,2], 12 tokens each, two blocks free."""
    cache = new_cache(8, 4, **options)
    cache.add("a")
    cache.append("a", *all_layers(range(1, 11)), 10)
    cache.fork("a", ["b", "c", "d"])
    for position in (10, 11):
        cache.append(list("abcd"), *all_layers([20 * position + i for i in range(4)]))
    return cache


def used_before(cache, seed=0):
    """The same cache, empty, with its free blocks in random order."""
    ids = [cache.add() for _ in range(cache.num_blocks)]
    cache.extend(ids, cache.block_size)
    cache.free(np.random.default_rng(seed).permutation(ids).tolist())
    return cache


def contents(cache, seq):
    """All keys and values of a sequence, as bytes that can be compared."""
    gathered = [cache.gather(layer, seq) for layer in range(cache.storage.num_layers)]
    return b"".join(array.tobytes() for pair in gathered for array in pair)


def beginning(cache, seq, length):
    """The same for its first tokens."""
    gathered = [cache.gather(layer, seq) for layer in range(cache.storage.num_layers)]
    return b"".join(array[:length].tobytes() for pair in gathered for array in pair)


def assert_equal(loaded, saved, seq_ids=None):
    """Sequences are whole, and share what they shared."""
    check_invariants(loaded)
    seq_ids = saved.seq_ids if seq_ids is None else seq_ids
    for seq in seq_ids:
        assert loaded.length(seq) == saved.length(seq)
        assert contents(loaded, seq) == contents(saved, seq)
    assert sharing(loaded, seq_ids) == sharing(saved, seq_ids)


def sharing(cache, seq_ids):
    """Which entries of which tables are one block, whatever its id."""
    first = {}
    for seq in seq_ids:
        for entry, block in enumerate(cache.block_tables([seq])[0].tolist()):
            first.setdefault(block, []).append((seq, entry))
    return sorted(first.values(), key=str), len(owners_of_blocks(cache))
