"""The arithmetic of one task of the fast kernel: gather keys, all scores, one softmax, gather values.

Two passes instead of an online softmax: keys and values are still read once each, and nothing is rescaled.
Pages are copied in chunks into memory that stays in the processor's cache; there, one call of matmul
multiplies many small tiles. Keys and values are never repeated for grouped queries.
"""

import math
from typing import NamedTuple

import numpy as np

from .storage import KVStorage, aligned_zeros

TILE = 128  # keys of one product, or a multiple of it that fits into
PRODUCT = 1 << 18  # multiplications: OpenBLAS has a fast path for small products and no threads for them
VECTOR = 9216  # and for matrices below that size times a vector
FEW = 2  # rows that are multiplied one by one
ROWS = 4  # OpenBLAS is fast at multiples of so many rows, so queries are padded: 7 rows take longer than 8
NOBODY = np.zeros(0, np.intp)
LOWEST, TINY, MINUS_INFINITY = np.finfo(np.float32).min, np.finfo(np.float32).tiny, np.float32(-np.inf)


class Run(NamedTuple):
    """Keys of a piece that are multiplied at once: all for the same members, or as many for each of them."""

    members: slice  # of the task
    slot: int  # of the piece, where the first key is
    tokens: int  # for all members, or for each
    column: int  # of the scores, where they begin
    each: bool = False

    @property
    def count(self) -> int:
        """How often there are so many keys."""
        return self.members.stop - self.members.start if self.each else 1


class Piece(NamedTuple):
    """Keys that one call gathers."""

    blocks: np.ndarray  # intp [blocks]; a later step may refill it
    runs: tuple[Run, ...]
    holes: np.ndarray | None = None  # bool [slots]: which hold no key that may be seen, likewise


class Segments(NamedTuple):
    """Members whose scores stand behind one another, each in columns of its own: a multiple of `unit`."""

    first: np.ndarray  # intp [members]  the first column of each
    unit: int  # columns
    of: np.ndarray  # intp [width / unit]  the member that some columns belong to


class Task(NamedTuple):
    """Queries whose scores stand together, for one softmax: one sequence, several short ones, or a shared prefix."""

    rows: slice | np.ndarray  # of the query, member after member
    members: int
    queries: int  # of each member
    width: int  # columns of scores
    pieces: tuple[Piece, ...]
    hidden: np.ndarray | None = None  # bool [members, 1, queries, the last columns]: what a query may not see
    segments: Segments | None = (
        None  # where members have columns of their own; hidden has one for all of them, then
    )
    blocks: object = None  # whoever can refill such a task for a later step

    @property
    def cost(self) -> int:
        """About how long it takes, in gathered keys."""
        gathered = sum(run.count * run.tokens for piece in self.pieces for run in piece.runs)
        scored = self.queries * self.width * (1 if self.segments else self.members)
        return gathered + scored // 16

    @property
    def product(self) -> int:
        """Rows times keys of a product that cannot be made smaller, per head of a group."""
        if self.segments:
            return self.queries * self.segments.unit
        runs = [run for piece in self.pieces for run in piece.runs]
        return self.queries * max(
            run.tokens if run.each else TILE * (run.members.stop - run.members.start) for run in runs
        )


class Shape(NamedTuple):
    """Of the vectors: what a plan does not know and a model does."""

    block_size: int
    kv_heads: int
    group: int  # query heads that share a KV head
    head_dim: int


class Workspace:
    """Memory that one thread computes in. It grows to what the largest task needs and serves all plans.

    A task takes 4 bytes times: gathered slots · kv_heads · head_dim (and these once more as they are stored, in a
    narrow type), members · queries · heads · width of scores, and a few vectors for each query.
    """

    def __init__(self):
        self._memory: dict[tuple, np.ndarray] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype=np.float32) -> np.ndarray:
        """An array over the memory of this name, which it shares with all others of the name and type."""
        size, key = math.prod(shape), (name, dtype)
        memory = self._memory.get(key)
        if memory is None or memory.size < size:
            memory = self._memory[key] = aligned_zeros((size,), dtype)
        return memory[:size].reshape(shape)


