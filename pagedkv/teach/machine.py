"""A pretended computer with a clock of its own, so that a benchmark gives the same figures on every real one.

Lesson 12 practises on it: here the truth is known, and whatever a benchmark reports can be held against it.
"""

from collections.abc import Callable

import numpy as np

Load = Callable[[int], int]  # the time -> how many times as long a call takes that begins then


def quiet(now: int) -> int:
    """Nobody else computes."""
    return 1


def neighbour_from(start: int, factor: int = 3) -> Load:
    """Somebody else begins to compute at a time, and stays."""
    return lambda now: factor if now >= start else 1


def spells(share: float, factor: int = 3, length: int = 50, seed: int = 0) -> Load:
    """Slow spells that come and go: calls take one of two times.

    Args: share: of the spells that are slow; length: of a spell, in ms.
    """
    slow = np.random.default_rng(seed).random(4096) < share
    return lambda now: factor if slow[now // length % len(slow)] else 1


class Machine:
    """Kernels take a pretended time in whole milliseconds, and more where real ones do.

    Args: cold: ms that a call takes longer when another kernel, or nobody, ran before it; fault: ms that a call
        takes longer when it writes to memory that nobody has written to; load: by the time, how many times as long
        a call takes.
    """

    def __init__(self, *, cold: int = 0, fault: int = 0, load: Load = quiet):
        self.cold, self.fault, self.load = cold, fault, load
        self.now = 0
        self.log: list[tuple[str, int]] = []  # every call and its ms; ("clock", time) for a look at the clock
        self._last: str | None = None  # the kernel whose data is still near the processor
        self._written: dict[int, np.ndarray] = {}  # kept, so that no address is used twice

    def clock(self) -> int:
        """The time in ms."""
        self.log.append(("clock", self.now))
        return self.now

    def sleep(self, ms: int) -> None:
        """Do nothing for a while; meanwhile the caches fill with other people's data."""
        self.now += ms
        self._last = None

    def kernel(self, name: str, ms: int, result: np.ndarray | None = None) -> Callable[..., None]:
        """A call that takes so many ms on a warm and quiet machine, and writes `result` to where it is told."""

        def call(out: np.ndarray | None = None) -> None:
            took = ms + (self.cold if self._last != name else 0)
            if out is not None:
                address = out.__array_interface__["data"][0]
                took += self.fault if address not in self._written else 0
                self._written[address] = out
                out[...] = 0 if result is None else result
            took *= self.load(self.now)
            self.now, self._last = self.now + took, name
            self.log.append((name, took))

        return call
