"""Sequences over one pool of blocks: growth, forks, copy-on-write. Accounting only, no keys or values."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from .allocator import BlockAllocator, Observed, Observer, whole_number, whole_numbers
from .block_table import NOTHING, BlockTables, SeqId, as_ids

MAX_SLOTS = 2**31  # slot numbers are int32


@dataclass(frozen=True)
class Reservation:
    """Room for new tokens, as `extend` granted it. Valid until one of its sequences changes again."""

    seq_ids: tuple[SeqId, ...]
    start: np.ndarray  # int64 [batch]       position of each sequence's first new token
    counts: np.ndarray  # int64 [batch]      new tokens per sequence
    slots: np.ndarray  # int32 [num_tokens]  where they go, sequence after sequence
    copies: np.ndarray  # int32 [m, 3]       source block, destination block, filled slots
    versions: np.ndarray  # int64 [batch]    of the sequences, after this step


@dataclass(frozen=True)
class Snapshot:
    """Sequences as plain arrays: what is needed to build them again, here or elsewhere."""

    block_size: int
    seq_ids: tuple[SeqId, ...]
    indptr: np.ndarray  # int32 [batch + 1]
    indices: np.ndarray  # int32 [entries]   −1 where a sliding window left a block behind
    lengths: np.ndarray  # int64 [batch]


@dataclass(frozen=True)
class _Growth:
    """The plan of one extend: everything it needs, computed before anything is touched."""

    seq_ids: tuple[SeqId, ...]
    rows: np.ndarray  # int64 [batch]
    tokens: np.ndarray  # int64 [batch]
    copies: np.ndarray  # bool [batch]   whose last block must be copied first
    blocks: np.ndarray  # int64 [batch]  new blocks per sequence, copies not counted

    @property
    def needed(self) -> int:
        return int(self.copies.sum() + self.blocks.sum())


class BlockManager(Observed):
    """Block tables over one allocator, with copy-on-write (Kwon et al. 2023, sections 4.2 to 4.4).

    The count of a block always equals the number of table entries that name it, and a slot is only ever
    granted in a block with one owner. Every call computes its whole need first: a refusal changes nothing.
    Not locked: `PagedKVCache` adds the lock that also covers the copies.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_length: int | None = None,
        observers: Iterable[Observer] = (),
    ):
        super().__init__(observers)
        self.tables = BlockTables(block_size, max_length=max_length)
        if whole_number("num_blocks", num_blocks, minimum=1) * self.block_size > MAX_SLOTS:
            raise ValueError(
                f"{num_blocks} blocks of {block_size} exceed the 2**31 slots that int32 can number"
            )
        self.allocator = BlockAllocator(num_blocks)
        self._next_id = 0

    @property
    def num_blocks(self) -> int:
        return self.allocator.num_blocks

    @property
    def block_size(self) -> int:
        return self.tables.block_size

    @property
    def num_free(self) -> int:
        """Blocks that no sequence uses."""
        return self.allocator.num_free

    @property
    def seq_ids(self) -> list[SeqId]:
        """All registered sequences, oldest first."""
        return list(self.tables)

    def __repr__(self) -> str:
        from .teach import pages  # only here: a drawing needs what stands above the engine

        return pages.drawn(self)

    def _repr_html_(self) -> str | None:
        from .teach import pages

        return pages.drawn_html(self)

    # Reading

    def length(self, seq_id: SeqId) -> int:
        """Tokens of one sequence. KeyError if it is not registered."""
        return int(self.lengths([seq_id])[0])

    def lengths(self, seq_ids: Iterable[SeqId]) -> np.ndarray:
        """Tokens per sequence: int64 [batch]."""
        return self.tables.length(self._rows(seq_ids)[1])

    def versions(self, seq_ids: Iterable[SeqId]) -> np.ndarray:
        """A number per sequence that changes with its table or length: int64 [batch]."""
        return self.tables.version(self._rows(seq_ids)[1])

    def block_tables(self, seq_ids: Iterable[SeqId]) -> np.ndarray:
        """Tables padded with −1: int32 [batch, max_blocks]."""
        return self.tables.padded(self._rows(seq_ids)[1])

    def to_csr(self, seq_ids: Iterable[SeqId]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tables in flashinfer's form: indptr [batch + 1], indices [entries], last_page_len [batch], all int32.

        last_page_len is 1 … block_size, or 0 for a sequence without tokens.
        """
        _, rows = self._rows(seq_ids)
        indptr, indices = self.tables.csr(rows)
        lengths = self.tables.length(rows)
        return indptr, indices, np.where(lengths > 0, (lengths - 1) % self.block_size + 1, 0).astype(np.int32)

    def blocks_needed(self, seq_ids: SeqId | Iterable[SeqId], num_tokens: int | Sequence[int] = 1) -> int:
        """Free blocks that `extend` with the same arguments would take: new ones and copies."""
        return self._plan_growth(seq_ids, num_tokens).needed

    def can_extend(self, seq_ids: SeqId | Iterable[SeqId], num_tokens: int | Sequence[int] = 1) -> bool:
        """Whether `extend` with the same arguments would find enough free blocks."""
        return self.blocks_needed(seq_ids, num_tokens) <= self.num_free

    # Growing

    def add(self, seq_id: SeqId | None = None) -> SeqId:
        """Register an empty sequence; it takes no block yet.

        Args: seq_id: an int or str that is not in use; None picks an unused int.
        Returns: the id.
        Raises: ValueError if it is in use or of another type.
        """
        started = self._clock()
        (seq_id,) = self._new_ids([seq_id])
        self.tables.add(seq_id)
        self._tell("add", started, (seq_id,))
        return seq_id

    def extend(self, seq_ids: SeqId | Iterable[SeqId], num_tokens: int | Sequence[int] = 1) -> Reservation:
        """Make room for new tokens at the end of sequences: all of them, or none.

        A shared last block is copied for every writer but the last owner, who writes in place. The caller
        carries out `copies` before it writes to `slots` (`PagedKVCache.extend` does).

        Args: seq_ids: one or several, each once; num_tokens: per sequence, or one number for all, at least 0.
        Returns: a Reservation.
        Raises: PoolExhausted if the blocks do not suffice, ValueError beyond max_length; nothing is changed.
        Source: section 4.4 and figure 8.
        """
        started = self._clock()
        plan = self._plan_growth(seq_ids, num_tokens)
        if plan.needed > self.num_free:
            self._refuse(started, plan.needed, self.num_free, plan.seq_ids)
        start = self.tables.length(plan.rows)
        taken = self.allocator.allocate(plan.needed)  # sequence after sequence, a copy before new blocks
        amounts = plan.copies + plan.blocks
        is_copy = np.zeros(plan.needed, bool)
        is_copy[(np.cumsum(amounts) - amounts)[plan.copies]] = True
        copies = self._copy_tails(plan, start, taken[is_copy])
        self.tables.append(plan.rows, plan.blocks, plan.tokens, taken[~is_copy])
        slots = self.tables.slots(plan.rows, start, plan.tokens)
        self._tell(
            "extend",
            started,
            plan.seq_ids,
            {"new": taken[~is_copy], "copies": copies},
            tokens=int(plan.tokens.sum()),
            free=self.num_free,
        )
        return Reservation(plan.seq_ids, start, plan.tokens, slots, copies, self.tables.version(plan.rows))

    # Sharing

    def fork(self, parent: SeqId, children: int | Iterable[SeqId] = 1) -> list[SeqId]:
        """Let children continue a parent's text; they share all its blocks and nothing is copied.

        Write what was reserved first: a child shares unwritten slots too, and copies them as they are.

        Args: parent: a registered sequence; children: how many, or their ids.
        Returns: the children's ids.
        Raises: KeyError for an unknown parent, ValueError for ids in use; nothing is changed.
        Source: section 4.4, parallel sampling.
        """
        started = self._clock()
        _, (row,) = self._rows([parent])
        if not isinstance(children, Iterable):
            children = [None] * whole_number("the number of children", children, minimum=1)
        ids = self._new_ids(as_ids(children))
        entries, length = self.tables.entries(row), int(self.tables.length(row))
        owned = entries[entries != NOTHING]
        self.allocator.share(np.tile(owned, len(ids)))
        for child in ids:
            self.tables.put(self.tables.add(child), entries, length)
        self._tell("fork", started, (parent, *ids), {"shared": owned})
        return ids

    def reorder(self, seq_ids: Iterable[SeqId], parents: Sequence[int]) -> np.ndarray:
        """Let row i continue what seq_ids[parents[i]] holds now: one step of a beam search.

        Args: seq_ids: sequences, each once; parents: one row number per sequence, repeats allowed.
        Returns: int32 ids of the blocks that became free.
        Raises: ValueError for a parent outside 0 … len(seq_ids) − 1; nothing is changed.
        Source: section 4.4, beam search.
        """
        started = self._clock()
        ids, rows = self._rows(seq_ids, once=True)
        parents = whole_numbers("parents", parents)
        if parents.shape != (len(ids),) or ((parents < 0) | (parents >= len(ids))).any():
            raise ValueError(
                f"parents must be {len(ids)} numbers of 0 … {len(ids) - 1}, got {parents.tolist()}"
            )
        moved = np.flatnonzero(parents != np.arange(len(ids))).tolist()
        new = [(self.tables.entries(rows[parents[i]]), self.tables.length(rows[parents[i]])) for i in moved]
        old = [self.tables.owned(rows[i])[::-1] for i in moved]
        self.allocator.share(
            _joined([entries[entries != NOTHING] for entries, _ in new])
        )  # before any release
        freed = self.allocator.release(_joined(old))
        for i, (entries, length) in zip(moved, new, strict=True):
            self.tables.put(rows[i], entries, length)
        self._tell("reorder", started, ids, {"freed": freed}, free=self.num_free)
        return freed

    # Shrinking

    def truncate(self, seq_id: SeqId, length: int) -> np.ndarray:
        """Forget the tokens from position `length` on.

        Returns: int32 ids of the blocks that became free.
        Raises: ValueError for more than the sequence holds, or an end in a block that was left behind.
        """
        started = self._clock()
        ids, (row,) = self._rows([seq_id])
        length, held = whole_number("length", length), self.length(seq_id)
        if length > held:
            raise ValueError(f"sequence {seq_id!r} has {held} tokens, cannot truncate it to {length}")
        keep = -(-length // self.block_size)
        entries = self.tables.entries(row)
        if length % self.block_size and entries[keep - 1] == NOTHING:
            raise ValueError(
                f"position {length - 1} of sequence {seq_id!r} was left behind by release_before"
            )
        cut = entries[keep:]
        freed = self.allocator.release(cut[cut != NOTHING][::-1])
        if length < held:
            self.tables.put(row, entries[:keep], length)
        self._tell("truncate", started, ids, {"freed": freed}, tokens=held - length, free=self.num_free)
        return freed

    def release_before(self, seq_id: SeqId, position: int) -> np.ndarray:
        """Give up the whole blocks below a position, for attention with a sliding window.

        Positions keep their numbers; the table entries become −1.

        Returns: int32 ids of the blocks that became free.
        Raises: ValueError for a position beyond the length.
        """
        started = self._clock()
        ids, (row,) = self._rows([seq_id])
        position = whole_number("position", position)
        if position > self.length(seq_id):
            raise ValueError(f"sequence {seq_id!r} has {self.length(seq_id)} tokens, none at {position}")
        entries = self.tables.entries(row)[: position // self.block_size]
        left = entries[entries != NOTHING]
        freed = self.allocator.release(left[::-1])
        if left.size:
            self.tables.drop(row, len(entries))
        self._tell("release_before", started, ids, {"freed": freed}, free=self.num_free)
        return freed

    def free(self, seq_ids: SeqId | Iterable[SeqId]) -> np.ndarray:
        """Forget sequences; their blocks are released last one first.

        Returns: int32 ids of the blocks that became free.
        Raises: KeyError for a sequence that is not registered; nothing is changed.
        """
        started = self._clock()
        ids, rows = self._rows(seq_ids, once=True)
        freed = self.allocator.release(_joined([self.tables.owned(row)[::-1] for row in rows]))
        for seq_id in ids:
            self.tables.remove(seq_id)
        self._tell("free", started, ids, {"freed": freed}, free=self.num_free)
        return freed

    # Moving

    def snapshot(self, seq_ids: Iterable[SeqId] | None = None) -> Snapshot:
        """Tables and lengths of sequences (all if None) as plain arrays."""
        ids, rows = self._rows(self.seq_ids if seq_ids is None else seq_ids, once=True)
        return Snapshot(self.block_size, ids, *self.tables.csr(rows), self.tables.length(rows))

    def restore(self, snapshot: Snapshot) -> np.ndarray:
        """Build the sequences of a snapshot in this pool; blocks that they shared are shared again.

        A swap to another pool: pairs = host.restore(device.snapshot(ids)); copy the pairs; device.free(ids).

        Returns: int32 [m, 2], block in the snapshot and block here.
        Raises: PoolExhausted, or ValueError for ids in use and arrays that do not fit; nothing is changed.
        Source: section 4.5, swapping.
        """
        started = self._clock()
        indptr, indices, lengths = self._checked_arrays(snapshot)
        ids = self._new_ids(snapshot.seq_ids)
        kept = indices != NOTHING
        old, first, which, times = np.unique(
            indices[kept], return_index=True, return_inverse=True, return_counts=True
        )
        if len(old) > self.num_free:
            self._refuse(started, len(old), self.num_free, ids)
        order = np.argsort(first)  # blocks are taken in the order of their first appearance
        new = np.empty(len(old), np.int64)
        new[order] = self.allocator.allocate(len(old))
        self.allocator.share(np.repeat(new, times - 1))
        indices[kept] = new[which]
        for seq_id, start, stop, length in zip(ids, indptr, indptr[1:], lengths, strict=False):
            self.tables.put(self.tables.add(seq_id), indices[start:stop], length)
        self._tell("restore", started, ids, {"new": new[order]}, free=self.num_free)
        return np.column_stack([old[order], new[order]]).astype(np.int32)

    # The plan, and what callers may say

    def _plan_growth(self, seq_ids: SeqId | Iterable[SeqId], num_tokens: int | Sequence[int]) -> _Growth:
        ids, rows = self._rows(seq_ids, once=True)
        tokens = whole_numbers("num_tokens", num_tokens)
        if tokens.shape not in ((), (len(ids),)) or ((tokens < 0) | (tokens >= MAX_SLOTS)).any():
            raise ValueError(
                f"num_tokens must be one number or {len(ids)}, each of 0 … 2**31 − 1, got {num_tokens!r}"
            )
        tokens = np.broadcast_to(tokens, len(ids))
        after = self.tables.length(rows) + tokens
        limit = self.tables.max_length
        if limit is not None and (after > limit).any():
            i = int(np.argmax(after > limit))
            raise ValueError(f"sequence {ids[i]!r} would hold {after[i]} tokens, max_length is {limit}")
        blocks = -(-after // self.block_size) - self.tables.num_entries(rows)
        return _Growth(ids, rows, tokens, self._must_copy(rows, tokens), blocks)

    def _must_copy(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Which rows write to a last block that others still own when their turn comes: bool [batch]."""
        copies = np.zeros(len(rows), bool)
        writers = np.flatnonzero((tokens > 0) & (self.tables.length(rows) % self.block_size > 0))
        tails = self.tables.last(rows[writers])
        owners = self.allocator.ref_counts[tails]
        moved_away: dict[int, int] = {}
        for i in np.flatnonzero(owners > 1).tolist():
            gone = moved_away.get(int(tails[i]), 0)
            copies[writers[i]] = owners[i] - gone > 1
            moved_away[int(tails[i])] = gone + 1
        return copies

    def _copy_tails(self, plan: _Growth, start: np.ndarray, destinations: np.ndarray) -> np.ndarray:
        rows = plan.rows[plan.copies]
        sources = self.tables.last(rows)
        self.tables.replace(rows, self.tables.num_entries(rows) - 1, destinations)
        self.allocator.release(sources)
        return np.column_stack([sources, destinations, start[plan.copies] % self.block_size]).astype(np.int32)

    def _rows(self, seq_ids: SeqId | Iterable[SeqId], *, once: bool = False) -> tuple[tuple, np.ndarray]:
        """The ids as a tuple, and their rows. With `once`, a repeated id is a ValueError."""
        ids = as_ids(seq_ids)
        rows = self.tables.rows(ids)
        if once and len(set(ids)) < len(ids):
            raise ValueError(f"sequence {next(s for s in ids if ids.count(s) > 1)!r} is named twice")
        return ids, rows

    def _new_ids(self, wanted: Iterable[SeqId | None]) -> list[SeqId]:
        """Ids to register: each unused, of the right type, and different; None becomes the next unused int."""
        ids: list[SeqId] = []
        next_id = self._next_id
        for seq_id in wanted:
            if seq_id is None:
                while next_id in self.tables or next_id in ids:
                    next_id += 1
                seq_id = next_id
                next_id += 1
            if isinstance(seq_id, np.integer):
                seq_id = int(seq_id)
            if not isinstance(seq_id, SeqId) or isinstance(seq_id, bool):
                raise ValueError(f"a sequence id must be an int or a str, got {seq_id!r}")
            if seq_id in self.tables or seq_id in ids:
                raise ValueError(f"sequence {seq_id!r} exists already")
            ids.append(seq_id)
        self._next_id = next_id
        return ids

    def _checked_arrays(self, snapshot: Snapshot) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """indptr, indices and lengths of a snapshot as new int64 arrays, or ValueError."""
        if snapshot.block_size != self.block_size:
            raise ValueError(
                f"the snapshot has blocks of {snapshot.block_size!r}, this pool {self.block_size}"
            )
        indptr = whole_numbers("indptr", snapshot.indptr)
        indices = whole_numbers("indices", snapshot.indices)
        lengths = whole_numbers("lengths", snapshot.lengths)
        batch = len(snapshot.seq_ids)
        if indptr.shape != (batch + 1,) or lengths.shape != (batch,):
            raise ValueError(f"{batch} sequences need {batch + 1} numbers in indptr and {batch} lengths")
        if indices.ndim != 1:
            raise ValueError(f"indices must be one row of block ids, got the shape {indices.shape}")
        if indptr[0] != 0 or indptr[-1] != len(indices) or (np.diff(indptr) < 0).any():
            raise ValueError(f"indptr must rise from 0 to {len(indices)}, got {indptr.tolist()}")
        for seq_id, start, stop, length in zip(snapshot.seq_ids, indptr, indptr[1:], lengths, strict=False):
            table = indices[start:stop]
            if length < 0 or stop - start != -(-length // self.block_size):
                raise ValueError(f"sequence {seq_id!r} has {stop - start} pages for {length} tokens")
            if self.tables.max_length is not None and length > self.tables.max_length:
                raise ValueError(
                    f"sequence {seq_id!r} has {length} tokens, max_length is {self.tables.max_length}"
                )
            if not _is_table(table, length // self.block_size):
                raise ValueError(f"sequence {seq_id!r} has an impossible table {table.tolist()}")
        return indptr, indices, lengths


def _joined(arrays: Sequence[ArrayLike]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *arrays]).astype(np.int64)


def _is_table(entries: np.ndarray, full: int) -> bool:
    """No block twice, and blocks left behind only in front and never the unfilled one."""
    left = min(np.count_nonzero(entries == NOTHING), full)
    blocks = entries[left:].tolist()
    return (
        (entries[:left] == NOTHING).all() and min(blocks, default=0) >= 0 and len(set(blocks)) == len(blocks)
    )
