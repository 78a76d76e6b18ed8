"""What a worker sees of the pool: its own sequences as a mirror, the blocks of all as they stand on the server."""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from ..allocator import whole_numbers_below
from ..block_table import BlockTables
from ..prefix_cache import PrefixIndex


class MirroredTables(BlockTables):
    """The tables of a worker's own sequences. Their versions are numbers of the pool's history of changes."""

    now = 0  # the change that is being mirrored

    def _version(self) -> int:
        return self.now


class SharedBlocks:
    """Owners and free queue of the pool's blocks, read from the server; every look is a round trip.

    Args: look: runs the script of that name.
    """

    def __init__(self, num_blocks: int, look: Callable[..., list[np.ndarray]]):
        self.num_blocks = num_blocks
        self._look = look

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns, cached ones included."""
        return int(self._look("free")[0].sum())

    @property
    def num_cached(self) -> int:
        """Free blocks whose contents are kept until their turn comes."""
        return int(self._look("free")[0][1])

    def queue(self) -> list[int]:
        """Free block ids in the order in which they will be handed out; the last `num_cached` are cached."""
        return self._look("queue")[0].tolist()

    @property
    def ref_counts(self) -> np.ndarray:
        """Owners of every block: int32 [num_blocks]; a worker that has still to copy a block is one."""
        counts = np.zeros(self.num_blocks, np.int32)
        found = self._look("owners")[0].reshape(-1, 2)
        counts[found[:, 0]] = found[:, 1]
        return counts

    def ref_count(self, block: int) -> int:
        """Owners of one block. Raises ValueError for an id that the pool does not have."""
        return int(self.ref_counts[whole_numbers_below("block", [block], self.num_blocks)[0]])


class SharedIndex(PrefixIndex):
    """Which blocks can be found, read from the server. Two texts are equal if their SHA-256 digests are.

    What it inherits serves the mirror: it links the texts of this worker's own sequences.
    """

    def __init__(self, look: Callable[..., list[np.ndarray]], change: Callable[..., list[np.ndarray]]):
        super().__init__(0)
        self._look, self._change = look, change
        self.just_sealed: set[int] = set()  # by the commit that is being mirrored

    def __contains__(self, block: int) -> bool:
        return bool(self.sealed(np.array([block]))[0])

    def sealed(self, blocks: ArrayLike) -> np.ndarray:
        """Which of the blocks hold a text that can be found: bool [n]."""
        blocks = np.asarray(blocks)
        return self._look("sealed", blocks)[0].astype(bool) if blocks.size else np.zeros(0, bool)

    def unseal(self, blocks: ArrayLike) -> np.ndarray:
        """Let blocks be found no more; returns those that could be found before: int32."""
        return self._change("unseal", np.asarray(blocks))[0]

    def carry_out(self, plan, blocks=None) -> list[int]:
        super().carry_out(plan)
        return [block for block in blocks or () if block in self.just_sealed]
