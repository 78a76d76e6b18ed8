"""End to end: the shipped model over the paged cache and over a contiguous one, and where the time goes."""

import time
from collections.abc import Callable

import numpy as np

from ..lm import Llama
from .measure import limited_threads, ratio

PARTS = (
    "attention",
    "bookkeeping",
)  # what is timed; the rest are the network's matrix products, norms and rotations


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


class ContiguousCache:
    """What a paged cache replaces: room for the whole context per sequence, reserved at once, and padded attention.

    Args: model; source, seq_ids: the paged cache and its sequences whose keys and values to begin with.
    """

    def __init__(self, model: Llama, source, seq_ids):
        c, batch = model.config, len(seq_ids)
        shape = (c.num_layers, batch, c.num_kv_heads, c.context, c.head_dim)
        self.keys, self.values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.lengths = np.array(source.lengths(seq_ids))  # [batch]
        for layer in range(c.num_layers):
            for row, seq in enumerate(seq_ids):
                keys, values = source.gather(layer, seq)  # [length, kv_heads, head_dim]
                self.keys[layer, row, :, : len(keys)] = keys.swapaxes(0, 1)
                self.values[layer, row, :, : len(keys)] = values.swapaxes(0, 1)
        self.scale, self.rows = np.float32(c.head_dim**-0.5), np.arange(batch)

    def extend(self) -> None:
        """Room for one more token of each sequence: the step's mask is made here, once for all layers."""
        self.lengths += 1
        filled = np.arange(self.lengths.max()) < self.lengths[:, None]  # [batch, longest]
        self.mask = np.where(filled, np.float32(0), np.float32(-np.inf))[:, None, None]

    def write(self, layer: int, keys: np.ndarray, values: np.ndarray) -> None:
        self.keys[layer, self.rows, :, self.lengths - 1] = keys  # [batch, kv_heads, head_dim]
        self.values[layer, self.rows, :, self.lengths - 1] = values

    def attend(self, layer: int, query: np.ndarray) -> np.ndarray:  # [batch, q_heads, head_dim]
        batch, _, head_dim = query.shape
        longest = self.mask.shape[-1]
        keys, values = self.keys[layer, :, :, :longest], self.values[layer, :, :, :longest]
        q = (query * self.scale).reshape(
            batch, keys.shape[1], -1, head_dim
        )  # [batch, kv_heads, group, head_dim]
        scores = q @ keys.swapaxes(2, 3) + self.mask  # [batch, kv_heads, group, longest]
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        out = scores @ values
        out /= scores.sum(axis=-1, keepdims=True)
        return out.reshape(query.shape)


class Contiguous:
    """The model over a contiguous cache, timed like the paged one."""

    def __init__(self, model: Llama, source, seq_ids):
        self.model, self.cache = model, ContiguousCache(model, source, seq_ids)
        self.start = self.cache.lengths.copy()
        self.spent = dict.fromkeys(PARTS, 0.0)

    def step(self, tokens: np.ndarray) -> np.ndarray:  # [batch]
        cache, spent, clock = self.cache, self.spent, time.perf_counter
        started = clock()
        cache.extend()
        spent["bookkeeping"] += clock() - started

        def attend(layer, q, k, v):
            started = clock()
            cache.write(layer, k, v)
            written = clock()
            out = cache.attend(layer, q)
            spent["bookkeeping"] += written - started
            spent["attention"] += clock() - written
            return out

        return self.model.decode(tokens, cache.lengths - 1, attend)  # [batch, vocabulary]

    def restart(self) -> None:
        self.cache.lengths[:] = self.start


class Paged:
    """The model over the paged cache: `Llama.next_logits`, as every caller has it."""

    def __init__(self, model: Llama, cache, seq_ids):
        self.model, self.cache, self.seq_ids = model, Watched(cache), seq_ids
        self.start = cache.lengths(seq_ids).tolist()
        self.spent = self.cache.spent

    def step(self, tokens: np.ndarray) -> np.ndarray:  # [batch]
        return self.model.next_logits(self.cache, self.seq_ids, tokens[:, None])

    def restart(self) -> None:
        for seq, length in zip(self.seq_ids, self.start, strict=True):
            self.cache.truncate(seq, length)


def compare_caches(
    batch: int,
    *,
    steps: int = 48,
    rounds: int = 3,
    block_size: int = 16,
    threads: int = 1,
    after_round: Callable[[float], object] = lambda share: None,
) -> dict:
    """Decode with both caches, step by step in turns, from prompts of 64 to 384 characters.

    Args: batch: sequences; steps: tokens that each writes in a round; threads: that BLAS may use.
    Returns: {batch, paged, contiguous, speedup, difference}: per cache tokens_per_second and the share of time of
        each part; speedup: of the paged cache, from steps side by side; difference: of the logits at worst.
    """
    model, random = Llama.load(), np.random.default_rng(0)
    prompts = random.integers(0, model.config.vocabulary_size, (batch, 384))
    lengths = np.linspace(64, 384, batch).astype(int) if batch > 1 else np.array([224])
    cache = model.new_cache(batch * (model.config.context // block_size + 1), block_size)
    ids = [cache.add() for _ in range(batch)]
    chunks = [p[:n] for p, n in zip(prompts, lengths.tolist(), strict=True)]
    first = model.next_logits(cache, ids, chunks).argmax(axis=-1)  # [batch]
    ways = {"paged": Paged(model, cache, ids), "contiguous": Contiguous(model, cache, ids)}
    times, worst = {name: [] for name in ways}, 0.0
    with limited_threads(threads):
        for turn in range(rounds + 1):
            if turn == 1:  # the first was for warming up
                for name, way in ways.items():
                    times[name].clear()
                    way.spent.update(dict.fromkeys(PARTS, 0.0))
            worst = max(worst, _round(ways, first, steps, times))
            after_round((turn + 1) / (rounds + 1))
    taken = {name: np.array(t) for name, t in times.items()}
    return {
        "batch": batch,
        "speedup": ratio(taken["contiguous"], taken["paged"]),
        "difference": worst,
        **{name: _shares(batch, taken[name], way.spent) for name, way in ways.items()},
    }


def _round(ways: dict, tokens: np.ndarray, steps: int, times: dict[str, list[float]]) -> float:
    """Some steps of both, in turns, from the prompts on; returns how far their logits are apart at worst."""
    worst = 0.0
    for step in range(steps):
        logits = {}
        for name in sorted(ways, reverse=bool(step % 2)):  # each goes first in half of the steps
            started = time.perf_counter()
            logits[name] = ways[name].step(tokens)
            times[name].append(time.perf_counter() - started)
        worst = np.maximum(worst, np.abs(logits["paged"] - logits["contiguous"]).max())  # keeps a NaN
        tokens = logits["paged"].argmax(axis=-1)
    for way in ways.values():
        way.restart()
    return float(worst)


def _shares(batch: int, times: np.ndarray, spent: dict[str, float]) -> dict[str, float]:
    shares = {part: spent[part] / float(times.sum()) for part in PARTS}
    return {
        "tokens_per_second": batch / float(np.median(times)),
        **shares,
        "network": 1 - sum(shares.values()),
    }
