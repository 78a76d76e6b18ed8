"""The batched kernel: planned once per step, run once per layer."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from .allocator import whole_number
from .attention import attend, check_batch, check_block, check_rows, check_shapes, checked_options, visible
from .storage import KVStorage


class StalePlan(Exception):
    """A sequence changed after the plan or reservation for it was made; make a new one."""


class AttentionPlan:
    """Everything about one step that all layers share: which slots each sequence reads, and what it may see.

    Queries are each sequence's last positions, so decode (one query), a prefill chunk and a check of drafts
    may stand in one batch. Only visible slots are gathered: with a window, none in front of it.

    Args: block_tables: whole numbers [batch, max_blocks]; lengths: tokens [batch]; block_size; num_queries: per
        sequence, or one for all; window: keys that a query sees, its own included; seq_ids, versions: whose plan
        this is, for `PagedKVCache` to notice that it is stale.
    Raises: ValueError for lengths and blocks that do not fit.
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
        seq_ids: tuple = (),
        versions: np.ndarray | None = None,
    ):
        tables, lengths, counts = check_batch(block_tables, lengths, num_queries, block_size)
        if window is not None:
            whole_number("window", window, minimum=1)
        self.lengths, self.num_queries, self.window = lengths, counts, window
        self.block_size = block_size
        self.seq_ids, self.versions = seq_ids, versions
        self.total_queries = int(counts.sum())
        self.slots: list[np.ndarray] = []  # per sequence: intp [visible keys]
        self.masks: list[np.ndarray] = []  # per sequence: bool [num_queries, visible keys]
        self._highest = (0, 0, 0)  # block, row, position: the largest id, for a pool that is yet to be named
        for i, (length, n) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
            mask = visible(n, length, window)
            first = int(np.argmax(mask.any(axis=0))) if mask.any() else length
            positions = np.arange(first, length)
            blocks = tables[i, positions // block_size]  # [visible keys]
            if blocks.size:
                gap, top = int(blocks.argmin()), int(blocks.argmax())
                check_block(blocks[gap], i, positions[gap])
                self._highest = max(self._highest, (int(blocks[top]), i, int(positions[top])))
            self.slots.append(blocks * block_size + positions % block_size)
            self.masks.append(mask[:, first:])

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
        query = np.asarray(query)
        if query.dtype.kind != "f":
            raise ValueError(f"query must be floating point, got {query.dtype}")
        query = query.astype(np.float32, copy=False)
        page = (storage.block_size, storage.num_kv_heads, storage.head_dim)
        check_shapes(query, page, page)
        check_rows(query, self.num_queries)
        scale, soft_cap = checked_options(query, scale, self.window, soft_cap)
        if storage.block_size != self.block_size:
            raise ValueError(f"planned for blocks of {self.block_size}, the storage has {storage.block_size}")
        check_block(*self._highest, storage.num_blocks)
        out = np.zeros(query.shape, np.float32)  # [total_queries, heads, head_dim]
        lse = np.full(query.shape[:2], -np.inf)  # [total_queries, heads]
        first = 0
        for slots, mask in zip(self.slots, self.masks, strict=True):
            rows = slice(first, first + len(mask))
            keys, values = storage.read(layer, slots)  # [visible, kv_heads, head_dim]
            out[rows], lse[rows] = attend(query[rows], keys, values, mask, scale, soft_cap)
            first += len(mask)
        return (out, lse) if return_lse else out
