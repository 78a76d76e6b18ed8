"""How long a gather takes by where its target begins: `python tests/measure_alignment.py`.

Blocks of 4 KiB are copied from pages into a workspace, both of which begin at a multiple of 4096 bytes, and then
the workspace a little later. Turn by turn in one process; printed is the time over that of the first.
"""

import time

import numpy as np

PAGE, BLOCKS, GATHERED, ROUNDS = 4096, 1056, 124, 60
BYTES_LATER = (0, 16, 32, 64, 256, 2048)


def at(start: int, size: int) -> np.ndarray:
    """Bytes that begin so many behind a multiple of PAGE."""
    memory = np.zeros(size + 2 * PAGE, np.uint8)
    start += -memory.ctypes.data % PAGE
    return memory[start : start + size]


def main() -> None:
    pages = at(0, BLOCKS * PAGE).reshape(BLOCKS, PAGE)
    pages[...] = 1
    order = np.random.default_rng(0).permutation(BLOCKS)
    workspaces = [at(later, GATHERED * PAGE).reshape(GATHERED, PAGE) for later in BYTES_LATER]
    taken = np.zeros((ROUNDS, len(workspaces)))
    for turn in range(ROUNDS):
        blocks = np.roll(order, turn * GATHERED)[:GATHERED]
        for i in np.roll(range(len(workspaces)), turn).tolist():
            pages.take(blocks, 0, workspaces[i], "clip")  # does not count
            started = time.perf_counter()
            pages.take(blocks, 0, workspaces[i], "clip")
            taken[turn, i] = time.perf_counter() - started
    for later, ratio in zip(BYTES_LATER, np.median(taken / taken[:, :1], axis=0), strict=True):
        print(f"target begins {later:4} bytes later in a page of memory: {ratio:5.2f}x the time")


if __name__ == "__main__":
    main()
