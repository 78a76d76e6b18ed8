"""Wrong solutions of lesson 05, as learners write them. See ../test_planted.py."""

import numpy as np

from pagedkv.attention import paged_attention
from pagedkv.teach.checks._core import ERROR


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


# ---- attend_one(q, K, V, table, length)


def rows(pages, table, length):
    return pages[list(table)].reshape(-1, pages.shape[-1])[:length]


def whole_blocks(q, K, V, table, length):
    k, v = rows(K, table, None), rows(V, table, None)
    return softmax(k @ q / len(q) ** 0.5) @ v


def multiplied_mask(q, K, V, table, length):
    k, v = rows(K, table, None), rows(V, table, None)
    seen = np.arange(len(k)) < length
    weights = softmax(np.where(seen, k @ q / len(q) ** 0.5, -np.inf))
    return (weights * seen) @ v


def masked_too_late(q, K, V, table, length):
    k, v = (np.nan_to_num(rows(pages, table, None)) for pages in (K, V))
    return (softmax(k @ q / len(q) ** 0.5) * (np.arange(len(k)) < length)) @ v


def sorted_blocks(q, K, V, table, length):
    return softmax(rows(K, sorted(table), length) @ q / len(q) ** 0.5) @ rows(V, sorted(table), length)


def no_scale(q, K, V, table, length):
    return softmax(rows(K, table, length) @ q) @ rows(V, table, length)


def plain_exp(q, K, V, table, length):
    weights = np.exp(rows(K, table, length) @ q / len(q) ** 0.5)
    return weights / weights.sum() @ rows(V, table, length)


def loses_the_last_full_block(q, K, V, table, length):
    bs = K.shape[1]
    k = np.concatenate([K[b][: length % bs if b == table[-1] else bs] for b in table])
    v = np.concatenate([V[b][: length % bs if b == table[-1] else bs] for b in table])
    return softmax(k @ q / len(q) ** 0.5) @ v


def a_wrapper(q, K, V, table, length):
    return paged_attention(q[None, None], K[:, :, None], V[:, :, None], [table], [length])[0, 0]


# ---- merge(a, lse_a, b, lse_b)


def mean(a, lse_a, b, lse_b):
    return (a + b) / 2, np.logaddexp(lse_a, lse_b)


def base_two(a, lse_a, b, lse_b):
    wa, wb = np.exp2(lse_a)[..., None], np.exp2(lse_b)[..., None]
    return (wa * a + wb * b) / (wa + wb), np.logaddexp(lse_a, lse_b)


def naive(a, lse_a, b, lse_b):
    wa, wb = np.exp(lse_a)[..., None], np.exp(lse_b)[..., None]
    with np.errstate(all="ignore"):
        return (wa * a + wb * b) / (wa + wb), np.log((wa + wb)[..., 0])


def two_empty(a, lse_a, b, lse_b):
    peak = np.maximum(lse_a, lse_b)
    with np.errstate(all="ignore"):
        wa, wb = np.exp(lse_a - peak)[..., None], np.exp(lse_b - peak)[..., None]
        return (wa * a + wb * b) / (wa + wb), np.log((wa + wb)[..., 0]) + peak


def warns(a, lse_a, b, lse_b):
    peak = np.maximum(lse_a, lse_b)
    wa, wb = np.nan_to_num(np.exp(lse_a - peak))[..., None], np.nan_to_num(np.exp(lse_b - peak))[..., None]
    total = np.where(wa + wb == 0, 1, wa + wb)
    return (wa * a + wb * b) / total, np.logaddexp(lse_a, lse_b)


def adds_the_logs(a, lse_a, b, lse_b):
    share = np.exp(lse_a - np.logaddexp(lse_a, lse_b))[..., None]
    return share * a + (1 - share) * b, lse_a + lse_b


def logs_as_weights(a, lse_a, b, lse_b):
    share = (lse_a / (lse_a + lse_b))[..., None]
    return share * a + (1 - share) * b, np.logaddexp(lse_a, lse_b)


def only_the_result(a, lse_a, b, lse_b):
    share = np.exp(lse_a - np.logaddexp(lse_a, lse_b))[..., None]
    return share * a + (1 - share) * b


# ---- gqa(q, K, V)


def grouped(q, K, V, scale=True):
    kv_heads, d = K.shape[1:]
    q = q.reshape(kv_heads, -1, d) / (d**0.5 if scale else 1)
    return (softmax(q @ K.transpose(1, 2, 0)) @ V.transpose(1, 0, 2)).reshape(-1, d)


def tiled(q, K, V):
    kv_heads, d = K.shape[1:]
    q = q.reshape(-1, kv_heads, d).transpose(1, 0, 2)
    out = softmax(q @ K.transpose(1, 2, 0) / d**0.5) @ V.transpose(1, 0, 2)
    return out.transpose(1, 0, 2).reshape(-1, d)


