"""What a step costs beside attention: tables, slots, forks and the writing of new tokens."""

import numpy as np

from ..allocator import BlockAllocator
from ..cache import PagedKVCache
from ..manager import BlockManager
from .measure import RUNS, alternate, ratio

STEPS = 1024  # that a sequence may grow while it is measured


def keep(_) -> None:
    """Nothing to undo."""


def rows(rounds: int = 12) -> list[dict]:
    """The costs that matter, each as {name, seconds, p20, p80, over}: `over` is how much slower a Python loop is."""
    samples = {
        **append_or_loop(rounds),
        **alternate(
            {"step metadata, batch 256": step(256), "fork 4096 tokens into 8": fork(4096, 8)}, rounds
        ),
        **alternate({"allocate and release 256 blocks": allocation(256)}, rounds),
    }
    found = []
    for name, taken in samples.items():
        middle, low, high = (float(np.percentile(taken, p)) for p in (50, 20, 80))
        found.append({"name": name, "seconds": middle, "p20": low, "p80": high})
        if name == "append a token to 16 sequences, all layers":
            found[-1]["over"] = ratio(samples["the same, a Python loop"], taken)
    return found


def per_batch(batches: list[int], rounds: int = 12) -> list[dict]:
    """The step metadata's cost against the batch: {batch, seconds, p20, p80}."""
    actions = {str(batch): step(batch) for batch in batches}
    samples = alternate(actions, rounds)
    return [
        {"batch": int(batch)}
        | {k: float(np.percentile(taken, p)) for k, p in (("seconds", 50), ("p20", 20), ("p80", 80))}
        for batch, taken in samples.items()
    ]


def step(batch: int, block_size: int = 16, seed: int = 0):
    """One decode step's metadata: a slot for a new token of every sequence, and all block tables.

    Sequences grow from step to step, as they do in serving, so that now and then some need a block.
    """
    lengths = np.random.default_rng(seed).integers(16, 2048, batch)
    manager = BlockManager(batch * (2048 + STEPS) // block_size + batch, block_size)
    ids = [manager.add() for _ in range(batch)]
    manager.extend(ids, lengths)

    def run():
        return manager.extend(ids, 1).slots, manager.block_tables(ids)

    return run, keep


def fork(num_tokens: int, children: int, block_size: int = 16):
    """Share a text of so many tokens with new sequences."""
    manager = BlockManager(num_tokens // block_size + 1, block_size)
    parent = manager.add()
    manager.extend(parent, num_tokens)
    return (lambda: manager.fork(parent, children)), manager.free


def allocation(num_blocks: int):
    """Take and return blocks, counts checked."""
    allocator = BlockAllocator(65536)
    allocator.allocate(1024)
    return (lambda: allocator.release(allocator.allocate(num_blocks))), keep


def append_or_loop(rounds: int, batch: int = 16) -> dict[str, np.ndarray]:
    """Append a token to each sequence in all 24 layers (Qwen2.5-0.5B's shape): one scatter, or a Python loop.

    The loop is what one writes first: a list of blocks per sequence, one assignment per layer and sequence.
    """
    layers, heads, dim, size, length = 24, 2, 64, 16, 100
    longest = length + rounds * RUNS
    cache = PagedKVCache(batch * -(-longest // size), size, heads, dim, num_layers=layers)
    ids = [cache.add() for _ in range(batch)]
    cache.extend(ids, longest)
    tables = [[int(b) for b in table] for table in cache.block_tables(ids)]  # the loop finds its blocks there
    for seq in ids:
        cache.truncate(seq, length)
    keys, values = np.random.default_rng(0).standard_normal((2, layers, batch, heads, dim), np.float32)
    for array in cache.storage.arrays.values():
        array[...] = 0  # written once, as the pages of a server that has run for a while: their memory exists
    pages = {name: array.copy() for name, array in cache.storage.arrays.items()}  # the loop's own
    lengths = [length] * batch

    def loop():
        for row, table in enumerate(tables):
            block, offset = table[lengths[row] // size], lengths[row] % size
            lengths[row] += 1
            for layer in range(layers):
                pages["keys"][layer, block, offset] = keys[layer, row]
                pages["values"][layer, block, offset] = values[layer, row]

    return alternate(
        {
            "append a token to 16 sequences, all layers": (lambda: cache.append(ids, keys, values), keep),
            "the same, a Python loop": (loop, keep),
        },
        rounds,
    )
