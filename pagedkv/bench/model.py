"""End to end: the shipped model over the paged cache and over two contiguous ones, and where the time goes.

All are called by the same `Llama.next_logits`, so what differs is the cache alone. They take turns of some steps
each: a server decodes with one of them, and the first steps of a turn, which find the processor's caches full of
another's pages, do not count. One contiguous cache has the whole context reserved for every sequence, the other grows
and copies. Both pay for padding: how much depends on the lengths of a batch, its *mix*.
"""

import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from ..lm import Llama
from .measure import limited_threads, ratio

TURN, WARM = 12, 2  # steps that one decodes before the next has its turn, and those of them that do not count
PARTS = (
    "attention",
    "bookkeeping",
)  # what is timed; the rest are the network's matrix products, norms and rotations

MIXES: dict[str, Callable[[int], np.ndarray]] = {  # tokens of the prompts in a batch
    "spread": lambda batch: np.linspace(64, 384, batch).astype(int) if batch > 1 else np.array([224]),
    "uniform": lambda batch: np.full(batch, 224),
    "skewed": lambda batch: np.where(np.arange(batch) % 8 == 0, 384, 64),
}


class Watched:
    """A cache with a stopwatch around the calls that a model makes in every step."""

    def __init__(self, cache):
        self._cache = cache
        self.spent = dict.fromkeys(PARTS, 0.0)

    def __getattr__(self, name: str):
        return getattr(self._cache, name)

    def lengths(self, *args):
        return self._timed("bookkeeping", self._cache.lengths, *args)

    def extend(self, *args):
        return self._timed("bookkeeping", self._cache.extend, *args)

    def plan(self, *args):
        return self._timed("bookkeeping", self._cache.plan, *args)

    def write(self, *args):
        return self._timed("bookkeeping", self._cache.write, *args)

    def attend(self, *args):
        return self._timed("attention", self._cache.attend, *args)

    def _timed(self, part: str, method: Callable, *args):
        started = time.perf_counter()
        result = method(*args)
        self.spent[part] += time.perf_counter() - started
        return result


