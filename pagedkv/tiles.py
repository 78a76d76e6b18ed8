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
LOWEST, TINY = np.finfo(np.float32).min, np.finfo(np.float32).tiny


class Piece(NamedTuple):
    """Keys that one call gathers: one run of positions that all its members read, or one run for each of them."""

    members: slice  # of the task
    blocks: np.ndarray  # intp [runs, blocks]: runs is 1, or the number of members; a later step may refill it
    skip: int  # slots of the first block in front of the first key
    tokens: int  # of each run
    column: int  # of the scores, where the keys begin
    each: bool = False  # one run for each member
    holes: np.ndarray | None = (
        None  # bool [runs · tokens]: which slots hold no key that may be seen, likewise
    )


class Split(NamedTuple):
    """Members that are parts of sequences, side by side: which belong together, for their softmax and their sum."""

    whole: np.ndarray  # intp [members]  the sequence that each belongs to, from 0 on
    first: np.ndarray  # intp [sequences]  the first member of each
    equal: tuple[tuple[slice, slice], ...]  # members and sequences that have equally many parts, side by side
    rows: slice | np.ndarray  # of the query, sequence after sequence


class Task(NamedTuple):
    """Queries whose scores stand together, for one softmax: one sequence, several short ones, or a shared prefix."""

    rows: slice | np.ndarray  # of the query, member after member
    members: int
    queries: int  # of each member
    width: int  # columns of scores
    pieces: tuple[Piece, ...]
    hidden: np.ndarray | None = None  # bool [members, 1, queries, the last columns]: what a query may not see
    split: Split | None = None  # where members are parts of sequences
    parts: object = None  # whoever can refill such a task for a later step

    @property
    def cost(self) -> int:
        """About how long it takes, in gathered keys."""
        gathered = sum(piece.blocks.shape[0] * piece.tokens for piece in self.pieces)
        return gathered + self.members * self.queries * self.width // 16

    @property
    def product(self) -> int:
        """Rows times keys of the largest product, per head of a group."""
        return self.queries * max(
            piece.tokens if piece.each else TILE * (piece.members.stop - piece.members.start)
            for piece in self.pieces
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
    """Views of some keys and values of a piece, tile by tile (or run by run), and of what they meet and make.

    Where there are FEW rows, each is an axis of its own, [tiles or runs, kv_heads, rows, 1, …]: a product of a matrix
    and a vector need not be packed for BLAS.
    """

    q: np.ndarray  # [1 or runs, kv_heads, rows, head_dim]
    keys: np.ndarray  # [tiles or runs, kv_heads, head_dim, tokens]
    scores: np.ndarray  # [tiles or runs, kv_heads, rows, tokens]
    values: np.ndarray  # [tiles or runs, kv_heads, tokens, head_dim]
    scales: np.ndarray | None  # [tiles or runs, kv_heads, 1, tokens]
    part: np.ndarray  # [tiles or runs, kv_heads, rows, head_dim]
    out: np.ndarray  # [1 or runs, kv_heads, rows, head_dim]

    def row_by_row(self) -> "Product":
        """The same with rows as an axis of their own."""
        q, scores, part, out = (a[..., None, :] for a in (self.q, self.scores, self.part, self.out))
        keys, values = self.keys[:, :, None], self.values[:, :, None]
        return Product(
            q, keys, scores, values, None if self.scales is None else self.scales[:, :, None], part, out
        )


class Gather:
    """One piece laid into a workspace."""

    def __init__(self, piece: Piece, task: "Laid", shape: Shape, storage: KVStorage, workspace: Workspace):
        runs, blocks = piece.blocks.shape
        size, kv, head_dim = blocks * shape.block_size, shape.kv_heads, shape.head_dim
        self.blocks, self.holes = piece.blocks.reshape(-1), piece.holes
        self.format = storage.format
        lead = (runs * blocks, shape.block_size, kv)
        self.pages = workspace.array("pages", (*lead, head_dim))
        self.stored, self.scales = self.pages, None
        if self.format.dtype != np.float32:
            self.stored = workspace.array("stored pages", (*lead, head_dim), self.format.dtype)
        if self.format.scales("keys"):
            self.scales = workspace.array("scales", lead)
        flat = slice(piece.skip, piece.skip + runs * piece.tokens)  # several runs are whole blocks
        self.narrow = self.stored.reshape(-1, kv, head_dim)[flat]
        self.wide = self.pages.reshape(-1, kv, head_dim)[flat]

        def by_run(array: np.ndarray) -> np.ndarray:
            return array.reshape(runs, size, *array.shape[2:])[:, piece.skip : piece.skip + piece.tokens]

        tokens = by_run(self.pages)  # [runs, tokens, kv_heads, head_dim]
        scales = None if self.scales is None else by_run(self.scales)  # [runs, tokens, kv_heads]
        q, out, scores = (
            array[:, piece.members].reshape(kv, runs, -1, array.shape[-1]).transpose(1, 0, 2, 3)
            for array in (task.q, task.out, task.scores)
        )  # [runs, kv_heads, rows, …]
        scores = scores[..., piece.column : piece.column + piece.tokens]
        tile = TILE * max(1, PRODUCT // (q.shape[2] * head_dim * TILE))
        whole = 0 if piece.each else piece.tokens // tile
        self.products = []
        for start, tiles, length in ((0, whole, tile), (whole * tile, 1, piece.tokens - whole * tile)):
            if tiles * length == 0:
                continue
            stop, many = start + tiles * length, runs if runs > 1 else tiles
            K = tokens[:, start:stop].reshape(many, length, kv, head_dim)
            S = scores[..., start:stop]
            if runs == 1:
                S = S[0].reshape(kv, -1, tiles, length).transpose(2, 0, 1, 3)
            part = workspace.array("parts", (many, kv, q.shape[2], head_dim))
            by = None if scales is None else scales[:, start:stop].reshape(many, length, kv)
            by = None if by is None else by.transpose(0, 2, 1)[:, :, None]
            product = Product(q, K.transpose(0, 2, 3, 1), S, K.transpose(0, 2, 1, 3), by, part, out)
            self.products.append(product.row_by_row() if q.shape[2] <= FEW else product)

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
        self.task, self.format = task, storage.format
        self.rows = task.rows if task.split is None else task.split.rows
        by_member = all(piece.each for piece in task.pieces)

        def room(name: str, members: int, rows: int, last: int) -> np.ndarray:
            """[kv_heads, members, rows, last]: heads apart if members are multiplied together, else side by side."""
            if by_member:
                return workspace.array(name, (members, kv, rows, last)).swapaxes(0, 1)
            return workspace.array(name, (kv, members, rows, last))

        self.q = room("queries", m, padded, shape.head_dim)
        self.out = room("outputs", m, padded, shape.head_dim)
        self.scores = room("scores", m, padded, task.width)
        self.asked, self.answered, self.padding = (
            self.scores[:, :, :rows],
            self.out[:, :, :rows],
            self.q[:, :, rows:],
        )
        by_query = (kv, m, group, n, -1)
        self.given = _by_query(self.q[:, :, :rows], n)
        self.maskable = None
        if task.hidden is not None:
            self.maskable = self.asked.reshape(by_query)[..., -task.hidden.shape[-1] :]
        self.gathers = [Gather(piece, self, shape, storage, workspace) for piece in task.pieces]
        self.holes = any(piece.holes is not None for piece in task.pieces)
        products = [gather.products for gather in self.gathers]
        self.at_once = task.split is not None or (
            len(products) == len(products[0]) == 1 and len(products[0][0].part) == len(products[0][0].out)
        )
        self.found, self.sums = self.answered, []
        if task.split is not None:
            sequences = len(task.split.first)
            self.found = room("sums", sequences, rows, shape.head_dim)
            for members, some in task.split.equal:
                whole = self.found[:, some]  # [kv_heads, some sequences, rows, head_dim]
                parts = self.answered[:, members].reshape(*whole.shape[:2], -1, *whole.shape[2:])
                self.sums.append((parts, whole))
        if self.at_once:  # nothing to add up
            for some in products:
                some[:] = [product._replace(part=product.out) for product in some]

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
        """Attention of the task's rows of the query into those of out and lse."""
        rows, scores = self.task.rows, self.asked  # [kv_heads, members, group · queries, width]
        np.multiply(query[rows].reshape(self.given.shape), scale, out=self.given)
        if self.padding.size:
            self.padding[...] = 0
        with np.errstate(invalid="ignore", over="ignore"):  # of what lies in holes
            for gather in self.gathers:
                gather.load(*keys)
                for p in gather.products:
                    np.matmul(p.q, p.keys, out=p.scores)
                    if p.scales is not None:
                        np.multiply(p.scores, p.scales, out=p.scores)
            if self.format.factor != 1:  # the query brings the other half: one of them alone could overflow
                scores *= np.float32(self.format.factor**0.5)
            if soft_cap is not None:
                scores /= soft_cap
                np.tanh(scores, out=scores)
                scores *= soft_cap
            if self.maskable is not None:
                hidden = self.task.hidden
                np.copyto(self.maskable, -np.inf, where=hidden)  # a select: adding to NaN would keep it
            total, peak = self._softmax(scores)
            if lse is not None:
                self._log_sum_exp(total, peak, lse)
            if self.format.factor != 1:
                scores *= np.float32(self.format.factor)
            found = self._weigh(values)
        found /= total
        out[self.rows] = _by_query(found, self.task.queries).reshape(-1, *out.shape[1:])

    def _softmax(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Make weights of the scores, to be divided by the first of what it returns; the second was subtracted."""
        split = self.task.split
        peak = np.maximum.reduce(scores, axis=-1, keepdims=True, initial=LOWEST)  # −inf − −inf would be NaN
        if split is not None:
            peak = np.maximum.reduceat(peak, split.first, axis=1)
        scores -= peak if split is None else peak[:, split.whole]  # [kv_heads, members, group · queries, 1]
        np.exp(scores, out=scores)
        total = np.add.reduce(
            scores, axis=-1, keepdims=True, initial=TINY
        )  # 0 / 0, too; 1 and more stay the same
        if split is not None:
            total = np.add.reduceat(total, split.first, axis=1)
        return total, peak

    def _weigh(self, values: tuple[np.ndarray, np.ndarray | None], clear: bool = False) -> np.ndarray:
        """The sum of the values by their weights: [kv_heads, members or sequences, group · queries, head_dim].

        What lies in holes has the weight 0, which does not help against NaN and infinity. They are rare, so holes are
        cleared when they were met.
        """
        if self.format.scales("values") is not None:  # they go into the weights, so there is no second time
            clear = True
        if not self.at_once:
            self.out[...] = 0
        for gather in self.gathers:
            gather.load(*values, clear=clear)
            for p in gather.products:
                if p.scales is not None:
                    np.multiply(p.scores, p.scales, out=p.scores)
                np.matmul(p.scores, p.values, out=p.part)
                if not self.at_once:
                    p.out[...] += p.part if len(p.part) == len(p.out) else np.add.reduce(p.part, axis=0)
        for parts, whole in self.sums:
            np.add.reduce(parts, 2, None, whole)
        if self.holes and not clear and not np.isfinite(np.add.reduce(self.found, axis=None)):
            return self._weigh(values, clear=True)
        return self.found

    def _log_sum_exp(self, total: np.ndarray, peak: np.ndarray, lse: np.ndarray) -> None:
        found = np.log(total, dtype=np.float64) + peak  # [kv_heads, members, group · queries, 1]
        found[total == TINY] = -np.inf
        lse[self.rows] = _by_query(found, self.task.queries).reshape(-1, lse.shape[1])


def _by_query(array: np.ndarray, queries: int) -> np.ndarray:
    """[kv_heads, members, group · queries, n] seen as [members, queries, kv_heads, group, n]."""
    kv, members, rows, n = array.shape
    return array.reshape(kv, members, rows // queries, queries, n).transpose(1, 3, 0, 2, 4)
