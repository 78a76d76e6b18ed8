"""Who is measured: every kernel as a function from a workload to a call for one layer.

All get the same numbers and may prepare what does not change within a step (plans, masks, buffers, tensors that share
memory with the arrays); a call returns float32 [batch, num_q_heads, head_dim]. The contiguous peers have what a paged
cache never has: keys and values already side by side.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from .shapes import Workload
from .vllm_peer import VllmKernel, missing

Call = Callable[[int], np.ndarray]  # layer -> float32 [batch, num_q_heads, head_dim]


@dataclass(frozen=True)
class Peer:
    """A kernel by its name: what it is, how to build it, and what keeps it from running here."""

    name: str
    about: str
    build: Callable[..., Call]
    missing: Callable[[], str | None] = lambda: None

    @property
    def absent(self) -> str | None:
        """Why it cannot run here, with the remedy, or None."""
        reason = self.missing()
        return reason and f"{self.name}: {reason}"


# --- ours


def paged(
    workload: Workload,
    threads: int = 1,
    dtype: str = "float32",
    *,
    block_size: int | None = None,
    share: bool = True,
) -> Call:
    """`PagedKVCache.attend`, planned once as in a model's step."""
    cache = workload.cache(dtype, block_size)
    plan = cache.plan(workload.seq_ids, share=share, threads=threads)
    return lambda layer: cache.attend(layer, workload.query, plan)


# --- NumPy


def numpy_padded(workload: Workload, threads: int = 1) -> Call:
    """One batched product over contiguous keys and values, padded to the longest sequence and masked."""
    q = _grouped_query(workload)  # [batch, kv_heads, group, head_dim]
    mask = _mask(workload)  # [batch, 1, 1, longest]
    scores = np.empty((*q.shape[:3], mask.shape[-1]), np.float32)  # [batch, kv_heads, group, longest]

    def call(layer: int) -> np.ndarray:
        np.matmul(q, workload.keys[layer].swapaxes(2, 3), out=scores)
        np.add(scores, mask, out=scores)
        return _weighted(scores, workload.values[layer]).reshape(workload.query.shape)

    return call


def numpy_sequences(workload: Workload, threads: int = 1) -> Call:
    """Sequence after sequence over contiguous keys and values, each at its own length."""
    q = _grouped_query(workload)

    def call(layer: int) -> np.ndarray:
        out = np.empty(q.shape, np.float32)
        for row, length in enumerate(workload.lengths):
            scores = q[row] @ workload.keys[layer, row, :, :length].swapaxes(
                1, 2
            )  # [kv_heads, group, length]
            out[row] = _weighted(scores, workload.values[layer, row, :, :length])
        return out.reshape(workload.query.shape)

    return call


