"""The cache that a model talks to: manager, storage and attention behind one face and one lock."""

import contextlib
import functools
import threading
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import DTypeLike

from .allocator import whole_numbers
from .block_table import NOTHING, SeqId, as_ids, slots_of
from .decode import AttentionPlan, StalePlan
from .manager import BlockManager, Reservation, Snapshot
from .prefix_cache import PrefixStats, tagged
from .storage import KVStorage

MANY_BLOCKS = 4  # tokens for so many are worth being written block by block


def _from_manager(name: str, *, frees: bool = False):
    """A method of BlockManager under the cache's lock; what it frees for good is poisoned in poison mode."""
    method = getattr(BlockManager, name)

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        with self._lock:
            result = getattr(self.manager, name)(*args, **kwargs)
            if frees:
                self._poison_freed(result)
            return result

    return call


class PagedKVCache:
    """A paged KV cache: sequences, their pages and attention over them, safe from several threads.

    One step of a model: `reservation = extend(ids)`, `plan = plan(ids)`, then per layer `write(layer, …)` and
    `attend(layer, …)`. One lock covers the accounting *and* the copies that it asks for, so that a block
    freed in between cannot be overwritten.

    Args: num_blocks, block_size, num_kv_heads, head_dim, num_layers, dtype, poison: as in KVStorage; manager,
        storage: parts to use instead of new ones; manager_options: for BlockManager (with a new manager, the
        namespace of its prefix cache includes the dtype).
    Source: Kwon et al. 2023, figure 4.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_layers: int = 1,
        dtype: DTypeLike = "float32",
        poison: bool = False,
        manager: BlockManager | None = None,
        storage: KVStorage | None = None,
        **manager_options,
    ):
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        self.storage = KVStorage(*shape, dtype, poison=poison) if storage is None else storage
        if manager is None:
            identity = tagged(namespace=manager_options.pop("namespace", b""), dtype=self.storage.dtype)
            manager = BlockManager(num_blocks, block_size, namespace=identity, **manager_options)
        self.manager = manager
        pool, kept = ((p.num_blocks, p.block_size) for p in (self.manager, self.storage))
        if not pool == kept == (num_blocks, block_size):
            raise ValueError(
                f"(num_blocks, block_size) is {num_blocks, block_size}, of manager {pool}, of storage {kept}"
            )
        self._lock = threading.RLock()
        self._last_plan = None, None  # what it was asked for, and the plan
        self._last_step: Reservation | None = None  # the reservation that was granted last

    def __repr__(self) -> str:
        from .teach import pages  # only here: a drawing needs what stands above the engine

        return pages.drawn(self)

    def _repr_html_(self) -> str | None:
        from .teach import pages

        return pages.drawn_html(self)

    # Accounting

    add = _from_manager("add")
    match = _from_manager("match")
    commit = _from_manager("commit")
    fork = _from_manager("fork")
    length = _from_manager("length")
    lengths = _from_manager("lengths")
    versions = _from_manager("versions")
    block_tables = _from_manager("block_tables")
    to_csr = _from_manager("to_csr")
    blocks_needed = _from_manager("blocks_needed")
    can_extend = _from_manager("can_extend")
    snapshot = _from_manager("snapshot")
    reorder = _from_manager("reorder", frees=True)
    release_before = _from_manager("release_before", frees=True)
    free = _from_manager("free", frees=True)

    @property
    def num_blocks(self) -> int:
        return self.manager.num_blocks

    @property
    def block_size(self) -> int:
        return self.manager.block_size

    @property
    def num_free(self) -> int:
        """Blocks that no sequence uses."""
        return self.manager.num_free

    @property
    def prefix_stats(self) -> PrefixStats:
        """How many prompt tokens were found in the prefix cache."""
        return self.manager.prefix_stats

    @property
    def seq_ids(self) -> list[SeqId]:
        """All registered sequences, oldest first."""
        with self._lock:
            return self.manager.seq_ids

    def extend(
        self, seq_ids: SeqId | Iterable[SeqId], num_tokens: int | Sequence[int | None] | None = 1
    ) -> Reservation:
        """As BlockManager.extend; copies of shared blocks are done when it returns."""
        with self._lock:
            reservation = self.manager.extend(seq_ids, num_tokens)
            if self.storage.poisoned:  # a block that was cached until now still holds what it was cached for
                first_slots = reservation.slots[reservation.slots % self.block_size == 0]
                self.storage.poison([*(first_slots // self.block_size), *reservation.copies[:, 1]])
            if len(reservation.copies):
                self.storage.copy_blocks(reservation.copies)
            self._last_step = reservation
            return reservation

    def truncate(self, seq_id: SeqId, length: int) -> np.ndarray:
        """As BlockManager.truncate."""
        with self._lock:
            freed = self.manager.truncate(seq_id, length)
            self._poison_freed(freed)
            if self.storage.poisoned and length % self.block_size:
                tail = self.manager.block_tables([seq_id])[0, -1:]
                shared = self.manager.allocator.ref_count(tail[0]) > 1  # others may still read it,
                if not shared and not self.manager.is_cached(tail)[0]:  # or find it
                    self.storage.poison(tail, start=length % self.block_size)
            return freed

    def restore(self, snapshot: Snapshot, source: "KVStorage | PagedKVCache") -> np.ndarray:
        """As BlockManager.restore, with the pages copied from the storage that the snapshot speaks of.

        Raises: StalePlan if `source` is a cache whose sequences changed since the snapshot was taken.
        """
        pages = source.storage if isinstance(source, PagedKVCache) else source
        caches = {id(cache): cache for cache in (self, source) if isinstance(cache, PagedKVCache)}
        with contextlib.ExitStack() as locks:
            for _, cache in sorted(caches.items()):  # in an order that all threads keep
                locks.enter_context(cache._lock)
            indices = whole_numbers("indices", snapshot.indices)
            self.storage.check_source(pages, indices[indices != NOTHING])
            if isinstance(source, PagedKVCache) and snapshot.versions is not None:
                source._check_current(snapshot.seq_ids, snapshot.versions)
            pairs = self.manager.restore(snapshot)
            self.storage.copy_blocks(pairs, pages)
            return pairs

    def reset_prefix_cache(self) -> bool:
        """As BlockManager.reset_prefix_cache."""
        with self._lock:
            done = self.manager.reset_prefix_cache()
            if done and self.storage.poisoned:
                self.storage.poison(np.arange(self.num_blocks))
            return done

    def _poison_freed(self, blocks: np.ndarray) -> None:
        """In poison mode, mark freed blocks as holding nothing; those that stay cached keep what they hold."""
        if self.storage.poisoned:
            self.storage.poison(blocks[~self.manager.is_cached(blocks)])

    # Keys and values

    def write(self, layer: int, reservation: Reservation, keys: np.ndarray, values: np.ndarray) -> None:
        """Store the keys and values of a reservation's tokens in one layer.

        Args: keys, values: float [num_tokens, num_kv_heads, head_dim], sequence after sequence.
        Raises: StalePlan if one of its sequences changed since; ValueError for wrong shapes and types.
        """
        with self._lock:
            self._check_current(reservation.seq_ids, reservation.versions)
            encoded = self.storage.encode(keys, values, (len(reservation.slots),))
            self._put(layer, reservation, encoded)

    def append(
        self,
        seq_ids: SeqId | Iterable[SeqId],
        keys: np.ndarray,
        values: np.ndarray,
        num_tokens: int | Sequence[int] = 1,
    ) -> Reservation:
        """Extend and write all layers: keys and values are float [num_layers, num_tokens, num_kv_heads, head_dim].

        Raises: as extend and write; nothing is changed.
        """
        ids, counts = as_ids(seq_ids), whole_numbers("num_tokens", num_tokens)
        total = int(counts.sum() if counts.ndim else counts * len(ids))
        encoded = self.storage.encode(keys, values, (self.storage.num_layers, total))
        with self._lock:
            reservation = self.extend(ids, num_tokens)
            self._put(slice(None), reservation, encoded)
            return reservation

    def _put(self, layer: int | slice, reservation: Reservation, encoded: dict[str, np.ndarray]) -> None:
        """Store what was encoded: prompts by whole blocks, other tokens one by one."""
        if len(reservation.slots) < MANY_BLOCKS * self.block_size:
            self.storage.put(layer, reservation.places, encoded)
            return
        whole, rest = self._whole_blocks(reservation)
        lead = (slice(None),) if isinstance(layer, slice) else ()
        for tokens in whole:
            blocks = reservation.slots[tokens.start : tokens.stop : self.block_size] // self.block_size
            part = {name: stored[(*lead, tokens)] for name, stored in encoded.items()}
            self.storage.put_blocks(layer, blocks, part)
        if whole:
            encoded = {name: stored[(*lead, rest)] for name, stored in encoded.items()}
        self.storage.put(layer, reservation.places[rest], encoded)

    def _whole_blocks(self, reservation: Reservation) -> tuple[list[slice], np.ndarray]:
        """The tokens of each long chunk that fill whole blocks, and all the other tokens."""
        size, counts = self.block_size, reservation.counts
        whole, rest = [], np.ones(len(reservation.slots), bool)
        ends = np.cumsum(counts)
        for i in np.flatnonzero(counts >= MANY_BLOCKS * size).tolist():
            first = int(
                ends[i] - counts[i] + -reservation.start[i] % size
            )  # the first at the edge of a block
            whole.append(slice(first, first + (int(ends[i]) - first) // size * size))
            rest[whole[-1]] = False
        return whole, np.flatnonzero(rest)

    def gather(self, layer: int, seq_id: SeqId) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of one sequence in order: two float32 [length, num_kv_heads, head_dim]."""
        with self._lock:
            table = self.manager.block_tables([seq_id])[0]
            positions = np.arange(self.manager.length(seq_id))
            return self.storage.read(layer, slots_of(table, positions, self.block_size))

    # Attention

    def plan(
        self,
        seq_ids: SeqId | Iterable[SeqId],
        num_queries: int | Sequence[int] = 1,
        *,
        window: int | None = None,
        share: bool = True,
        threads: int | None = None,
    ) -> AttentionPlan:
        """Plan the attention of one step, for all layers.

        Args: num_queries: per sequence, or one for all: how many of its last positions are asked;
            window: keys that a query sees, its own included; share, threads: as in AttentionPlan.
        Raises: KeyError for unknown sequences; ValueError where a visible block was left behind.
        """
        ids, asked, manager = as_ids(seq_ids), np.asarray(num_queries), self.manager
        how = {"window": window, "share": share, "threads": threads}
        kind = (ids, asked.dtype.char, asked.shape, asked.tobytes(), *map(type, how.values()), *how.values())
        with self._lock:
            versions, (kept, plan), step = manager.versions(ids), self._last_plan, self._last_step
            if kept != kind:
                plan = None
            elif plan.versions is not versions:  # something has changed: one more token for each of these?
                before = manager.tables.before_step
                if before is plan.versions and step is not None and step.versions is versions:
                    plan = plan.next(step)
                elif np.count_nonzero(plan.versions != versions):
                    plan = None
            if plan is None:
                how |= {"seq_ids": ids, "versions": versions}
                if not manager.tables.has_gaps:
                    how["known_below"] = self.num_blocks
                tables, lengths = manager.block_tables(ids), manager.lengths(ids)
                plan = AttentionPlan(tables, lengths, self.block_size, num_queries, **how)
            self._last_plan = kind, plan
            return plan

    def attend(
        self,
        layer: int,
        query: np.ndarray,
        plan: AttentionPlan,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> np.ndarray:
        """Attention of a step's queries over their sequences' pages of one layer.

        Args: query: float [total_queries, num_q_heads, head_dim], sequence after sequence, each one's last
            positions; scale: 1 / sqrt(head_dim) if None; soft_cap: c in c · tanh(score / c).
        Returns: float32 [total_queries, num_q_heads, head_dim].
        Raises: StalePlan if one of the sequences changed since it was planned; ValueError for wrong shapes.
        Source: section 4.3.
        """
        self._check_current(plan.seq_ids, plan.versions)
        out = plan.run(layer, query, self.storage, scale=scale, soft_cap=soft_cap)
        self._check_current(plan.seq_ids, plan.versions)  # was a page pulled away while the lock was open?
        return out

    def _check_current(self, seq_ids: tuple[SeqId, ...], versions: np.ndarray) -> None:
        """StalePlan unless the sequences still have these versions."""
        try:
            with self._lock:
                current = self.manager.versions(seq_ids)
        except KeyError as error:
            raise StalePlan(error.args[0]) from None
        if current is versions:  # as usual, layer after layer
            return
        changed = current != versions
        if np.count_nonzero(changed):
            raise StalePlan(f"sequence {seq_ids[changed.argmax()]!r} changed after this was planned")
