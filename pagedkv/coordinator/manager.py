"""`BlockManager` for several processes: the pool stands in Redis, each worker holds a lease on its sequences."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..allocator import Observer
from ..block_table import SeqId
from ..manager import BlockManager, Reservation


@dataclass(frozen=True)
class Worker:
    """One process with a lease on the pool, as `owners` lists them."""

    name: str
    token: int  # grows with every registration: the larger one is right
    lease_left: float  # seconds, by the server's clock; below 0 it is over
    sequences: dict[SeqId, tuple[int, ...]]  # its block table
    lengths: dict[SeqId, int]
    pending: tuple[int, ...] = ()  # sources of copies that it has not confirmed


@dataclass(frozen=True)
class Reclaimed:
    """What a reaper took back."""

    workers: tuple[str, ...]
    seq_ids: tuple[SeqId, ...]
    freed: np.ndarray  # int32  blocks that became free; what others share is kept


class RedisBlockManager(BlockManager):
    """A BlockManager whose pool of blocks several processes share.

    The pool (free queue, counts, tables, lengths, what can be found) stands in Redis and is changed by scripts there,
    each of which does all of a call or nothing. A worker's own sequences are mirrored here, so that reading costs no
    round trip; nobody else may change them. A sequence has one owner, the worker that added or adopted it.

    Args: url: of the server, with password and database if needed; None: $REDIS_URL, else a server inside this
        process; pool: its name; num_blocks, block_size, max_length, prefix_cache, namespace: as in BlockManager:
        who comes first makes the pool, later ones may leave them out or must say the same; worker: a name that no
        other has (None: made up); one that is registered already is taken over, and its sequences reclaimed;
        lease_seconds: how long the pool waits for a word from this worker; each accepted write is one, and so is
        `heartbeat`; timeout: seconds that a call may wait for the server.
    Raises: ValueError for another configuration than the pool's; Unreachable, CoordinatorError for what the
        server says.
    Source: Kwon et al. 2023, section 4.6 (one block manager for all workers); fencing tokens: Burrows 2006, "The
        Chubby lock service for loosely-coupled distributed systems", section 2.4 (sequencers).
    """

    def __init__(
        self,
        url: str | None = None,
        pool: str = "default",
        *,
        num_blocks: int | None = None,
        block_size: int | None = None,
        max_length: int | None = None,
        prefix_cache: bool | None = None,
        namespace: bytes | str | None = None,
        worker: str | None = None,
        lease_seconds: float = 10.0,
        timeout: float = 5.0,
        observers: Iterable[Observer] = (),
    ):
        self.url, self.pool, self.worker = url, pool, worker
        self.token = 0  # the fencing token of this worker's lease
        raise NotImplementedError

    # The lease

    def heartbeat(self) -> float:
        """Renew the lease; returns its seconds. LeaseLost if it is over."""
        raise NotImplementedError

    @property
    def lease_left(self) -> float:
        """Seconds for which this worker may trust its lease, by its own clock and without asking the server.

        Counted from before the last accepted message was sent, so the server never thinks it shorter.
        """
        raise NotImplementedError

    def check_lease(self) -> None:
        """LeaseLost if the lease may be over; for those who are about to write into shared pages. No round trip."""
        raise NotImplementedError

    def confirm(self, reservation: Reservation | None = None) -> np.ndarray:
        """Say that the copies of all reservations so far are done: their sources lose the reference kept for them.

        Any later write of this worker says the same, since a worker copies before it goes on.

        Returns: int32 ids of the blocks that became free.
        """
        raise NotImplementedError

    def reap(self, *, grace: float = 0.0) -> Reclaimed:
        """Take back what workers hold whose lease has been over for `grace` seconds: once, whoever calls it."""
        raise NotImplementedError

    def leave(self) -> np.ndarray:
        """End the lease; what this worker still holds is freed. Returns int32 ids that became free."""
        raise NotImplementedError

    def owners(self) -> list[Worker]:
        """All workers with a lease, oldest token first, and what they hold: one consistent picture."""
        raise NotImplementedError

    # Between workers

    def hand_over(self, seq_ids: SeqId | Iterable[SeqId], to: str) -> None:
        """Give sequences to another worker: from now on they are its own, and this one cannot change them.

        Raises: KeyError for an unknown sequence, ValueError for a worker without a lease; nothing is changed.
        """
        raise NotImplementedError

    def adopt(self, seq_ids: SeqId | Iterable[SeqId] | None = None) -> list[SeqId]:
        """Begin to work on sequences that were handed over to this worker (all of them if None).

        Returns: their ids. Raises: KeyError for one that was not.
        """
        raise NotImplementedError
