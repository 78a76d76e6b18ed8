"""Block ids, their owners, and the queue of free ones. No keys or values live here."""

import contextlib
import operator
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike


class PoolExhausted(Exception):
    """A refusal: the pool has too few free blocks. Nothing was changed; the caller may retry later."""

    def __init__(self, requested: int, available: int):
        super().__init__(requested, available)
        self.requested, self.available = requested, available

    def __str__(self) -> str:
        return f"requested {self.requested}, free {self.available}"


@dataclass(frozen=True)
class Event:
    """What one public call did: the unit that observers (players, metrics, logs) are told."""

    kind: str  # the method's name, or "refuse"
    seq_ids: tuple = ()
    blocks: dict[str, np.ndarray] = field(default_factory=dict)  # role ("new", "freed", …) -> ids
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


Observer = Callable[[Event], None]


class Observed:
    """Tells a list of observers what happened; costs one `if` while the list is empty."""

    def __init__(self, observers: Iterable[Observer] = ()):
        self.observers = list(observers)

    def _clock(self) -> float:
        return time.perf_counter() if self.observers else 0.0

    def _tell(self, kind: str, started: float, seq_ids=(), blocks=None, **counts: int) -> None:
        if not self.observers:
            return
        event = Event(kind, tuple(seq_ids), blocks or {}, counts, time.perf_counter() - started)
        for observer in list(self.observers):
            try:
                observer(event)
            except Exception as error:  # the call has succeeded; a broken viewer must not stop its copies
                with contextlib.suppress(RuntimeWarning):  # nor may warnings that are made errors
                    warnings.warn(f"observer {observer!r} failed on {kind!r}: {error!r}", RuntimeWarning, 3)

    def _refuse(self, started: float, requested: int, available: int, seq_ids=()) -> None:
        self._tell("refuse", started, seq_ids, requested=requested, available=available)
        raise PoolExhausted(requested, available)