def seed_loop(workload: Workload, threads: int = 1) -> Call:
    """The first draft's loop over sequences, heads and blocks, repaired.

    It read every sequence's blocks, used keys as values, ran over the filled end and multiplied arrays of the wrong
    rank. Here it reads its own blocks, keys and values apart, up to the length; the way it works is unchanged.
    """
    cache = workload.cache()
    pages = cache.storage.arrays["keys"], cache.storage.arrays["values"]
    size, (batch, heads, head_dim) = cache.block_size, workload.query.shape
    group = heads // workload.shape.num_kv_heads
    tables = [[int(b) for b in row if b >= 0] for row in cache.block_tables(workload.seq_ids)]

    def call(layer: int) -> np.ndarray:
        out = np.zeros((batch, heads, head_dim), np.float32)
        for row, table in enumerate(tables):
            length = int(workload.lengths[row])
            keys, values = (np.zeros((heads, length, head_dim), np.float32) for _ in range(2))
            for head in range(heads):
                for i, block in enumerate(table):
                    start, end = i * size, min((i + 1) * size, length)
                    for matrix, page in zip((keys, values), pages, strict=True):
                        matrix[head, start:end] = page[layer, block, : end - start, head // group]
            scores = workload.query[row, :, None] @ keys.swapaxes(1, 2) / np.float32(head_dim**0.5)
            out[row] = _weighted(scores, values)[:, 0]  # scores [heads, 1, length]
        return out

    return call


def _grouped_query(workload: Workload) -> np.ndarray:
    """Scaled queries, those that share a KV head side by side: [batch, kv_heads, group, head_dim]."""
    shape = workload.shape
    q = workload.query * np.float32(shape.head_dim**-0.5)
    return q.reshape(shape.batch, shape.num_kv_heads, -1, shape.head_dim)


def _mask(workload: Workload) -> np.ndarray:
    """What is added to padded scores: float32 [batch, 1, 1, longest]."""
    filled = np.arange(workload.lengths.max()) < workload.lengths[:, None]
    return np.where(filled, np.float32(0), np.float32(-np.inf))[:, None, None]


def _weighted(scores: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, in place, times the values; divided at the end, where there is less to divide."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    out = scores @ values
    out /= scores.sum(axis=-1, keepdims=True)
    return out


# --- torch


def torch_gqa(workload: Workload, threads: int = 1) -> Call:
    """scaled_dot_product_attention with enable_gqa, contiguous and padded."""
    torch, sdpa = _torch()
    q = torch.from_numpy(workload.query)[:, :, None]  # [batch, heads, 1, head_dim]
    mask = torch.from_numpy(_mask(workload))
    keys, values = torch.from_numpy(workload.keys), torch.from_numpy(workload.values)

    def call(layer: int):
        return sdpa(q, keys[layer], values[layer], attn_mask=mask, enable_gqa=True)[:, :, 0]

    return _no_grad(call)


def torch_rows(workload: Workload, threads: int = 1) -> Call:
    """The same, with the queries that share a KV head folded into rows: torch's faster form."""
    torch, sdpa = _torch()
    q, mask = torch.from_numpy(_rows(workload)), torch.from_numpy(_mask(workload))
    keys, values = torch.from_numpy(workload.keys), torch.from_numpy(workload.values)

    def call(layer: int):
        return sdpa(q, keys[layer], values[layer], attn_mask=mask).reshape(workload.query.shape)

    return _no_grad(call)


def torch_sequences(workload: Workload, threads: int = 1) -> Call:
    """Folded rows, sequence after sequence over contiguous tensors: torch's strongest."""
    torch, sdpa = _torch()
    q = torch.from_numpy(_rows(workload))
    keys, values = torch.from_numpy(workload.keys), torch.from_numpy(workload.values)
    lengths = workload.lengths.tolist()

    def call(layer: int):
        out = torch.empty_like(q)
        for row, length in enumerate(lengths):
            part = (layer, slice(row, row + 1), slice(None), slice(0, length))
            out[row] = sdpa(q[row : row + 1], keys[part], values[part])[0]
        return out.reshape(workload.query.shape)

    return _no_grad(call)


def torch_gather(workload: Workload, threads: int = 1) -> Call:
    """Gather pages with index_select into tensors allocated once, then attention over folded rows."""
    torch, sdpa = _torch()
    cache, shape = workload.cache(), workload.shape
    table = np.maximum(cache.block_tables(workload.seq_ids), 0).astype(np.int64)  # [batch, blocks]
    blocks = torch.from_numpy(table.reshape(-1))
    reach = table.shape[1] * cache.block_size
    filled = np.arange(reach) < workload.lengths[:, None]
    mask = torch.from_numpy(np.where(filled, np.float32(0), np.float32(-np.inf))[:, None, None])
    pages = [torch.from_numpy(cache.storage.arrays[name]) for name in ("keys", "values")]
    room = [torch.zeros(len(blocks), *pages[0].shape[2:]) for _ in pages]  # touched: no page faults later
    padded = (shape.batch, reach, shape.num_kv_heads, shape.head_dim)
    keys, values = (r.view(padded).transpose(1, 2) for r in room)  # [batch, kv_heads, reach, head_dim]
    q = torch.from_numpy(_rows(workload))

    def call(layer: int):
        for page, to in zip(pages, room, strict=True):
            torch.index_select(page[layer], 0, blocks, out=to)
        return sdpa(q, keys, values, attn_mask=mask).reshape(workload.query.shape)

    return _no_grad(call)


def _torch():
    import torch

    return torch, torch.nn.functional.scaled_dot_product_attention


def _rows(workload: Workload) -> np.ndarray:
    """Queries that share a KV head as rows of one: [batch, kv_heads, group, head_dim], not scaled."""
    shape = workload.shape
    return workload.query.reshape(shape.batch, shape.num_kv_heads, -1, shape.head_dim)


def _no_grad(call) -> Call:
    torch, _ = _torch()

    def quiet(layer: int) -> np.ndarray:
        with torch.inference_mode():
            return call(layer).numpy()

    return quiet


def _no_torch() -> str | None:
    found = importlib.util.find_spec("torch")
    return None if found else 'torch is not installed: pip install "pagedkv[train]"'


PEERS = {
    peer.name: peer
    for peer in [
        Peer("paged", "pagedkv: attention over shuffled pages", paged),
        Peer("paged-ungrouped", "pagedkv, a shared prefix read by each", partial(paged, share=False)),
        Peer("numpy-padded", "NumPy over contiguous arrays, padded to the longest", numpy_padded),
        Peer("numpy-sequences", "NumPy over contiguous arrays, one sequence at a time", numpy_sequences),
        Peer("seed", "the first draft's loop over blocks, repaired", seed_loop),
        Peer("torch-gqa", "torch attention with enable_gqa, contiguous, padded", torch_gqa, _no_torch),
        Peer("torch-rows", "torch attention, queries of a KV head as rows, padded", torch_rows, _no_torch),
        Peer("torch-sequences", "torch attention, one sequence at a time", torch_sequences, _no_torch),
        Peer("torch-gather", "torch index_select of pages, then attention", torch_gather, _no_torch),
        Peer("vllm", "vLLM's compiled CPU kernel, blocks of 128, in its own process", VllmKernel, missing),
    ]
}
