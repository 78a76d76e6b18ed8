"""Which block holds which positions of a sequence."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .allocator import whole_number, whole_numbers

SeqId = int | str
BATCHES = 16  # that are remembered: a decoding batch comes again at every step
NOTHING = -1  # an entry without a block: padding, or a block that a sliding window has left behind


def as_ids(seq_ids: SeqId | Iterable[SeqId]) -> tuple[SeqId, ...]:
    """One sequence id or several, as a tuple."""
    if type(seq_ids) is tuple:
        return seq_ids
    return tuple(seq_ids) if isinstance(seq_ids, Iterable) and not isinstance(seq_ids, str) else (seq_ids,)


def slots_of(table: ArrayLike, positions: ArrayLike, block_size: int) -> np.ndarray:
    """Physical slots of logical positions: block * block_size + offset.

    Args: table: block ids [num_blocks]; positions: whole numbers [n], counted from 0.
    Returns: int32 [n].
    Raises: ValueError for a position that is no whole number or that the table does not reach.
    Source: section 4.3, logical and physical KV blocks.
    """
    table, block_size = whole_numbers("block ids", table), whole_number("block_size", block_size, minimum=1)
    positions = whole_numbers("positions", positions)
    outside = positions[(positions < 0) | (positions >= len(table) * block_size)]
    if outside.size:
        raise ValueError(f"position {outside[0]} is outside a table of {len(table)} blocks of {block_size}")
    blocks = table[positions // block_size]
    if (blocks == NOTHING).any():
        raise ValueError(f"position {positions[blocks == NOTHING][0]} has no block any more")
    return (blocks * block_size + positions % block_size).astype(np.int32)


def ragged(starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers start … start + count − 1 of every row, row after row.

    Args: starts, counts: int [rows].
    Returns: row of each number, and the number itself: two int64 arrays [sum of counts].
    """
    if (counts == 1).all():  # a step of decoding
        return np.arange(len(counts)), starts
    rows = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, starts[rows] + within


class Step(NamedTuple):
    """One more token for each row of a batch, as decoding adds it again and again."""

    rows: np.ndarray  # int64 [batch]
    positions: np.ndarray  # int64 [batch]
    slots: np.ndarray  # int32 [batch]  where a block begins, real ones once that is known
    growing: np.ndarray  # intp [n]  the places in the batch where one begins