def whole_number(name: str, value, minimum: int = 0) -> int:
    """Return `value` as an int of at least `minimum`; ValueError names what was given instead."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool | np.bool_) or number < minimum:
        raise ValueError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
    return number


def whole_numbers(name: str, values: ArrayLike) -> np.ndarray:
    """Return `values` as an int64 array; ValueError if any of them is not a whole number."""
    array = np.asarray(values)
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be whole numbers, got {values!r}")
    return array.astype(np.int64)


def whole_numbers_below(name: str, values: ArrayLike, end: int) -> np.ndarray:
    """Return `values` as a flat int64 array of numbers 0 … end − 1; ValueError names one that is not."""
    array = whole_numbers(f"{name}s", values).ravel()
    if np.count_nonzero(array.view(np.uint64) >= end):  # read without its sign, a negative number is huge
        outside = array[(array < 0) | (array >= end)]
        raise ValueError(f"there is no {name} {outside[0]}: it must be 0 … {end - 1}")
    return array


class BlockAllocator(Observed):
    """Hands out block ids and counts their owners (PagedAttention, Kwon et al. 2023, section 4.2).

    A block is free exactly when nobody owns it. Free blocks wait in one queue: plain ones in front, last
    released first, since the block that was touched last is the likeliest to be still in a cache of the
    processor; *cached* ones, whose contents may still be wanted, behind them, least recently released first.
    """

    def __init__(self, num_blocks: int, *, observers: Iterable[Observer] = ()):
        super().__init__(observers)
        self.num_blocks = whole_number("num_blocks", num_blocks, minimum=1)
        self._owners = np.zeros(self.num_blocks, np.int32)  # [num_blocks]
        self._ref_counts = self._owners.view()
        self._ref_counts.flags.writeable = False
        self._tally = np.zeros(self.num_blocks, np.int32)  # all zero between calls
        self._free = np.arange(self.num_blocks, dtype=np.int32)[::-1].copy()  # a stack: the front is its top
        self._num_plain = self.num_blocks  # so much of it is in use
        self._cached: OrderedDict[int, None] = OrderedDict()  # behind them, the front first

    def __repr__(self) -> str:
        from .teach import pages  # only here: a drawing needs what stands above the engine

        return pages.drawn(self)

    def _repr_html_(self) -> str | None:
        from .teach import pages

        return pages.drawn_html(self)

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns, cached ones included."""
        return self._num_plain + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks whose contents are kept until their turn comes."""
        return len(self._cached)

    def queue(self) -> list[int]:
        """Free block ids in the order in which they will be handed out; the last `num_cached` are cached."""
        return [*self._free[: self._num_plain][::-1].tolist(), *self._cached]

    @property
    def ref_counts(self) -> np.ndarray:
        """Owners of every block: int32 [num_blocks], read only."""
        return self._ref_counts

    def ref_count(self, block: int) -> int:
        """Owners of one block. Raises ValueError for an id that the pool does not have."""
        return int(self._owners[whole_numbers_below("block", [block], self.num_blocks)[0]])

    def allocate(self, n: int = 1) -> np.ndarray:
        """Take `n` blocks from the front of the queue, one owner each.

        Args: n: how many, at least 0.
        Returns: int32 [n], in queue order.
        Raises: PoolExhausted if fewer are free; all or nothing.
        Source: section 4.2.
        """
        started = self._clock()
        n = whole_number("the number of blocks to allocate", n)
        if n > self.num_free:
            self._refuse(started, n, self.num_free)
        rest = max(self._num_plain - n, 0)
        blocks = self._free[rest : self._num_plain][::-1].copy()  # [n], if there are so many plain ones
        self._num_plain = rest
        evicted = [self._cached.popitem(last=False)[0] for _ in range(n - blocks.size)]
        if evicted:
            blocks = np.append(blocks, np.array(evicted, np.int32))
        self._owners[blocks.astype(np.intp)] = 1  # NumPy is faster with indices of its own type
        if self.observers:
            told = {"new": blocks, "evicted": np.array(evicted, np.int32)} if evicted else {"new": blocks}
            self._tell("allocate", started, blocks=told, free=self.num_free)
        return blocks

    def share(self, blocks: ArrayLike, times: int = 1) -> None:
        """Add `times` owners to each block; an id that is named twice gains twice as many.

        A cached block leaves the queue by that: it is in use again, with its contents.

        Args: blocks: ids [n] of blocks in use or cached.
        Raises: ValueError for another free block or an unknown one; nothing is changed.
        Source: section 4.4, reference counts.
        """
        started = self._clock()
        times = whole_number("times", times, minimum=1)
        blocks = whole_numbers_below("block", blocks, self.num_blocks)
        revived = blocks[self._owners[blocks] == 0].tolist()
        for block in revived:
            if block not in self._cached:
                raise ValueError(f"block {block} is free: only a block in use or cached can gain an owner")
        for block in revived:
            self._cached.pop(block, None)  # named twice, it is gone already
        np.add.at(self._owners, blocks, np.int32(times))
        self._tell("share", started, blocks={"shared": blocks})

    def release(self, blocks: ArrayLike, cached: ArrayLike = ()) -> np.ndarray:
        """Take one owner from each block; those left without one become free.

        Those in `cached` go to the back of the queue one after the other, the rest to its front as a group.

        Args: blocks: ids [n]; an id that is named twice loses two owners; cached: ids worth keeping.
        Returns: int32 ids that became free, ordered by the release that freed them.
        Raises: ValueError if a block has fewer owners than that; nothing is changed.
        Source: section 4.4; the two ends of the queue as in vLLM V1.
        """
        started = self._clock()
        blocks = whole_numbers_below("block", blocks, self.num_blocks)
        owners, times = self._owners[blocks], self._times_named(blocks)  # [n]
        short = owners < times
        if np.count_nonzero(short):
            block, asked = blocks[short][0], times[short][0]
            raise ValueError(f"block {block} has {self._owners[block]} owners, cannot release {asked}")
        left = owners - times  # [n]
        self._owners[blocks] = left  # a block that is named twice gets the same number twice
        freed = blocks[left == 0].astype(np.int32)
        if np.count_nonzero(times > 1):  # a block that is named several times is freed by the *last* of them
            freed = np.array([*dict.fromkeys(freed[::-1].tolist())][::-1], np.int32)
        self._queue_up(freed, cached)
        if self.observers:
            self._tell("release", started, blocks={"released": blocks, "freed": freed}, free=self.num_free)
        return freed

    def forget_cached(self) -> None:
        """Make cached blocks plain free ones; the queue keeps its order."""
        started = self._clock()
        order = np.array(self.queue()[::-1], np.int32)
        forgotten = np.array(list(self._cached), np.int32)
        self._free[: len(order)], self._num_plain = order, len(order)
        self._cached.clear()
        self._tell("forget_cached", started, blocks={"evicted": forgotten}, free=self.num_free)

    def _times_named(self, blocks: np.ndarray) -> np.ndarray:
        """How often each of the blocks is named among them: int32 [n]."""
        np.add.at(self._tally, blocks, np.int32(1))
        times = self._tally[blocks]
        self._tally[blocks] = 0
        return times

    def _queue_up(self, freed: np.ndarray, cached: ArrayLike) -> None:
        """Put blocks that became free, in this order, where they belong in the queue."""
        plain = freed
        if len(cached):
            worth = set(np.asarray(cached).tolist())
            self._cached.update((block, None) for block in freed.tolist() if block in worth)
            plain = np.array([block for block in freed.tolist() if block not in worth], np.int32)
        self._free[self._num_plain : self._num_plain + len(plain)] = plain[::-1]
        self._num_plain += len(plain)
