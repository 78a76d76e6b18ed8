"""Where the pages of a shared pool are: on this machine, on another, or nowhere any more.

Redis says which block holds which text; only the machine says whether its memory does. What a prompt finds may have
been written elsewhere, or before a restart: a page fault, served from a page store, or by computing it again.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from ..allocator import Event
from ..block_table import NOTHING, SeqId, as_ids, slots_of
from ..cache import PagedKVCache
from ..manager import Reservation
from ..store.redis import RedisPageStore
from .manager import RedisBlockManager
from .shared_memory import SharedStorage


@dataclass(frozen=True)
class Work:
    """What a model has to compute for a reservation: its tokens, and before them what no page holds any more."""

    start: np.ndarray  # int64 [batch]  position of each sequence's first token to compute
    counts: np.ndarray  # int64 [batch]  tokens to compute
    lacking: np.ndarray  # bool [n]  which of them have no keys and values in a page yet
    reservation: Reservation  # the slots of those, for `write`


class SharedCache(PagedKVCache):
    """A paged cache over a pool that several processes share, on one machine or on many.

    One step of a model: `reservation = extend(ids)`, `work = work(reservation)`, `plan = plan(ids, work.counts)`; per
    layer `write(layer, work.reservation, k[work.lacking], …)` and `attend(layer, …)`; then `commit`, which makes the
    filled pages known on this machine and puts them into the store for the others.

    Nothing is written once the worker's lease may be over, by its own clock. That is asked just before: a process
    that is stopped between the question and the end of the copy, for longer than the lease and a reaper's `grace`,
    writes into a block that is another's by then, and no checksum guards a page in memory. A lease much longer than
    any pause keeps that away.

    Args: manager: of the pool; storage: the pages on this machine; store: where pages travel between machines; one
        that cannot be used costs time, never a text.
    """

    def __init__(
        self, manager: RedisBlockManager, storage: SharedStorage, *, store: RedisPageStore | None = None
    ):
        shape = (manager.num_blocks, manager.block_size, storage.num_kv_heads, storage.head_dim)
        super().__init__(*shape, manager=manager, storage=storage)
        self.store = store
        self.store_failures = 0  # calls of it that failed
        self._lost: dict[SeqId, np.ndarray] = {}  # positions that no page of this machine holds
        self._known: dict[SeqId, int] = {}  # full blocks, from the first on, whose pages are known here
        manager.observers.append(self._restored)

    # Growing

    def extend(
        self, seq_ids: SeqId | Iterable[SeqId], num_tokens: int | Sequence[int | None] | None = 1
    ) -> Reservation:
        """As PagedKVCache.extend; pages of a prompt's beginning that are not on this machine are fetched, or lost."""
        ids = as_ids(seq_ids)
        with self._lock:
            begun = dict(zip(ids, self.manager.lengths(ids) == 0, strict=True))
            reservation = super().extend(ids, num_tokens)
            for seq_id, start in zip(ids, reservation.start.tolist(), strict=True):
                if begun[seq_id] and start:
                    self._bring(seq_id, start)
            return reservation

    def work(self, reservation: Reservation) -> Work:
        """What to compute for a reservation. StalePlan if one of its sequences changed since."""
        with self._lock:
            self._check_current(reservation.seq_ids, reservation.versions)
            start, end = reservation.start.copy(), reservation.start + reservation.counts
            lacking, slots = [], []
            for i, seq_id in enumerate(reservation.seq_ids):
                lost = self._lost.get(seq_id, ())
                if len(lost):
                    start[i] = min(start[i], lost[0])
                positions = np.arange(start[i], end[i])
                lacking.append((positions >= reservation.start[i]) | np.isin(positions, lost))
                table = self.manager.block_tables([seq_id])[0]
                slots.append(slots_of(table, positions[lacking[-1]], self.block_size))
            none = np.zeros(0, np.int32)
            written = replace(reservation, slots=np.concatenate([none, *slots]))
            return Work(start, end - start, np.concatenate([none.astype(bool), *lacking]), written)

    def commit(
        self,
        seq_ids: SeqId | Iterable[SeqId],
        tokens: ArrayLike | Sequence[ArrayLike] | None = None,
        *,
        block_hashes: Sequence | None = None,
    ) -> None:
        """As PagedKVCache.commit; says also that what was lost is computed."""
        with self._lock:
            self.manager.commit(seq_ids, tokens, block_hashes=block_hashes)
            for seq_id in as_ids(seq_ids):
                self._lost.pop(seq_id, None)
                if self._full(seq_id) > self._known.get(seq_id, 0):
                    self._publish(seq_id)

    # Handing over

    def hand_over(self, seq_ids: SeqId | Iterable[SeqId], to: str) -> str:
        """Give sequences to another worker, as RedisBlockManager.hand_over. On one machine nothing is copied.

        Returns: what the other one must say to `adopt`.
        Raises: ValueError for a sequence of which something is lost: compute and commit it first.
        """
        ids = as_ids(seq_ids)
        with self._lock:
            for seq_id in ids:
                if seq_id in self._lost:
                    raise ValueError(
                        f"sequence {seq_id!r} lacks pages: compute and commit them before it goes"
                    )
            self.manager.hand_over(ids, to)
            self._drop(ids)
            return self.storage.identity

    def adopt(self, seq_ids: SeqId | Iterable[SeqId] | None = None, memory: str | None = None) -> list[SeqId]:
        """Begin to work on sequences that were handed over to this worker, as RedisBlockManager.adopt.

        Args: memory: what `hand_over` returned; None, or that of another machine: full pages are fetched from the
            store, the others are lost, and `work` tells to compute them again.
        """
        with self._lock:
            ids = self.manager.adopt(seq_ids)
            for seq_id in ids:
                if memory == self.storage.identity:
                    self._known[seq_id] = self._full(seq_id)
                else:
                    self._bring(seq_id, self.manager.length(seq_id))
            return ids

    # What else happens to sequences

    def free(self, seq_ids: SeqId | Iterable[SeqId]) -> np.ndarray:
        """As PagedKVCache.free."""
        with self._lock:
            freed = self.manager.free(seq_ids)
            self._drop(as_ids(seq_ids))
            return freed

    def fork(self, parent: SeqId, children: int | Iterable[SeqId] = 1) -> list[SeqId]:
        """As PagedKVCache.fork."""
        with self._lock:
            ids = self.manager.fork(parent, children)
            self._follow(dict.fromkeys(ids, parent))
            return ids

    def reorder(self, seq_ids: Iterable[SeqId], parents: Sequence[int]) -> np.ndarray:
        """As PagedKVCache.reorder."""
        ids = as_ids(seq_ids)
        with self._lock:
            freed = self.manager.reorder(ids, parents)
            self._follow({ids[i]: ids[parent] for i, parent in enumerate(parents)})
            return freed

    def truncate(self, seq_id: SeqId, length: int) -> np.ndarray:
        """As PagedKVCache.truncate."""
        with self._lock:
            freed = self.manager.truncate(seq_id, length)
            lost = self._lost.pop(seq_id, None)
            if lost is not None and (lost < length).any():
                self._lost[seq_id] = lost[lost < length]
            self._known[seq_id] = min(self._known.get(seq_id, 0), length // self.block_size)
            return freed

    # Pages

    def _bring(self, seq_id: SeqId, end: int) -> None:
        """Get the pages of a sequence's first `end` tokens that this machine lacks; what cannot be had is lost."""
        table, digests = self.manager.block_tables([seq_id])[0], self._digests(seq_id)
        full = np.flatnonzero(table[: len(digests)] != NOTHING)
        absent = full[~self.storage.holds(table[full], [digests[i] for i in full])].tolist()
        absent = self._fetch(table, digests, absent)
        self._known[seq_id] = absent[0] if absent else len(digests)
        size = self.block_size
        lost = [np.arange(i * size, (i + 1) * size) for i in absent] + [np.arange(len(digests) * size, end)]
        lost = np.concatenate(lost)
        if lost.size:
            self._lost[seq_id] = lost

    def _fetch(self, table: np.ndarray, digests: list[bytes], absent: list[int]) -> list[int]:
        """Copy pages from the store into their blocks; returns the places of those that it could not give."""
        pages = [None] * len(absent)
        if self.store is not None and absent:
            with self._bearing_failures():
                pages = self.store.get_many([digests[i] for i in absent])
        for i, page in zip(absent, pages, strict=True):
            if page is not None:
                self.storage.set_page(int(table[i]), page)
                self.storage.remember([table[i]], [digests[i]])
        return [i for i, page in zip(absent, pages, strict=True) if page is None]

    def _publish(self, seq_id: SeqId) -> None:
        """Make the pages that were filled known on this machine, and put them into the store for others."""
        table, digests = self.manager.block_tables([seq_id])[0], self._digests(seq_id)
        new = [i for i in range(self._known.get(seq_id, 0), len(digests)) if table[i] != NOTHING]
        self.storage.remember(table[new], [digests[i] for i in new])
        self._known[seq_id] = len(digests)
        if self.store is not None:
            with self._bearing_failures():
                self.store.put_many((digests[i], self.storage.page(int(table[i]))) for i in new)

    @contextlib.contextmanager
    def _bearing_failures(self) -> Iterator[None]:
        try:
            yield
        except OSError:  # the store is unreachable or full
            self.store_failures += 1

    def _digests(self, seq_id: SeqId) -> list[bytes]:
        """Of the full committed blocks of a sequence."""
        return [link.digest for link in self.manager._texts[seq_id].links()]

    def _full(self, seq_id: SeqId) -> int:
        """How many those are."""
        return self.manager._texts[seq_id].committed // self.block_size

    def _check_current(self, seq_ids: tuple[SeqId, ...], versions: np.ndarray) -> None:
        self.manager.check_lease()
        super()._check_current(seq_ids, versions)

    # Bookkeeping

    def _restored(self, event: Event) -> None:
        """An observer: what comes into blocks by another way than `write` is not what they were known for."""
        if event.kind == "restore":
            self.storage.forget(event.blocks["new"])

    def _drop(self, ids: Iterable[SeqId]) -> None:
        for seq_id in ids:
            self._lost.pop(seq_id, None)
            self._known.pop(seq_id, None)

    def _follow(self, parents: dict[SeqId, SeqId]) -> None:
        """Let sequences have what their parents had."""
        for kept in (self._lost, self._known):
            inherited = {child: kept[parent] for child, parent in parents.items() if parent in kept}
            for child in parents:
                kept.pop(child, None)
            kept.update(inherited)