class ReservedCache:
    """The fastest of what a paged cache replaces: room for the whole context per sequence, padded attention.

    It decodes only: one new token of every sequence, always the same ones. Buffers are made once.

    Args: model; source, seq_ids: the paged cache and its sequences whose keys and values to begin with.
    """

    def __init__(self, model: Llama, source, seq_ids):
        c, batch = model.config, len(seq_ids)
        shape = (c.num_layers, batch, c.num_kv_heads, c.context, c.head_dim)
        self.keys, self.values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.storage = source.storage  # the model looks there for the shape of a token
        self.filled = np.array(source.lengths(seq_ids))  # [batch]
        for layer in range(c.num_layers):
            for row, seq in enumerate(seq_ids):
                keys, values = source.gather(layer, seq)  # [length, kv_heads, head_dim]
                self.keys[layer, row, :, : len(keys)] = keys.swapaxes(0, 1)
                self.values[layer, row, :, : len(keys)] = values.swapaxes(0, 1)
        self.scale, self.rows = np.float32(c.head_dim**-0.5), np.arange(batch)
        self.row_of = {seq: row for row, seq in enumerate(seq_ids)}
        self.room = np.empty(batch * c.num_q_heads * c.context, np.float32)  # for scores

    def lengths(self, seq_ids) -> np.ndarray:
        return self.filled.copy()

    def extend(self, seq_ids, counts) -> SimpleNamespace:
        reservation = SimpleNamespace(start=self.filled.copy())
        self.filled += 1
        return reservation

    def plan(self, seq_ids, counts) -> np.ndarray:
        """The step's mask, once for all layers: float32 [batch, 1, 1, longest]."""
        seen = np.arange(self.filled.max()) < self.filled[:, None]  # [batch, longest]
        return np.where(seen, np.float32(0), np.float32(-np.inf))[:, None, None]

    def write(self, layer: int, reservation: SimpleNamespace, keys: np.ndarray, values: np.ndarray) -> None:
        self.keys[layer][self.rows, :, reservation.start] = keys  # [batch, kv_heads, head_dim]
        self.values[layer][self.rows, :, reservation.start] = values

    def attend(
        self, layer: int, query: np.ndarray, mask: np.ndarray
    ) -> np.ndarray:  # [batch, q_heads, head_dim]
        longest = mask.shape[-1]
        keys, values = self.keys[layer][:, :, :longest], self.values[layer][:, :, :longest]
        batch, kv_heads, _, head_dim = keys.shape
        q = (query * self.scale).reshape(batch, kv_heads, -1, head_dim)  # [batch, kv_heads, group, head_dim]
        scores = self.room[: q.size // head_dim * longest].reshape(*q.shape[:3], longest)
        np.matmul(q, keys.swapaxes(2, 3), out=scores)
        np.add(scores, mask, out=scores)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        out = scores @ values
        out /= scores.sum(axis=-1, keepdims=True)
        return out.reshape(query.shape)

    def truncate(self, seq_id, length: int) -> None:
        self.filled[self.row_of[seq_id]] = length


class GrownCache(ReservedCache):
    """No more room than the longest sequence needs: every step makes all arrays anew, by one token longer.

    Source: `DynamicCache` of Hugging Face transformers, which concatenates.
    """

    def __init__(self, model: Llama, source, seq_ids):
        super().__init__(model, source, seq_ids)
        longest = self.filled.max()
        self.keys = [keys[:, :, :longest].copy() for keys in self.keys]
        self.values = [values[:, :, :longest].copy() for values in self.values]

    def write(self, layer: int, reservation: SimpleNamespace, keys: np.ndarray, values: np.ndarray) -> None:
        longest = reservation.start.max()
        for arrays in (self.keys, self.values):
            old = arrays[layer][:, :, :longest]  # [batch, kv_heads, longest, head_dim]
            arrays[layer] = np.concatenate([old, np.zeros_like(old[:, :, :1])], axis=2)
        super().write(layer, reservation, keys, values)


CACHES = {"reserved": ReservedCache, "grown": GrownCache}  # that the paged one is compared with


class Decoder:
    """The model over one of the caches, with a stopwatch."""

    def __init__(self, model: Llama, cache, seq_ids):
        self.model, self.cache, self.seq_ids = model, Watched(cache), seq_ids
        self.start = cache.lengths(seq_ids).tolist()
        self.spent, self.times = self.cache.spent, []  # of steps that count

    def step(self, tokens: np.ndarray) -> np.ndarray:  # [batch]
        return self.model.next_logits(self.cache, self.seq_ids, tokens[:, None])

    def turn(self, tokens: np.ndarray) -> np.ndarray:  # [steps, batch]
        """The logits of some steps: [steps, batch, vocabulary]."""
        logits = []
        for i, step in enumerate(tokens):
            before, started = dict(self.spent), time.perf_counter()
            logits.append(self.step(step))
            taken = time.perf_counter() - started
            if i < min(WARM, len(tokens) - 1):
                self.spent.update(before)
            else:
                self.times.append(taken)
        return np.array(logits)

    def restart(self, *, forget: bool = False) -> None:
        """Back to the prompts; `forget` the times, too."""
        for seq, length in zip(self.seq_ids, self.start, strict=True):
            self.cache.truncate(seq, length)
        if forget:
            self.times.clear()
            self.spent.update(dict.fromkeys(PARTS, 0.0))


def compare_caches(
    batch: int,
    mix: str = "spread",
    *,
    steps: int = 48,
    rounds: int = 3,
    block_size: int = 16,
    threads: int = 1,
    after_round: Callable[[float], object] = lambda share: None,
) -> dict:
    """Decode the same text with all caches, in turns, from prompts of 64 to 384 characters.

    Args: batch: sequences; mix: of their lengths, in MIXES; steps: tokens that each writes in a round, as the
        paged one chooses them; threads: that BLAS may use.
    Returns: {batch, mix, difference, paged, reserved, grown}: difference: of the logits at worst; per cache
        tokens_per_second, the share of time of each part, and paged: how much faster the paged one was, side by side.
    """
    model, random = Llama.load(), np.random.default_rng(0)
    prompts = random.integers(0, model.config.vocabulary_size, (batch, 384))
    lengths = MIXES[mix](batch)
    cache = model.new_cache(batch * (model.config.context // block_size + 1), block_size)
    ids = [cache.add() for _ in range(batch)]
    chunks = [p[:n] for p, n in zip(prompts, lengths.tolist(), strict=True)]
    tokens = [model.next_logits(cache, ids, chunks).argmax(axis=-1)]  # [batch] each
    others = {name: made(model, cache, ids) for name, made in CACHES.items()}
    ways = {name: Decoder(model, some, ids) for name, some in {"paged": cache, **others}.items()}
    worst = 0.0
    with limited_threads(threads):
        while len(tokens) < steps:
            tokens.append(ways["paged"].step(tokens[-1]).argmax(axis=-1))
        for done in range(rounds + 1):
            for way in ways.values():
                way.restart(forget=done <= 1)  # the first round was for warming up
            worst = np.maximum(worst, _round(ways, np.array(tokens)))  # keeps a NaN
            after_round((done + 1) / (rounds + 1))
    taken = {name: np.array(way.times) for name, way in ways.items()}
    return {
        "batch": batch,
        "mix": mix,
        "difference": float(worst),
        **{
            name: _shares(batch, taken[name], way.spent) | {"paged": ratio(taken[name], taken["paged"])}
            for name, way in ways.items()
        },
    }


def _round(ways: dict[str, Decoder], tokens: np.ndarray) -> float:
    """All through the same tokens [steps, batch]; returns how far their logits are apart at worst."""
    worst = 0.0
    for i in range(0, len(tokens), TURN):
        order = sorted(ways, reverse=bool(i // TURN % 2))  # forwards and backwards: none is always the first
        logits = {name: ways[name].turn(tokens[i : i + TURN]) for name in order}
        for other in CACHES:
            worst = np.maximum(worst, np.abs(logits["paged"] - logits[other]).max())
    return worst


def _shares(batch: int, times: np.ndarray, spent: dict[str, float]) -> dict[str, float]:
    shares = {part: spent[part] / float(times.sum()) for part in PARTS}
    return {
        "tokens_per_second": batch / float(np.median(times)),
        **shares,
        "network": 1 - sum(shares.values()),
    }
