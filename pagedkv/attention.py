"""Attention, dense and over pages, written to be read. The fast kernel is in decode.py."""

from collections.abc import Sequence
from numbers import Real

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from .allocator import whole_number, whole_numbers


def softmax(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights over the last axis, and the natural log of the sum of exponentials.

    Args: scores: [..., keys]; −inf hides a key.
    Returns: weights [..., keys], which sum to 1 or, where nothing is visible, to 0; log-sum-exp float64 [...],
        because near 60,000 float32 has steps of 0.004, too coarse to merge with.
    """
    peak = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    peak[np.isneginf(peak)] = 0  # nothing visible: exp(−inf − 0) is 0 without a warning
    weights = np.exp(scores - peak)  # [..., keys]  at most 1, so it cannot overflow
    total = weights.sum(axis=-1, keepdims=True)  # [..., 1]
    with np.errstate(divide="ignore"):
        lse = np.log(total, dtype=np.float64) + peak
    weights /= np.where(total > 0, total, 1)
    return weights, lse[..., 0]


def merge(
    out_a: ArrayLike, lse_a: ArrayLike, out_b: ArrayLike, lse_b: ArrayLike
) -> tuple[np.ndarray, np.ndarray]:
    """Attention over two sets of keys, from the attention over each.

    Args: out_a, out_b: [..., head_dim]; lse_a, lse_b: natural log-sum-exp of the scores [...].
    Returns: out and lse over both sets, in float64 if lse is; (0, −inf) stands for no keys at all.
    Source: section 2.2 of Ye et al. 2024, "Cascade Inference".
    """
    lse = np.logaddexp(lse_a, lse_b)  # [...]
    finite = np.where(np.isneginf(lse), 0, lse)
    share_a, share_b = np.exp(lse_a - finite), np.exp(lse_b - finite)  # [...]  they sum to 1, or to 0
    return share_a[..., None] * np.asarray(out_a) + share_b[..., None] * np.asarray(out_b), lse


def visible(num_queries: int, length: int, window: int | None = None) -> np.ndarray:
    """Which keys each query may see: bool [num_queries, length].

    Queries are the last positions: query i stands at p = length − num_queries + i and sees keys up to p,
    with a window W only those from p − W + 1 on.
    """
    position = np.arange(length - num_queries, length)[:, None]  # [num_queries, 1]
    key = np.arange(length)  # [length]
    mask = key <= position  # [num_queries, length]
    return mask if window is None else mask & (key > position - min(window, length))  # more hides nothing


def attend(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    scale: float,
    soft_cap: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of queries over the keys that a mask lets them see, in the type of the arguments.

    Args: query: [num_queries, num_q_heads, head_dim]; keys, values: [length, num_kv_heads, head_dim];
        mask: bool [num_queries, length]; scale: of the scores; soft_cap: c in c · tanh(score / c).
    Returns: out [num_queries, num_q_heads, head_dim] and log-sum-exp float64 [num_queries, num_q_heads].
    Source: section 2.1, equation 1; grouped queries: Ainslie et al. 2023, "GQA".
    """
    n, heads, head_dim = query.shape
    length, kv_heads, value_dim = values.shape
    group = heads // kv_heads  # query heads that share a KV head; counted, as −1 fails where n or length is 0
    q = (query * scale).reshape(n, kv_heads, group, head_dim)
    q = q.transpose(1, 2, 0, 3).reshape(kv_heads, group * n, head_dim)
    scores = q @ keys.transpose(1, 2, 0)  # [kv_heads, group · n, length]
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    scores = scores.reshape(kv_heads, group, n, length)
    scores = np.where(mask, scores, -np.inf)  # a select: adding to NaN would keep it
    weights, lse = softmax(scores)  # [kv_heads, group, n, length], [kv_heads, group, n]
    weights = weights.reshape(kv_heads, group * n, length)
    out = weights @ values.transpose(1, 0, 2)  # [kv_heads, group · n, value_dim]
    out = out.reshape(kv_heads, group, n, value_dim).transpose(2, 0, 1, 3)  # [n, kv_heads, group, value_dim]
    return out.reshape(n, heads, value_dim), lse.transpose(2, 0, 1).reshape(n, heads)


def dense_attention(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    dtype: DTypeLike = np.float64,
    return_lse: bool = False,
):
    """Causal attention of one sequence over contiguous keys and values: what every kernel is compared with.

    Args: query: [num_queries, num_q_heads, head_dim], the sequence's last positions; keys, values:
        [length, num_kv_heads, head_dim]; scale: 1 / sqrt(head_dim) if None; window: keys that a query sees,
        its own included; soft_cap: c in c · tanh(score / c); dtype: of the computation.
    Returns: [num_queries, num_q_heads, head_dim]; with return_lse also the log-sum-exp float64
        [num_queries, num_q_heads].
    Raises: ValueError for shapes or options that do not fit.
    Source: section 2.1, equation 1.
    """
    query, keys, values = (np.asarray(x, dtype) for x in (query, keys, values))
    check_shapes(query, keys.shape, values.shape)
    scale, soft_cap = checked_options(query, scale, window, soft_cap)
    out, lse = attend(query, keys, values, visible(len(query), len(keys), window), scale, soft_cap)
    return (out, lse) if return_lse else out


def paged_attention(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    block_tables: ArrayLike,
    lengths: ArrayLike,
    *,
    num_queries: int | Sequence[int] = 1,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
):
    """Causal attention of a batch over pages, block by block: the readable reference.

    Each block gives a partial result over its filled slots and `merge` joins them; a slot behind a
    sequence's length is never read.

    Args: query: [total_queries, num_q_heads, head_dim], sequence after sequence, each one's last positions;
        keys, values: pages of one layer [num_blocks, block_size, num_kv_heads, head_dim]; block_tables: whole
        numbers [batch, max_blocks]; lengths: tokens [batch]; num_queries: per sequence, or one for all;
        scale, window, soft_cap: as in dense_attention.
    Returns: float32 [total_queries, num_q_heads, head_dim]; with return_lse also the log-sum-exp float64
        [total_queries, num_q_heads]. A query that sees no key gives zeros and −inf.
    Raises: ValueError for shapes, lengths and blocks that do not fit.
    Source: section 4.1, equation 4.
    """
    query, keys, values = np.asarray(query, np.float32), np.asarray(keys), np.asarray(values)
    check_shapes(query, keys.shape, values.shape, axes=4)
    scale, soft_cap = checked_options(query, scale, window, soft_cap)
    num_blocks, block_size = keys.shape[:2]
    tables, lengths, counts = check_batch(block_tables, lengths, num_queries, block_size)
    check_rows(query, counts)

    out = np.zeros((*query.shape[:2], values.shape[-1]), np.float32)  # [total_queries, heads, head_dim]
    lse = np.full(query.shape[:2], -np.inf)  # [total_queries, heads]
    first = 0
    for i, (length, n) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        rows = slice(first, first + n)
        mask = visible(n, length, window)  # [n, length]
        for start in range(0, length, block_size):
            stop = min(start + block_size, length)  # the exact end: the last block may be part full
            if mask[:, start:stop].any():
                block = check_block(tables[i, start // block_size], i, start, num_blocks)
                K = keys[block, : stop - start].astype(np.float32)  # [filled, kv_heads, head_dim]
                V = values[block, : stop - start].astype(np.float32)
                part = attend(query[rows], K, V, mask[:, start:stop], scale, soft_cap)
                out[rows], lse[rows] = merge(out[rows], lse[rows], *part)
        first += n
    return (out, lse) if return_lse else out


# What callers may say


def check_shapes(query: np.ndarray, keys: tuple[int, ...], values: tuple[int, ...], axes: int = 3) -> None:
    """ValueError unless queries [n, heads, d] fit keys and values of shape [..., kv_heads, d], so many axes."""
    if query.ndim != 3 or len(keys) != axes or len(values) != axes:
        raise ValueError(
            f"query must have 3 axes, keys and values {axes}: got {query.shape}, {keys} and {values}"
        )
    if keys[:-1] != values[:-1] or query.shape[2] != keys[-1] or keys[-1] == 0:
        raise ValueError(f"query {query.shape}, keys {keys} and values {values} do not fit together")
    if query.shape[1] == 0 or keys[-2] == 0 or query.shape[1] % keys[-2]:
        raise ValueError(f"{query.shape[1]} query heads cannot be divided among {keys[-2]} KV heads")


def checked_options(
    query: np.ndarray, scale: float | None, window: int | None, soft_cap: float | None
) -> tuple[float, float | None]:
    """Scale (1 / sqrt(head_dim) by default) and soft cap in the query's type; ValueError where out of range."""
    if window is not None:
        whole_number("window", window, minimum=1)
    usual = query.shape[2] ** -0.5
    scale = query.dtype.type(usual) if scale is None else checked_number("scale", scale, query.dtype)
    if soft_cap is None:
        return scale, None
    cap = checked_number("soft_cap", soft_cap, query.dtype)
    if cap <= 0:
        raise ValueError(f"soft_cap must be a positive number, got {soft_cap!r}")
    return scale, cap


def checked_number(name: str, value: float, dtype: np.dtype) -> float:
    """The value in a floating-point type, so that it cannot widen what it multiplies; ValueError unless finite."""
    with np.errstate(over="ignore"):
        number = dtype.type(value) if isinstance(value, Real) else np.nan
    if not np.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return number


def check_batch(
    block_tables: ArrayLike, lengths: ArrayLike, num_queries: int | Sequence[int], block_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tables [batch, max_blocks], lengths [batch] and query counts [batch], or ValueError."""
    whole_number("block_size", block_size, minimum=1)
    tables = whole_numbers("block tables", block_tables)
    lengths = whole_numbers("lengths", lengths)
    if tables.ndim != 2 or lengths.shape != tables.shape[:1]:
        raise ValueError(f"tables {tables.shape} and lengths {lengths.shape} do not fit together")
    counts = check_counts(num_queries, len(lengths))
    reach = tables.shape[1] * block_size
    wrong = np.flatnonzero((lengths < 0) | (lengths > reach))
    if wrong.size:
        raise ValueError(f"row {wrong[0]} has length {lengths[wrong[0]]}, its table reaches 0 … {reach}")
    return tables, lengths, counts


def check_counts(num_queries: int | Sequence[int], batch: int) -> np.ndarray:
    """Query counts [batch], or ValueError."""
    counts = whole_numbers("num_queries", num_queries)
    if counts.shape not in ((), (batch,)):
        raise ValueError(f"num_queries {counts.shape} does not fit {batch} sequences")
    counts = np.broadcast_to(counts, (batch,))
    if np.count_nonzero(counts < 0):
        raise ValueError(f"num_queries must be at least 0, got {counts.min()}")
    return counts


def check_rows(query: np.ndarray, counts: np.ndarray) -> None:
    """ValueError unless the query has as many rows as the counts add up to."""
    if len(query) != counts.sum():
        raise ValueError(f"query has {len(query)} rows, num_queries adds up to {counts.sum()}")


def check_block(block: int, row: int, position: int, num_blocks: float = np.inf) -> int:
    """The block as an int; ValueError where a visible position has none, or one that the pool does not have."""
    if block < 0:
        raise ValueError(
            f"row {row} has no block for position {position}, but {block}: was it left behind by a window?"
        )
    if block >= num_blocks:
        raise ValueError(f"row {row} names block {block}, the pool has 0 … {num_blocks - 1}")
    return int(block)