class Product(NamedTuple):
    """Views of some keys and values of a run, tile by tile, and of what they meet and make.

    Where there are FEW rows, each is an axis of its own, [runs, tiles, kv_heads, rows, 1, …]: a product of a matrix
    and a vector need not be packed for BLAS.
    """

    q: np.ndarray  # [runs, 1, kv_heads, rows, head_dim]
    keys: np.ndarray  # [runs, tiles, kv_heads, head_dim, tokens]
    scores: np.ndarray  # [runs, tiles, kv_heads, rows, tokens]
    values: np.ndarray  # [runs, tiles, kv_heads, tokens, head_dim]
    scales: np.ndarray | None  # [runs, tiles, kv_heads, 1, tokens]
    part: np.ndarray  # [runs, tiles, kv_heads, rows, head_dim]
    out: np.ndarray  # [runs, 1, kv_heads, rows, head_dim]

    def row_by_row(self) -> "Product":
        """The same with rows as an axis of their own."""
        q, scores, part, out = (a[..., None, :] for a in (self.q, self.scores, self.part, self.out))
        scales = None if self.scales is None else self.scales[..., None, :, :]
        return Product(q, self.keys[:, :, :, None], scores, self.values[:, :, :, None], scales, part, out)


class Gather:
    """One piece laid into a workspace."""

    def __init__(self, piece: Piece, task: "Laid", shape: Shape, storage: KVStorage, workspace: Workspace):
        kv, head_dim = shape.kv_heads, shape.head_dim
        self.blocks = piece.blocks.astype(np.intp, copy=False)  # take is faster with indices of its own type
        self.holes, self.format = piece.holes, storage.format
        lead = (len(piece.blocks), shape.block_size, kv)
        self.pages = workspace.array("pages", (*lead, head_dim))
        self.stored, self.scales = self.pages, None
        if self.format.dtype != np.float32:
            self.stored = workspace.array("stored pages", (*lead, head_dim), self.format.dtype)
        if self.format.scales("keys"):
            self.scales = workspace.array("scales", lead)
        last = piece.runs[-1]
        used = slice(piece.runs[0].slot, last.slot + last.count * last.tokens)
        self.narrow = self.stored.reshape(-1, kv, head_dim)[used]
        self.wide = self.pages.reshape(-1, kv, head_dim)[used]
        self.products = [
            product for run in piece.runs for product in self._products(run, task, shape, workspace)
        ]

    def _products(self, run: Run, task: "Laid", shape: Shape, workspace: Workspace) -> list[Product]:
        """One run: tiles of one size if members have their columns to themselves, else full ones and a rest."""
        kv, head_dim, runs = shape.kv_heads, shape.head_dim, run.count
        slots = slice(run.slot, run.slot + runs * run.tokens)
        tokens = self.pages.reshape(-1, kv, head_dim)[slots].reshape(runs, -1, kv, head_dim)
        scales = None
        if self.scales is not None:
            scales = self.scales.reshape(-1, kv)[slots].reshape(runs, -1, kv)  # [runs, tokens, kv_heads]
        q, out = (
            array[:, run.members].reshape(kv, runs, -1, head_dim).transpose(1, 0, 2, 3)[:, None]
            for array in (task.q, task.out)
        )  # [runs, 1, kv_heads, rows, head_dim]
        rows = q.shape[3]
        if task.segments is None:
            columns = slice(run.column, run.column + run.tokens)
            scores = task.scores[:, run.members].reshape(kv, runs, rows, -1)[..., columns]
            tile = TILE * max(1, PRODUCT // (rows * head_dim * TILE))
            whole = 0 if run.each else run.tokens // tile
            cuts = [(0, whole, tile), (whole * tile, 1, run.tokens - whole * tile)]
        else:
            columns = slice(run.column, run.column + runs * run.tokens)
            scores = task.scores[:, 0, :, columns].reshape(kv, rows, runs, -1).swapaxes(1, 2)
            most = (VECTOR - 1) // head_dim if rows <= FEW else PRODUCT // (rows * head_dim)
            tiles = tiles_of(run.tokens, most, task.segments.unit)
            cuts = [(0, tiles, run.tokens // tiles)]
        products = []
        for start, tiles, length in cuts:
            if tiles * length == 0:
                continue
            part = slice(start, start + tiles * length)
            K = tokens[:, part].reshape(runs, tiles, length, kv, head_dim)
            S = scores[..., part].reshape(kv, runs, rows, tiles, length).transpose(1, 3, 0, 2, 4)
            by = None
            if scales is not None:
                by = scales[:, part].reshape(runs, tiles, length, kv).swapaxes(2, 3)[..., None, :]
            found = out
            if tiles > 1 or task.segments is None:
                found = workspace.array("parts", (runs, tiles, kv, rows, head_dim))
            product = Product(q, K.transpose(0, 1, 3, 4, 2), S, K.transpose(0, 1, 3, 2, 4), by, found, out)
            products.append(product.row_by_row() if rows <= FEW else product)
        return products

    def load(self, pages: np.ndarray, scales: np.ndarray | None, *, clear: bool = False) -> None:
        """Copy the blocks of one layer's keys or values here, as float32; `clear` puts zeros into holes."""
        pages.take(self.blocks, 0, self.stored, "clip")  # checked by the plan; "raise" would copy twice
        holes = np.flatnonzero(self.holes) if clear and self.holes is not None else NOBODY
        if len(holes):
            self.narrow[holes] = 0
        if self.narrow is not self.wide and self.stored is not self.pages:
            self.format.widen(self.narrow, self.wide)
        if self.scales is not None:
            scales.take(self.blocks, 0, self.scales, "clip")
            if len(holes):
                self.scales.reshape(-1, self.scales.shape[-1])[holes] = 0


class Laid:
    """A task laid into a workspace: all views are made, what a layer still needs is gathers and products."""

    def __init__(self, task: Task, shape: Shape, storage: KVStorage, workspace: Workspace):
        m, n, kv, group = task.members, task.queries, shape.kv_heads, shape.group
        rows = group * n
        padded = rows if rows <= FEW else -(-rows // ROWS) * ROWS
        self.task, self.format, self.segments = task, storage.format, task.segments

        def room(name: str, last: int) -> np.ndarray:
            """[kv_heads, members, rows, last]: heads apart if members are multiplied together, else side by side."""
            if self.segments is None:
                return workspace.array(name, (kv, m, padded, last))
            return workspace.array(name, (m, kv, padded, last)).swapaxes(0, 1)

        self.q, self.out = room("queries", shape.head_dim), room("outputs", shape.head_dim)
        several = m if self.segments is None else 1
        self.scores = workspace.array("scores", (kv, several, padded, task.width))
        self.asked = self.scores[:, :, :rows]  # [kv_heads, members or 1, group · queries, width]
        self.padding = self.q[:, :, rows:] if rows < padded else None
        self.given, self.answer = (_by_query(array[:, :, :rows], n) for array in (self.q, self.out))
        self.maskable = None
        if task.hidden is not None:
            by_query = self.asked.reshape(kv, several, group, n, -1)
            self.maskable = by_query[..., -task.hidden.shape[-1] :]
        if self.segments is not None:
            self.units = self.asked.reshape(kv, 1, rows, -1, self.segments.unit)
        self.gathers = [Gather(piece, self, shape, storage, workspace) for piece in task.pieces]
        by_scale = storage.format.scales("values") is not None  # they go into the weights: no second time
        self.careful = by_scale or not any(piece.holes is not None for piece in task.pieces)

    def run(
        self,
        query: np.ndarray,
        scale: np.float32,
        keys: tuple[np.ndarray, np.ndarray | None],
        values: tuple[np.ndarray, np.ndarray | None],
        soft_cap: np.float32 | None,
        out: np.ndarray,
        lse: np.ndarray | None,
    ) -> None:
        """Attention of the task's rows of the query into those of out and lse.

        What lies in holes gets the weight 0, which does not help against NaN and infinity, nor does a softmax of
        nothing but −inf without care. Both are rare, and seen in the sum of the answers: then all is done again.
        """
        rows = self.task.rows
        np.multiply(query[rows].reshape(self.given.shape), scale, out=self.given)
        if self.padding is not None:
            self.padding[...] = 0
        with np.errstate(invalid="ignore", over="ignore"):  # of what lies in holes
            total, peak = self._attend(keys, values, soft_cap, self.careful)
            if not self.careful and not math.isfinite(np.add.reduce(self.answer, axis=None)):
                total, peak = self._attend(keys, values, soft_cap, careful=True)
        if lse is not None:
            self._log_sum_exp(total, peak, lse)
        total = _by_query(total, self.task.queries)
        if isinstance(rows, slice):
            np.divide(self.answer, total, out=out[rows].reshape(self.answer.shape))
        else:
            out[rows] = np.divide(self.answer, total).reshape(-1, *out.shape[1:])

    def _attend(self, keys, values, soft_cap, careful: bool) -> tuple[np.ndarray, np.ndarray]:
        """Find the sum of the values by their weights, which is still to be divided; returns what `_softmax` does."""
        scores, factor = self.asked, self.format.factor
        for gather in self.gathers:
            gather.load(*keys)
            for p in gather.products:
                np.matmul(p.q, p.keys, out=p.scores)
                if p.scales is not None:
                    np.multiply(p.scores, p.scales, out=p.scores)
        if factor != 1:  # the query brings the other half: one of them alone could overflow
            scores *= np.float32(factor**0.5)
        if soft_cap is not None:
            scores /= soft_cap
            np.tanh(scores, out=scores)
            scores *= soft_cap
        if self.maskable is not None:  # a select: adding to NaN would keep it
            np.copyto(self.maskable, MINUS_INFINITY, where=self.task.hidden)
        total, peak = self._softmax(scores, careful)
        if factor != 1:
            scores *= np.float32(factor)
        if self.segments is None:
            self.out[...] = 0
        for gather in self.gathers:
            gather.load(*values, clear=careful)
            for p in gather.products:
                if p.scales is not None:
                    np.multiply(p.scores, p.scales, out=p.scores)
                np.matmul(p.scores, p.values, out=p.part)
                if self.segments is None:
                    p.out[...] += np.add.reduce(p.part, axis=1, keepdims=True)
                elif p.part.shape[1] > 1:
                    np.add.reduce(p.part, 1, None, p.out, True)
        return total, peak

    def _softmax(self, scores: np.ndarray, careful: bool) -> tuple[np.ndarray, np.ndarray]:
        """Make weights of the scores, to be divided by the first of what it returns; the second was subtracted.

        Both: [kv_heads, members, group · queries, 1].
        """
        first = None if self.segments is None else self.segments.first
        if first is None:
            peak = np.maximum.reduce(scores, axis=-1, keepdims=True)
        else:
            peak = np.maximum.reduceat(scores, first, axis=-1)
        if careful:
            np.maximum(peak, LOWEST, out=peak)  # −inf − −inf would be NaN
        if first is None:
            scores -= peak
        else:
            self.units -= peak.take(self.segments.of, -1)[..., None]
        np.exp(scores, out=scores)
        if first is None:
            total = np.add.reduce(scores, axis=-1, keepdims=True)
        else:
            total = np.add.reduceat(scores, first, axis=-1)
            peak, total = peak.swapaxes(1, 3), total.swapaxes(1, 3)
        if careful:
            np.maximum(total, TINY, out=total)  # 0 / 0, too; 1 and more stay the same
        return total, peak

    def _log_sum_exp(self, total: np.ndarray, peak: np.ndarray, lse: np.ndarray) -> None:
        found = np.log(total, dtype=np.float64) + peak  # [kv_heads, members, group · queries, 1]
        found[total == TINY] = -np.inf
        lse[self.task.rows] = _by_query(found, self.task.queries).reshape(-1, lse.shape[1])


def _by_query(array: np.ndarray, queries: int) -> np.ndarray:
    """[kv_heads, members, group · queries, n] seen as [members, queries, kv_heads, group, n]."""
    kv, members, rows, n = array.shape
    return array.reshape(kv, members, rows // queries, queries, n).transpose(1, 3, 0, 2, 4)


def tiles_of(tokens: int, most: int, unit: int) -> int:
    """Into how many equal products of at most so many keys a run is cut, or of one unit where none divides it."""
    least = -(-tokens // max(1, most))
    return next((n for n in range(least, 2 * least) if tokens % n == 0), tokens // unit)
