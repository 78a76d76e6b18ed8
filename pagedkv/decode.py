"""The batched kernel: planned once per step, run once per layer."""

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import ArrayLike

from .allocator import whole_number
from .attention import check_batch, check_block, check_counts, check_rows, check_shapes, checked_options
from .block_table import NOTHING, ragged
from .manager import Reservation
from .storage import KVStorage, as_floats
from .tiles import FEW, PRODUCT, TILE, VECTOR, Laid, Piece, Run, Segments, Shape, Task, Workspace

CHUNK = 1 << 19  # numbers that one call gathers: 2 MB in float32, so that they stay in a cache
SHORT = (
    1 << 17
)  # numbers up to which a sequence is gathered with others; longer ones pay for calls of their own
UNIT = 64  # keys: short sequences are read up to a multiple, so that many have equally many
TOGETHER = 1 << 17  # numbers of short sequences that one call gathers, about
MOST_ASKED = 32  # queries of a short sequence
SCORES = 1 << 17  # of a task, per query head; more queries are cut into several tasks
MOST_QUERIES, LEAST_QUERIES = (
    128,
    16,
)  # of a sequence in one task: more would see too little of what is gathered
LEAST_SHARED = 1 << 15  # numbers of a shared prefix that is gathered once; a shorter one is no gain
HIDDEN = np.iinfo(np.int64).max  # the position of what is no key
PER_THREAD = 6 << 20  # bytes of keys and values that are worth a thread
MOST_THREADS = 64


class StalePlan(Exception):
    """A sequence changed after the plan or reservation for it was made; make a new one."""