class BlockTables:
    """One row of block ids, one length and one version per sequence.

    Entry i of a row holds positions i * block_size … (i + 1) * block_size − 1, in every layer, keys and
    values alike. A row has exactly ceil(length / block_size) entries; behind them stands −1. A version
    is unique over all changes of all sequences, so an equal version means an untouched row.
    """

    def __init__(self, block_size: int, *, max_length: int | None = None):
        self.block_size = whole_number("block_size", block_size, minimum=1)
        self.max_length = None if max_length is None else whole_number("max_length", max_length, minimum=1)
        self._row_of: dict[SeqId, int] = {}
        self._batches: dict[tuple[SeqId, ...], np.ndarray] = {}  # their rows, until sequences come or go
        self._vacant: list[int] = []  # rows without a sequence
        self._entries = np.full(
            (0, 1), NOTHING, np.int32
        )  # [rows, entries]; one more than the longest row needs
        self._lengths = np.zeros(0, np.int64)  # [rows]
        self._versions = np.zeros(0, np.int64)  # [rows]
        self._changes = 0  # of all sequences, so far
        self.has_gaps = False  # whether a block of any row was ever left behind
        self._last_step: Step | None = None  # the last change, if it was one
        self.before_step: np.ndarray | None = None  # `version` of its rows before, if it was asked
        self._last_versions = None, None  # rows that were asked for, and the answer, until something changes

    def __contains__(self, seq_id: SeqId) -> bool:
        return seq_id in self._row_of

    def __iter__(self) -> Iterator[SeqId]:
        return iter(self._row_of)

    def __len__(self) -> int:
        return len(self._row_of)

    # Reading

    def rows(self, seq_ids: Iterable[SeqId], *, once: bool = False) -> np.ndarray:
        """Row numbers of sequences: int64 [batch], read only.

        Raises: KeyError for one that is not registered; with `once`, ValueError for one that is named twice.
        """
        ids = tuple(seq_ids)
        try:
            known = self._batches.get(ids)
        except TypeError:  # an id that cannot even be hashed
            known = None
        return self._look_up(ids, once) if known is None else known

    def _look_up(self, ids: tuple[SeqId, ...], once: bool) -> np.ndarray:
        """The rows one by one; a batch without repeats is remembered."""
        rows = np.array([self._row(seq_id) for seq_id in ids], np.int64)
        rows.flags.writeable = False
        if len(set(ids)) == len(ids):
            if len(self._batches) == BATCHES:
                self._batches.clear()
            self._batches[ids] = rows
        elif once:
            raise ValueError(f"sequence {next(s for s in ids if ids.count(s) > 1)!r} is named twice")
        return rows

    def length(self, rows: np.ndarray) -> np.ndarray:
        """Tokens per row: int64 [batch]."""
        return self._lengths[rows]

    def version(self, rows: np.ndarray) -> np.ndarray:
        """Versions per row: int64 [batch], read only, and the same array until something changes."""
        asked, versions = self._last_versions
        if asked is not rows:
            versions = self._versions[rows]
            versions.flags.writeable = False
            self._last_versions = rows, versions
        return versions

    def num_entries(self, rows: np.ndarray) -> np.ndarray:
        """Table entries per row, ceil(length / block_size): int64 [batch]."""
        return -(-self._lengths[rows] // self.block_size)

    def entries(self, row: int) -> np.ndarray:
        """Block ids of one row, −1 where a block was left behind: int32 [entries]."""
        return self._entries[row, : self.num_entries(row)].copy()

    def some_entries(self, row: int, first: int, count: int) -> np.ndarray:
        """The same for `count` entries from `first` on."""
        return self._entries[row, first : first + count].copy()

    def owned(self, row: int) -> np.ndarray:
        """Block ids that one row really holds: int32, in order of position."""
        entries = self.entries(row)
        return entries[entries != NOTHING]

    def last(self, rows: np.ndarray) -> np.ndarray:
        """The last entry of each row, none of which may be empty: int32 [batch]."""
        return self._entries[rows, self.num_entries(rows) - 1]

    def padded(self, rows: np.ndarray) -> np.ndarray:
        """Tables as one array, padded with −1: int32 [batch, longest]."""
        width = -(-int(self._lengths[rows].max(initial=0)) // self.block_size)
        return self._entries[rows, :width]

    def just_stepped(self, rows: np.ndarray) -> bool:
        """Whether the last change of all was a step of these very rows."""
        return self._last_step is not None and self._last_step.rows is rows

    def next_step(self, rows: np.ndarray) -> Step:
        """What `step` would do for these rows."""
        if self.just_stepped(rows):
            _, positions, slots, _ = self._last_step
            positions, slots = positions + 1, slots + np.int32(1)
        else:
            positions = self._lengths[rows]
            entry, offset = np.divmod(positions, self.block_size)
            slots = (self._entries[rows, entry] * self.block_size + offset).astype(np.int32)
        return Step(rows, positions, slots, (positions % self.block_size == 0).nonzero()[0])

    def csr(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tables end to end: indptr int32 [batch + 1] and indices int32 [sum of entries]."""
        counts = self.num_entries(rows)
        indptr = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        batch_row, entry = ragged(np.zeros(len(rows), np.int64), counts)
        return indptr, self._entries[rows[batch_row], entry]

    def slots(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Slots of positions start … start + count − 1 of each row, row after row: int32 [sum of counts]."""
        place, positions = ragged(starts, counts)
        blocks = self._entries[rows[place], positions // self.block_size]
        return (blocks * self.block_size + positions % self.block_size).astype(np.int32)

    # Changing

    def add(self, seq_id: SeqId) -> int:
        """Register a sequence of length 0; returns its row."""
        row = self._row_for(seq_id)
        self._touch(row)
        return row

    def fork(self, parent: int, seq_ids: Iterable[SeqId]) -> None:
        """Register sequences whose rows are copies of row `parent`."""
        rows = [self._row_for(seq_id) for seq_id in seq_ids]
        held = self.num_entries(parent)
        self._entries[rows, :held] = self._entries[parent, :held]
        self._lengths[rows] = self._lengths[parent]
        self._touch(rows)

    def remove(self, seq_id: SeqId) -> None:
        """Forget a sequence; its row becomes vacant."""
        row = self._row_of.pop(seq_id)
        self._batches.clear()
        self._entries[row] = NOTHING
        self._lengths[row] = 0
        self._vacant.append(row)

    def put(self, row: int, entries: np.ndarray, length: int) -> None:
        """Replace a whole row."""
        self._widen(len(entries) + 1)
        self._entries[row, : len(entries)] = entries
        self.has_gaps = self.has_gaps or bool(np.count_nonzero(entries == NOTHING))
        self._entries[row, len(entries) :] = NOTHING
        self._lengths[row] = length
        self._touch(row)

    def replace(self, rows: np.ndarray, at: np.ndarray, blocks: np.ndarray) -> None:
        """Point entry `at` of each row to another block: all int [n]."""
        self._entries[rows, at] = blocks
        self._touch(rows)

    def append(self, rows: np.ndarray, counts: np.ndarray, tokens: np.ndarray, blocks: np.ndarray) -> None:
        """Grow each row by `counts` entries, taken from `blocks` row after row, and by `tokens` positions."""
        if len(blocks):
            growing = np.flatnonzero(counts)
            first, counts = self.num_entries(rows[growing]), counts[growing]
            self._widen(int((first + counts).max()) + 1)
            place, entry = ragged(first, counts)
            self._entries[rows[growing][place], entry] = blocks
        self._lengths[rows] += tokens
        self._touch(rows[tokens > 0])

    def step(self, step: Step, blocks: np.ndarray) -> None:
        """Grow by what `next_step` returned, nothing having changed since; `blocks`: for those that need one [n]."""
        rows, positions, slots, growing = step
        if len(growing):
            slots[growing] = blocks * self.block_size
            entries = positions[growing] // self.block_size
            self._widen(int(entries.max()) + 2)
            self._entries[rows[growing], entries] = blocks
        positions.flags.writeable = slots.flags.writeable = False  # the next step goes on from them
        self._lengths[rows] = positions + 1
        asked, before = self._last_versions
        self._touch(rows)
        self._last_step, self.before_step = step, before if asked is rows else None

    def drop(self, row: int, entries: int) -> np.ndarray:
        """Empty the first `entries` entries of a row; returns the blocks that stood there."""
        left = self._entries[row, :entries].copy()
        self._entries[row, :entries] = NOTHING
        self.has_gaps = True
        self._touch(row)
        return left[left != NOTHING]

    def _row_for(self, seq_id: SeqId) -> int:
        if not self._vacant:
            self._add_rows()
        row = self._row_of[seq_id] = self._vacant.pop()
        self._batches.clear()
        return row

    def _row(self, seq_id: SeqId) -> int:
        try:
            return self._row_of[seq_id]
        except (KeyError, TypeError):
            raise KeyError(f"no sequence {seq_id!r}: never added, or freed already") from None

    def _touch(self, rows: np.ndarray | list[int] | int) -> None:
        self._changes += 1
        self._last_step, self.before_step, self._last_versions = None, None, (None, None)
        self._versions[rows] = self._version()

    def _version(self) -> int:
        """Of what has just been changed: a number that was never one before."""
        return self._changes

    def _add_rows(self) -> None:
        rows, entries = self._entries.shape
        more = max(rows, 8)
        self._entries = np.concatenate([self._entries, np.full((more, entries), NOTHING, np.int32)])
        self._lengths = np.concatenate([self._lengths, np.zeros(more, np.int64)])
        self._versions = np.concatenate([self._versions, np.zeros(more, np.int64)])
        self._vacant += range(rows, rows + more)[::-1]

    def _widen(self, entries: int) -> None:
        rows, have = self._entries.shape
        if entries > have:
            more = max(have, entries - have)
            self._entries = np.concatenate([self._entries, np.full((rows, more), NOTHING, np.int32)], axis=1)