def repeats(q, K, V):
    group = len(q) // K.shape[1]
    K, V = np.repeat(K, group, axis=1), np.repeat(V, group, axis=1)
    scores = np.einsum("hd,nhd->hn", q, K) / q.shape[1] ** 0.5
    return np.einsum("hn,nhd->hd", softmax(scores), V)


def first_kv_head_only(q, K, V):
    return softmax(q @ K[:, 0].T / q.shape[1] ** 0.5) @ V[:, 0]


def gqa_without_scale(q, K, V):
    return grouped(q, K, V, scale=False)


def groups_not_flattened(q, K, V):
    return grouped(q, K, V).reshape(K.shape[1], -1, q.shape[1])


def as_many_groups_as_heads(q, K, V):
    """Takes the number of KV heads for the size of a group: right on the story, where both are 2."""
    group, d = K.shape[1], q.shape[1]
    out = np.zeros(q.shape)
    for head in range(len(q)):
        kv = min(head // group, K.shape[1] - 1)
        out[head] = softmax(K[:, kv] @ q[head] / d**0.5) @ V[:, kv]
    return out


# ---- attend_batch(q, K, V, tables, lengths)


def padded(q, K, V, tables, lengths, *, mask_of=None, clean=True, late=False, empty=True):
    batch, heads, d = q.shape
    reach, kv_heads = tables.shape[1] * K.shape[1], K.shape[2]
    longest = np.full(batch, max(lengths)) if mask_of == "longest" else lengths
    mask = np.arange(reach) < longest[:, None]
    k, v = (pages[tables].reshape(batch, reach, kv_heads, d) for pages in (K, V))
    if clean:
        v = np.where(mask[:, :, None, None], v, 0)
    if late or mask_of == "longest":
        k = np.nan_to_num(k)
    if mask_of == "longest":
        v = np.nan_to_num(v)
    scores = q.reshape(batch, kv_heads, -1, d) @ k.transpose(0, 2, 3, 1) / d**0.5
    mask = mask[:, None, None]
    if not late:
        scores = np.where(mask, scores, -np.inf)
    peak = scores.max(axis=-1, keepdims=True)
    if empty:
        peak = np.where(np.isneginf(peak), 0, peak)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    if late:
        weights = weights * mask
    return (weights @ v.transpose(0, 2, 1, 3)).reshape(batch, heads, d)


def mask_from_the_longest(q, K, V, tables, lengths):
    return padded(q, K, V, tables, lengths, mask_of="longest")


def mask_after_the_softmax(q, K, V, tables, lengths):
    return padded(q, K, V, tables, lengths, late=True)


def empty_row_is_nan(q, K, V, tables, lengths):
    return padded(q, K, V, tables, lengths, empty=False)


def only_scores_selected(q, K, V, tables, lengths):
    return padded(q, K, V, tables, lengths, clean=False)


def minus_infinity_added(q, K, V, tables, lengths):
    """Adds the mask to the scores instead of selecting: NaN + −inf is NaN."""
    batch, heads, d = q.shape
    reach, kv_heads = tables.shape[1] * K.shape[1], K.shape[2]
    mask = np.arange(reach) < lengths[:, None]
    k, v = (pages[tables].reshape(batch, reach, kv_heads, d) for pages in (K, V))
    v = np.where(mask[:, :, None, None], v, 0)
    scores = q.reshape(batch, kv_heads, -1, d) @ k.transpose(0, 2, 3, 1) / d**0.5
    weights = softmax(scores + np.where(mask, 0, -np.inf)[:, None, None])
    return (weights @ v.transpose(0, 2, 1, 3)).reshape(batch, heads, d)


def heads_tiled(q, K, V, tables, lengths):
    kv_heads, (batch, heads, d) = K.shape[2], q.shape
    q = q.reshape(batch, -1, kv_heads, d).transpose(0, 2, 1, 3).reshape(batch, heads, d)
    out = padded(q, K, V, tables, lengths).reshape(batch, kv_heads, -1, d)
    return out.transpose(0, 2, 1, 3).reshape(batch, heads, d)


# ---- MyPlan(tables, lengths, block_size).run(layer, q, storage)


class Plan:
    """A right one; the wrong ones below change one thing each."""

    def __init__(self, tables, lengths, block_size):
        self.slots = [
            self.slots_of(t, np.arange(n), block_size) for t, n in zip(tables, lengths, strict=True)
        ]

    def slots_of(self, table, positions, block_size):
        return table[positions // block_size] * block_size + positions % block_size

    def read(self, layer, slots, storage):
        return storage.read(layer, slots)

    def attend(self, q, K, V):
        return grouped(q, K, V)

    def run(self, layer, q, storage):
        out = np.zeros_like(q)
        for i, slots in enumerate(self.slots):
            K, V = self.read(layer, slots, storage)
            if len(K):
                out[i] = self.attend(q[i], K, V)
        return out


class AlwaysLayerZero(Plan):
    def read(self, layer, slots, storage):
        return storage.read(0, slots)


class KeepsWhatItRead(Plan):
    """Plans the contents, not the places."""

    def read(self, layer, slots, storage):
        self.kept = getattr(self, "kept", {})
        key = (layer, slots.tobytes())
        self.kept.setdefault(key, storage.read(layer, slots))
        return self.kept[key]


class WholeBlocks(Plan):
    def __init__(self, tables, lengths, block_size):
        super().__init__(tables, [-(-n // block_size) * block_size for n in lengths], block_size)


class PadsToTheLongest(Plan):
    """Right answers, and every row is read up to the longest sequence's last block."""

    def __init__(self, tables, lengths, block_size):
        reach = np.arange(tables.shape[1] * block_size)
        self.lengths = lengths
        self.slots = [self.slots_of(np.where(table < 0, 0, table), reach, block_size) for table in tables]

    def run(self, layer, q, storage):
        out = np.zeros_like(q)
        for i, (slots, n) in enumerate(zip(self.slots, self.lengths, strict=True)):
            K, V = storage.read(layer, slots)
            if n:
                out[i] = grouped(q[i], K[:n], V[:n])
        return out


class EverybodysRows(Plan):
    """The idea of the listing this project grew from: one gather, and every query reads all of it."""

    def run(self, layer, q, storage):
        K, V = storage.read(layer, np.concatenate(self.slots))
        return np.array([grouped(row, K, V) for row in q])


class EmptyIsNaN(Plan):
    def read(self, layer, slots, storage):
        return storage.read(layer, slots) if len(slots) else (np.full((1, 1, 4), np.nan),) * 2

    def attend(self, q, K, V):
        return grouped(q, K, V) if K.shape[1] <= len(q) else q


class OffsetForgotten(Plan):
    def slots_of(self, table, positions, block_size):
        return table[positions // block_size] * block_size


BUGS = [
    ("attend_one", "12 rows instead of 10", whole_blocks, "by how many weights did you divide"),
    ("attend_one", "multiplied mask", multiplied_mask, "what is 0 · NaN"),
    ("attend_one", "masked after the softmax", masked_too_late, "by how many weights did you divide"),
    ("attend_one", "ids sorted", sorted_blocks, "where in its table does the half-filled block stand"),
    ("attend_one", "no scale", no_scale, "what are scores divided by"),
    ("attend_one", "exp without shift", plain_exp, "how large may a score be"),
    ("attend_one", "full last block lost", loses_the_last_full_block, "zero-size array", ERROR),
    ("attend_one", "thin wrapper", a_wrapper, "calls the package's"),
    ("merge", "mean", mean, "gave [7]"),
    ("merge", "natural and base 2 mixed", base_two, "gave [5.88"),
    ("merge", "no shift", naive, "what is −inf − (−inf)"),
    ("merge", "two empty parts", two_empty, "[0], −inf, [0], −inf) gave [nan]"),
    ("merge", "warns", warns, "warned"),
    ("merge", "logs added", adds_the_logs, "what is the logarithm of that"),
    ("merge", "logs as weights", logs_as_weights, "do your two shares sum to 1"),
    ("merge", "only the result", only_the_result, "expected a pair"),
    ("gqa", "tile instead of repeat", tiled, "read [0, 1, 0, 1], expected [0, 0, 1, 1]"),
    ("gqa", "repeated", repeats, "can they ask it in one product"),
    ("gqa", "first KV head only", first_kv_head_only, "neighbours, or every second one"),
    ("gqa", "no scale", gqa_without_scale, "what are scores divided by"),
    ("gqa", "not flattened", groups_not_flattened, "expected numbers of shape (4, 3)"),
    ("gqa", "group taken for KV heads", as_many_groups_as_heads, "4 query heads on 4"),
    ("attend_batch", "mask from the longest", mask_from_the_longest, "does this row know its own length"),
    ("attend_batch", "mask after the softmax", mask_after_the_softmax, "do its weights sum to 1"),
    ("attend_batch", "empty sequence NaN", empty_row_is_nan, "a row without keys should give zeros"),
    ("attend_batch", "V not selected", only_scores_selected, "what would a select give"),
    ("attend_batch", "mask added", minus_infinity_added, "what would a select give"),
    ("attend_batch", "heads tiled", heads_tiled, "which query head reads which KV head"),
    ("plan", "always layer 0", AlwaysLayerZero, "what is the same in all layers"),
    ("plan", "keeps what it read", KeepsWhatItRead, "what is the same in all layers"),
    ("plan", "whole blocks", WholeBlocks, "which of them did the plan name"),
    ("plan", "padded to the longest", PadsToTheLongest, "read 36 rows of K, the batch has 29 tokens"),
    ("plan", "everybody's rows", EverybodysRows, "which of the rows that were read"),
    ("plan", "empty is NaN", EmptyIsNaN, "a sequence without tokens"),
    ("plan", "offset forgotten", OffsetForgotten, "which of the rows that were read"),
]