class AttentionPlan:
    """Everything about one step that all layers share: which blocks are gathered together, and for whom.

    Queries are each sequence's last positions, so decode (one query), a prefill chunk and a check of drafts
    may stand in one batch. The batch is cut into tasks: a sequence by itself, several short ones, or all that
    begin with the same blocks, which are then read once. Unless it shares a prefix, a sequence's result does not
    depend on its batch, to the last bit.

    Args: block_tables: whole numbers [batch, max_blocks]; lengths: tokens [batch]; block_size; num_queries: per
        sequence, or one for all; window: keys that a query sees, its own included; share: whether to read shared
        prefixes once; threads: to compute in, at most; if None, as many as pay and there are processors; seq_ids,
        versions: whose plan this is, for `PagedKVCache` to notice that it is stale; known_below: tables and lengths
        are arrays and right, and every block is below this: nothing is checked.
    Raises: ValueError for lengths and blocks that do not fit; ImportError for several threads without threadpoolctl.
    Source: section 4.1; planning once per step: Ye et al. 2025, "FlashInfer".
    """

    def __init__(
        self,
        block_tables: ArrayLike,
        lengths: ArrayLike,
        block_size: int,
        num_queries: int | Sequence[int] = 1,
        *,
        window: int | None = None,
        share: bool = True,
        threads: int | None = None,
        seq_ids: tuple = (),
        versions: np.ndarray | None = None,
        known_below: int | None = None,
    ):
        if known_below is None:
            tables, lengths, counts = check_batch(block_tables, lengths, num_queries, block_size)
        else:
            tables, counts = block_tables.astype(np.int64), check_counts(num_queries, len(lengths))
        if window is not None:
            whole_number("window", window, minimum=1)
        self.threads = threads if threads is None else checked_threads(threads)
        self.num_queries, self.window = counts, window
        self.block_size = block_size
        self.seq_ids, self.versions = seq_ids, versions
        self.total_queries = int(counts.sum())
        self.share = share
        self._batch = _Batch(tables, lengths, counts, block_size, window)
        self._highest = self._batch.check_blocks()[0] if known_below is None else known_below - 1
        self._steps_left: int | None = None  # for `next`, until all views must be made anew
        self._tasks: dict[int, list[Task]] = {}  # by the numbers in a key, all heads together
        self._split: dict[tuple, tuple[list[list[Task]], int]] = {}  # by the kind of pages
        self._laid: dict[tuple, list[Laid]] = {}  # by workspace, shape and lane
        self._ready: dict[tuple, tuple] = {}  # what `run` was given, and what it makes of that

    def run(
        self,
        layer: int,
        query: np.ndarray,
        storage: KVStorage,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        return_lse: bool = False,
    ):
        """Attention of every query over its sequence's slots of one layer.

        Args: query: float [total_queries, num_q_heads, head_dim], sequence after sequence; storage: the pages;
            scale, soft_cap: as in dense_attention.
        Returns: float32 [total_queries, num_q_heads, head_dim]; with return_lse also the log-sum-exp float64
            [total_queries, num_q_heads].
        Raises: ValueError for shapes and options that do not fit, and for pages that the plan was not made for.
        """
        if type(query) is not np.ndarray or query.dtype != np.float32:
            query = as_floats("query", query).astype(np.float32, copy=False)
        scale, soft_cap, kind, lanes, large = self._prepared(query, storage, scale, soft_cap)
        if self._highest >= storage.num_blocks:
            check_block(*self._batch.now().check_blocks(), storage.num_blocks)
        keys, values = storage.stored("keys", layer), storage.stored("values", layer)
        out = np.zeros(query.shape, np.float32)  # [total_queries, heads, head_dim]
        lse = np.full(query.shape[:2], -np.inf) if return_lse else None  # [total_queries, heads]

        def compute(lane: int, workspace: Workspace) -> None:
            laid = self._laid.get((workspace, kind, lane))
            if laid is None:  # the first layer lays out the views for all others
                laid = [Laid(task, kind[0], storage, workspace) for task in lanes[lane]]
                self._laid[workspace, kind, lane] = laid
            for task in laid:
                task.run(query, scale, keys, values, soft_cap, out, lse)

        in_threads(len(lanes), compute, large)
        return (out, lse) if return_lse else out

    def _prepared(self, query: np.ndarray, storage: KVStorage, scale, soft_cap) -> tuple:
        """What is the same for all layers: scale, soft cap, kind of pages, lanes, whether products are large.

        Raises: ValueError for what does not fit.
        """
        given = (storage, query.shape, scale, type(scale), soft_cap, type(soft_cap))
        try:
            return self._ready[given]
        except (KeyError, TypeError):  # TypeError: an option that cannot even be hashed
            pass
        page = (storage.block_size, storage.num_kv_heads, storage.head_dim)
        check_shapes(query, page, page)
        check_rows(query, self.num_queries)
        scale, soft_cap = checked_options(query, scale, self.window, soft_cap)
        if storage.block_size != self.block_size:
            raise ValueError(f"planned for blocks of {self.block_size}, the storage has {storage.block_size}")
        if storage.format.factor != 1:
            scale *= np.float32(storage.format.factor**0.5)
        shape = Shape(*page[:2], query.shape[1] // page[1], page[2])
        lanes, largest = self._lanes(storage)
        large = 2 * largest * shape.group * shape.head_dim > PRODUCT
        if len(lanes) > 1 and self.num_queries.min() * shape.group <= FEW:
            large |= max(TILE, self.block_size) * shape.head_dim >= VECTOR
        self._ready[given] = scale, soft_cap, (shape, storage.dtype), lanes, large
        return self._ready[given]

    def next(self, step: Reservation) -> "AttentionPlan | None":
        """The plan of the next step of decoding, if that is cut as this one was; else None.

        Short sequences are read up to a full unit, and most steps stay within: then all views are taken over, and
        a few numbers change. This plan, which is stale by then, has to lay out its own again if it is used.

        Args: step: one more token for each sequence that this was made for, and nothing else has changed.
        """
        grown = [task.blocks for tasks in self._tasks.values() for task in tasks]
        left = self._steps_left
        if left is None:
            simple = self.window is None and all(grown) and not np.count_nonzero(self.num_queries != 1)
            left = min(blocks.room_for(step.start) for blocks in grown) if simple and grown else 0
        if left == 0:
            return None
        batch, plan = _copy(self._batch), _copy(self)
        batch.steps = *self._batch.steps, step
        plan._batch, plan.versions, plan._steps_left = batch, step.versions, left - 1
        self._tasks, self._split, self._laid, self._ready = {}, {}, {}, {}
        ids = None
        if np.count_nonzero(step.start % self.block_size) < len(step.start):  # some begin a block
            ids = step.places // self.block_size
            plan._highest = max(plan._highest, int(ids.max()))
        for blocks in grown:
            blocks.grow(step.start, ids)
        return plan

    def tasks(self, storage: KVStorage) -> list[Task]:
        """How the batch is cut for pages of this shape."""
        width = storage.num_kv_heads * storage.head_dim
        if width not in self._tasks:
            self._steps_left = None
            tasks = self._batch.now().cut(width, self.share)
            self._tasks[width] = sorted(tasks, key=lambda task: -task.cost)
        return self._tasks[width]

    def _lanes(self, storage: KVStorage) -> tuple[list[list[Task]], int]:
        """The tasks of each thread, longest first, always to the one that has least to do; the largest product."""
        key = storage.num_kv_heads, storage.head_dim, storage.dtype
        if key not in self._split:
            tasks, threads = self.tasks(storage), self.threads
            if threads is None:
                key_bytes = storage.nbytes // (storage.num_layers * storage.num_blocks * storage.block_size)
                threads = sum(task.cost for task in tasks) * key_bytes // PER_THREAD
                threads = min(threads, available_threads()) if threads > 1 else 1
            lanes = [[] for _ in range(max(1, min(threads, len(tasks))))]
            loads = [0] * len(lanes)
            for task in tasks:
                least = loads.index(min(loads))
                lanes[least].append(task)
                loads[least] += task.cost
            self._split[key] = lanes, max((task.product for task in tasks), default=0)
        return self._split[key]


# Cutting a batch into tasks


class _Batch:
    """The sequences of a plan: which of their keys and queries count, and how they are cut into tasks."""

    def __init__(
        self, tables: np.ndarray, lengths: np.ndarray, counts: np.ndarray, block_size: int, window: int | None
    ):
        self.tables, self.lengths, self.block_size = tables, lengths, block_size
        self.window = None if window is None else min(window, int(lengths.max(initial=0)) + 1)
        self.asked = np.minimum(
            counts, lengths
        )  # [batch]  queries that see a key: none before the first does
        self.rows = np.cumsum(counts) - self.asked  # [batch]  where they stand in the query
        self.first = lengths - self.asked  # [batch]  and in their sequence
        self.start = np.zeros_like(lengths)  # [batch]  the first key that one of them sees
        if window is not None:
            self.start = np.maximum(self.first - self.window + 1, 0)
        self.steps: tuple[Reservation, ...] = ()  # one more token each, since

    def now(self) -> "_Batch":
        """The same behind the steps that were taken since."""
        batch = _copy(self)
        if self.steps:
            batch.first = self.steps[-1].start  # [batch]
            batch.lengths, rows = batch.first + 1, np.arange(len(batch.first))
            width = max(self.tables.shape[1], int(batch.first.max()) // self.block_size + 1)
            batch.tables = np.full((len(rows), width), NOTHING)
            batch.tables[:, : self.tables.shape[1]] = self.tables
            for step in self.steps:
                batch.tables[rows, step.start // self.block_size] = step.places // self.block_size
            batch.steps = ()
        return batch

    def check_blocks(self) -> tuple[int, int, int]:
        """The highest visible block, its row and position; ValueError where a visible position has none."""
        entries = np.arange(self.tables.shape[1])
        seen = (entries >= self.start[:, None] // self.block_size) & (self.asked[:, None] > 0)
        seen &= entries < -(-self.lengths[:, None] // self.block_size)  # [batch, max_blocks]
        blocks = np.where(seen, self.tables, 0)
        if not seen.any():
            return 0, 0, 0
        lowest, highest = (
            (int(blocks[row, i]), row, max(i * self.block_size, int(self.start[row])))
            for row, i in (divmod(int(at), blocks.shape[1]) for at in (blocks.argmin(), blocks.argmax()))
        )
        check_block(*lowest)
        return highest

    def cut(self, width: int, share: bool) -> list[Task]:
        """Tasks that cover every query that sees a key; width: numbers in a key, which say what is short."""
        self.width = width
        self.short, self.chunk = SHORT // width, max(TILE, CHUNK // width)  # keys
        rest, tasks = np.flatnonzero(self.asked), []
        if share:
            families, rest = self._families(rest)
            tasks += [task for family in families for task in self._together(family)]
        short = self.lengths[rest] - self.start[rest] <= self.short
        short &= self.asked[rest] <= MOST_ASKED
        for row in rest[~short].tolist():
            tasks += self._alone(row)
        for queries in sorted(set(self.asked[rest[short]].tolist())):
            tasks += self._side_by_side(rest[short & (self.asked[rest] == queries)])
        return tasks

    def _alone(self, row: int) -> list[Task]:
        """One sequence, some of its queries at a time."""
        length, first = int(self.lengths[row]), int(self.first[row])
        tasks, step = [], max(LEAST_QUERIES, min(MOST_QUERIES, SCORES // length))
        for begin in range(first, length, step):
            end = min(begin + step, length)  # of the queries, and of the keys that the last one sees
            start = 0 if self.window is None else max(begin - self.window + 1, 0)
            pieces = self._pieces(row, start, end, slice(0, 1), 0)
            hidden = None
            if end - begin > 1:
                hidden = self._hidden(np.arange(start, end)[None], np.arange(begin, end)[None])
            at = int(self.rows[row]) + begin - first
            tasks.append(Task(slice(at, at + end - begin), 1, end - begin, end - start, pieces, hidden))
        return tasks

    def _pieces(self, row: int, start: int, end: int, members: slice, column: int) -> tuple[Piece, ...]:
        """The keys at positions start … end − 1 of one sequence, in chunks."""
        size, pieces = self.block_size, []
        chunk = max(1, self.chunk // size)
        for block in range(start // size, -(-end // size), chunk):
            begin, stop = max(start, block * size), min(end, (block + chunk) * size)
            blocks = self.tables[row, block : -(-stop // size)]
            run = Run(members, begin - block * size, stop - begin, column + begin - start)
            pieces.append(Piece(blocks, (run,)))
        return tuple(pieces)

    def _side_by_side(self, rows: np.ndarray) -> list[Task]:
        """Short sequences, read together: what is computed for one depends on its own length only."""
        size, n = self.block_size, int(self.asked[rows[0]])
        unit = max(1, UNIT // size)  # blocks
        begin = self.start[rows] // size
        counts = -(-(-(-self.lengths[rows] // size) - begin) // unit) * unit  # blocks of each
        order = counts.argsort(kind="stable")  # so that those with equally many stand side by side
        rows, begin, counts = rows[order], begin[order], counts[order]
        ends = np.cumsum(counts) * size
        task_of = ends // min(SCORES // n, 4 * self.chunk)
        if task_of[-1] > task_of[0]:
            return [task for i in np.unique(task_of) for task in self._side_by_side(rows[task_of == i])]
        first = ends - counts * size  # [sequences]  columns
        place, entries = ragged(begin, counts)
        blocks = _Blocks(rows[place], entries, self)
        blocks.belong_to(rows, first - begin * size, np.minimum((begin + counts) * size, self.short))
        piece_of = first // max(1, TOGETHER // self.width)
        new_piece, new_run = np.ones((2, len(rows)), bool)
        new_piece[1:] = piece_of[1:] != piece_of[:-1]
        new_run[1:] = new_piece[1:] | (counts[1:] != counts[:-1])
        edges = [*new_run.nonzero()[0].tolist(), len(rows)]
        pieces, runs = [], []
        for i, end in itertools.pairwise(edges):
            if new_piece[i]:
                start, runs = int(first[i]), []
            column = int(first[i])
            runs.append(Run(slice(i, end), column - start, int(counts[i]) * size, column, True))
            if end == len(rows) or new_piece[end]:
                slots = slice(start, int(ends[end - 1]))
                ids = blocks.ids[slots.start // size : slots.stop // size]
                pieces.append(Piece(ids, tuple(runs), blocks.missing[slots]))
        of = np.repeat(np.arange(len(rows)), counts // unit)
        segments = Segments(first, unit * size, of)
        width, hidden = int(ends[-1]), blocks.hidden
        return [Task(self._query_rows(rows), len(rows), n, width, tuple(pieces), hidden, segments, blocks)]

    def _query_rows(self, rows: np.ndarray) -> slice | np.ndarray:
        return _as_slice((self.rows[rows, None] + np.arange(self.asked[rows[0]])).ravel())

    def _hidden(self, keys: np.ndarray, queries: np.ndarray) -> np.ndarray | None:
        """What queries may not see: bool [members, 1, queries, last columns] for positions [members, …]."""
        keys, queries = keys[:, None, None], queries[:, None, :, None]
        hidden = keys > queries
        if self.window is not None:
            hidden |= keys <= queries - self.window
        columns = hidden.any(axis=(0, 1, 2))
        return hidden[..., int(columns.argmax()) :] if columns.any() else None

    def _families(self, rows: np.ndarray) -> tuple[list["_Family"], np.ndarray]:
        """Sequences that begin with the same full blocks, and the others.

        Walks down the tree of block ids: all `members` of a node agree up to `depth`, and read together what
        they share from `start` on, once that is long enough.
        """
        whole = np.where(
            self.start > 0, 0, self.lengths // self.block_size
        )  # [batch]  blocks that could be shared
        begins = self.tables[rows[whole[rows] > 0], :1].ravel().tolist()
        if len(set(begins)) == len(begins):
            return [], rows
        families, alone = [], []
        nodes = [(rows[self.asked[rows] == n], 0, 0, None) for n in np.unique(self.asked[rows])]
        while nodes:
            members, start, depth, family = nodes.pop()
            tables = self.tables[members, : whole[members].min()]
            same = np.append((tables[:, depth:] == tables[0, depth:]).all(axis=0), False)
            depth += int(same.argmin())
            numbers = (depth - start) * self.block_size * self.width
            if len(members) > 1 and numbers >= LEAST_SHARED:
                if family is None:
                    family = _Family()
                    families.append(family)
                family.shared.append((len(family.rows), len(family.rows) + len(members), start, depth))
                start = depth
            more = whole[members] > depth
            blocks = np.where(more, self.tables[members, min(depth, self.tables.shape[1] - 1)], HIDDEN)
            order = blocks.argsort(kind="stable")
            for part in np.split(order, np.flatnonzero(np.diff(blocks[order])) + 1):
                if len(part) > 1 and more[part[0]]:
                    nodes.append((members[part], start, depth, family))
                elif family is None:
                    alone += members[part].tolist()
                else:
                    family.rows += members[part].tolist()
                    family.own += [start] * len(part)
        return families, np.array(sorted(alone), np.intp)

    def _together(self, family: "_Family") -> list[Task]:
        """A family's members, as many at a time as have room for their scores."""
        rows, own = np.array(family.rows), np.array(family.own)
        column = self.block_size * max(end for *_, end in family.shared)  # behind all shared keys
        width = column + int((self.lengths[rows] - own * self.block_size).max())
        most = max(1, SCORES // (width * int(self.asked[rows[0]])))
        tasks = []
        for i in range(0, len(rows), most):
            shared = [
                (max(first - i, 0), min(last - i, most), start, end)
                for first, last, start, end in family.shared
                if first < i + most and last > i
            ]
            tasks.append(self._sharing(rows[i : i + most], own[i : i + most], shared, column))
        return tasks

    def _sharing(self, rows: np.ndarray, own: np.ndarray, shared: list, column: int) -> Task:
        """Shared blocks, read once for all members that have them, and behind `column` what is each one's own."""
        size, members, n = self.block_size, len(rows), int(self.asked[rows[0]])
        tails = self.lengths[rows] - own * size
        blocks = -(-int(tails.max()) // size)
        positions = np.full((members, column + blocks * size), HIDDEN)
        pieces = []
        for first, last, start, end in shared:
            begin, stop = start * size, end * size
            pieces += self._pieces(rows[first], begin, stop, slice(first, last), begin)
            positions[first:last, begin:stop] = np.arange(begin, stop)
        if blocks * size <= self.short:
            many = max(1, self.chunk // max(1, blocks * size))
            for i in range(0, members if blocks else 0, many):
                part = slice(i, min(i + many, members))
                entries = own[part, None] + np.arange(blocks)  # [members, blocks]
                tails = _Blocks(np.repeat(rows[part], blocks), entries.ravel(), self)
                run = Run(part, 0, blocks * size, column, True)
                pieces.append(Piece(tails.ids, (run,), tails.missing))
                seen = np.where(tails.missing, HIDDEN, tails.positions.ravel())
                positions[part, column:] = seen.reshape(len(entries), -1)
        else:
            for i, (row, begin) in enumerate(zip(rows.tolist(), (own * size).tolist(), strict=True)):
                stop = int(self.lengths[row])
                pieces += self._pieces(row, begin, stop, slice(i, i + 1), column)
                positions[i, column : column + stop - begin] = np.arange(begin, stop)
        hidden = self._hidden(positions, self.first[rows, None] + np.arange(n))
        return Task(self._query_rows(rows), members, n, positions.shape[1], tuple(pieces), hidden)


class _Blocks:
    """Blocks that are read together: what of them changes from step to step.

    Args: of: the row of the batch that each belongs to, row after row [blocks]; entries: which of its blocks it is,
        counted from 0, and its last one again where it has no more [blocks]; batch.
    """

    def __init__(self, of: np.ndarray, entries: np.ndarray, batch: "_Batch"):
        size, lengths = batch.block_size, batch.lengths
        self.ids = batch.tables[of, np.minimum(entries, ((lengths - 1) // size)[of])].astype(np.intp)
        self.positions = entries[:, None] * size + np.arange(size)  # [blocks, block_size]
        missing = self.positions >= lengths[of, None]
        if batch.window is not None:
            missing |= self.positions < batch.start[of, None]
        self.missing = missing.reshape(-1)  # [slots]  keys that nobody may see
        self.hidden = self.missing[None, None, None]  # [1, 1, queries, slots]
        queries = int(batch.asked[of[0]])
        if queries > 1:
            asked = batch.first[of] + np.arange(queries)[:, None]  # [queries, blocks]
            hidden = self.positions > asked[..., None]
            if batch.window is not None:
                hidden |= self.positions <= asked[..., None] - batch.window
            self.hidden = hidden.reshape(1, 1, queries, -1)

    def belong_to(self, rows: np.ndarray, offset: np.ndarray, room: np.ndarray) -> None:
        """Tell rows of the batch, where their position 0 would be among the slots, and the first that has no slot."""
        self.rows, self.offset, self.room = rows, offset, room

    def room_for(self, positions: np.ndarray) -> int:
        """How many steps, the next tokens of which have these positions [batch], read no more blocks than now."""
        return int((self.room - positions[self.rows]).min())

    def grow(self, positions: np.ndarray, blocks: np.ndarray | None) -> None:
        """Read one more token of each row; positions and, where some are new, blocks of the batch."""
        slots = self.offset + positions[self.rows]
        self.missing[slots] = False
        if blocks is not None:
            self.ids[slots // self.positions.shape[1]] = blocks[self.rows]


def _as_slice(indices: np.ndarray) -> slice | np.ndarray:
    """The same, but as a slice where they are consecutive: NumPy is faster with those."""
    first, end = int(indices[0]), int(indices[0]) + len(indices)
    return slice(first, end) if (indices == np.arange(first, end)).all() else indices


def _copy(made):
    """As copy.copy, which takes ten times longer to find out how."""
    twin = object.__new__(type(made))
    twin.__dict__.update(made.__dict__)
    return twin


class _Family:
    """Sequences that begin alike: rows in the order of a task, the first block each has for itself, shared runs."""

    def __init__(self):
        self.rows: list[int] = []
        self.own: list[int] = []
        self.shared: list[tuple[int, int, int, int]] = []  # first member, one behind the last; first block, …


# Threads

_idle: list[Workspace] = []  # the last one used on top: its memory is the likeliest to be in a cache
_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()


def in_threads(lanes: int, compute: Callable[[int, Workspace], None], large: bool = False) -> None:
    """Call compute(lane, workspace) for each lane, all at once; this thread takes the first.

    Where products are so large that BLAS would use threads of its own accord, which changes last bits, it is held
    to one in each; setting that takes as long as a small task.
    """
    workspaces = [_borrowed() for _ in range(lanes)]
    try:
        if lanes == 1 and not large:
            return compute(0, workspaces[0])
        with one_blas_thread if large else contextlib.nullcontext():
            others = [_threads().submit(compute, i, workspaces[i]) for i in range(1, lanes)]
            try:
                compute(0, workspaces[0])
            finally:
                wait(others)
            for other in others:
                other.result()
    finally:
        _idle.extend(reversed(workspaces))


def checked_threads(threads: int) -> int:
    """The number, or ValueError; ImportError where several would each start as many threads of BLAS."""
    if whole_number("threads", threads, minimum=1) > 1 and one_blas_thread.controller() is None:
        raise ImportError('several threads need threadpoolctl: pip install "pagedkv[bench]"')
    return threads


def available_threads() -> int:
    """Threads that can work at once: the processors we may use, or one without threadpoolctl."""
    if one_blas_thread.controller() is None:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _borrowed() -> Workspace:
    try:
        return _idle.pop()
    except IndexError:
        return Workspace()


def _threads() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(MOST_THREADS, "pagedkv")  # each starts when it is first needed
        return _pool


def _forget_threads() -> None:
    global _pool
    _pool = None
    one_blas_thread.__init__()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)  # a forked process has none of the threads


class _OneBlasThread:
    """While somebody is inside, NumPy's BLAS computes in the thread that calls it.

    The setting is the whole process's, so the last to leave puts it back; and threadpoolctl lets only the thread
    change it that did so first, so that is always the same one.
    """

    def __init__(self):
        self._inside, self._limit, self._found = 0, None, None
        self._lock, self._keeper = threading.Lock(), ThreadPoolExecutor(1, "pagedkv-blas")

    def controller(self):
        """threadpoolctl's, or None where that is not installed; looked for once."""
        with self._lock:
            if self._found is None:
                try:
                    from threadpoolctl import ThreadpoolController
                except ImportError:
                    self._found = (None,)
                else:
                    self._found = (ThreadpoolController().select(user_api="blas"),)
            return self._found[0]

    def __enter__(self) -> None:
        controller = self.controller()
        with self._lock:
            self._inside += 1
            if self._inside == 1 and controller is not None:
                self._limit = self._keeper.submit(lambda: controller.limit(limits=1).__enter__()).result()

    def __exit__(self, *error) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._limit is not None:
                self._keeper.submit(self._limit.__exit__, None, None, None).result()
                self._limit = None


one_blas_thread = _OneBlasThread()
