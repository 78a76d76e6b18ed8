"""Writing text over a paged cache: greedy, sampling, several samples of one prompt, beam search.

Each way is a generator that yields after every step, so a caller can show the text as it grows and keep what was
written when the pool runs out. A prompt is computed once and forked; whatever happens, all sequences are freed at
the end. The last token of a text is chosen but not run: its keys and values would serve nobody.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ..allocator import Event, whole_number
from ..attention import softmax
from ..block_table import SeqId
from ..cache import PagedKVCache
from ..manager import BlockManager
from .model import Llama

# --- choosing a token ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How logits become probabilities: temperature first, then top_k, then top_p.

    Args: temperature: above 0; below 1 sharpens, above 1 flattens; top_k: keep the k likeliest; top_p: keep the
        likeliest until their probabilities reach p, the token that crosses p included, so that one always stays.
    Raises: ValueError for values outside these ranges.
    Source: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration" (top_p).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        if not 0 < self.temperature < np.inf:
            raise ValueError(f"temperature must be above 0, got {self.temperature!r}")
        if self.top_k is not None:
            whole_number("top_k", self.top_k, minimum=1)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p!r}")

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Logits to probabilities: float [..., vocabulary]; each row sums to 1."""
        logits = np.asarray(logits, np.float64)
        peak = logits.max(axis=-1, keepdims=True)
        weights, _ = softmax((logits - peak) / self.temperature)  # [..., vocabulary]  peak first: no overflow
        if self.top_k is not None:
            weights = keep_top_k(weights, self.top_k)
        if self.top_p is not None:
            weights = keep_top_p(weights, self.top_p)
        return weights


def keep_top_k(probabilities: np.ndarray, k: int) -> np.ndarray:  # [..., vocabulary]
    """The k likeliest of each row, scaled to sum to 1; among equals the lower token stays."""
    return _keep(probabilities, np.arange(probabilities.shape[-1]) < k)


def keep_top_p(probabilities: np.ndarray, p: float) -> np.ndarray:  # [..., vocabulary]
    """The likeliest of each row until their sum reaches p, the one that crosses it included, scaled to sum to 1."""
    ordered = -np.sort(-probabilities, axis=-1)  # [..., vocabulary]  likeliest first
    before = (
        np.cumsum(ordered, axis=-1) - ordered
    )  # what stands in front of each: 0 for the first, which stays
    return _keep(probabilities, before < p * (1 - 1e-12))  # a sum of floats may miss p by a hair


def _keep(probabilities: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Zero what is not kept; `kept` speaks of the tokens in order of likelihood."""
    order = np.argsort(-probabilities, axis=-1, kind="stable")  # [..., vocabulary]
    mask = np.zeros(probabilities.shape, bool)
    np.put_along_axis(mask, order, np.broadcast_to(kept, order.shape), axis=-1)
    rest = np.where(mask, probabilities, 0)
    return rest / rest.sum(axis=-1, keepdims=True)


def draw(probabilities: np.ndarray, random: np.random.Generator) -> int:  # [vocabulary]
    """One token, by one uniform number."""
    total = np.cumsum(probabilities)  # [vocabulary]
    return int(np.searchsorted(total, random.random() * total[-1], side="right"))


# --- ways to write ------------------------------------------------------------------------------------------------


def greedy(
    model: Llama, cache: PagedKVCache, prompt: ArrayLike, num_tokens: int, *, end: int | None = None
) -> Iterator[int]:
    """Always the likeliest next token. The simplest of the three: prefill once, then one token at a time.

    Args: prompt: tokens [length], at least one; num_tokens: how many to write at most; end: the token after which
        nothing more is written.
    Yields: a token per step.
    Raises: ValueError for a prompt that is empty or with `num_tokens` longer than the context; PoolExhausted, after
        what could be written.
    """
    prompt = checked_prompt(model, prompt, num_tokens)
    with _prefilled(model, cache, prompt) as (seq_ids, logits):
        for step in range(num_tokens):
            token = int(np.argmax(logits[0]))  # logits [1, vocabulary]
            yield token
            if token == end:
                break
            if step < num_tokens - 1:
                logits = model.next_logits(cache, seq_ids, [[token]])


def sample(
    model: Llama,
    cache: PagedKVCache,
    prompt: ArrayLike,
    num_tokens: int,
    *,
    num_samples: int = 1,
    sampling: Sampling | None = None,
    random: np.random.Generator | None = None,
    end: int | None = None,
) -> Iterator[np.ndarray]:
    """Several texts that continue one prompt; its blocks are shared by all of them.

    Each sample draws from a random stream of its own, so its text does not depend on how many others there are.

    Args: prompt, num_tokens: as in greedy; num_samples: how many texts; sampling: Sampling() if None;
        random: where the streams come from, np.random.default_rng() if None; end: the token after which a text is
        complete: its blocks are freed, and it is yielded again until all are.
    Yields: a token per sample and step, int64 [num_samples].
    Raises: as greedy.
    Source: Kwon et al. 2023, section 4.4, parallel sampling.
    """
    prompt = checked_prompt(model, prompt, num_tokens)
    num_samples = whole_number("num_samples", num_samples, minimum=1)
    sampling = Sampling() if sampling is None else sampling
    streams = (np.random.default_rng() if random is None else random).spawn(num_samples)
    with _prefilled(model, cache, prompt) as (seq_ids, logits):
        _fork(cache, seq_ids, num_samples)
        logits = np.repeat(logits, num_samples, axis=0)  # [num_samples, vocabulary]
        writing = np.arange(num_samples)  # which samples the rows of logits belong to
        tokens = np.full(num_samples, -1 if end is None else end)  # [num_samples]
        for step in range(num_tokens):
            rows = zip(sampling.probabilities(logits), writing, strict=True)
            tokens[writing] = [draw(row, streams[i]) for row, i in rows]
            yield tokens.copy()
            ended = tokens[writing] == end  # [rows]
            for row in np.flatnonzero(ended)[::-1]:
                cache.free(seq_ids.pop(row))
            writing = writing[~ended]
            if not writing.size:
                break
            if step < num_tokens - 1:
                logits = model.next_logits(cache, seq_ids, tokens[writing, None])


@dataclass(frozen=True)
class Beams:
    """One step of a beam search, the best beam first."""

    texts: np.ndarray  # int64 [width, steps]   the tokens written so far
    scores: np.ndarray  # float64 [width]       sums of log-probabilities
    parents: np.ndarray  # int64 [width]        the row of the step before that each beam continues


def beam_search(
    model: Llama, cache: PagedKVCache, prompt: ArrayLike, num_tokens: int, width: int = 4
) -> Iterator[Beams]:
    """Keep the `width` likeliest texts, step by step.

    A beam that wins twice is forked, a beam that loses is freed: `reorder` moves rows of the block table. Nothing is
    copied but shared last blocks that two beams are about to fill differently.

    Args: prompt, num_tokens: as in greedy; width: beams, at most the vocabulary.
    Yields: Beams.
    Raises: as greedy.
    Source: Kwon et al. 2023, section 4.4 and figure 9.
    """
    prompt = checked_prompt(model, prompt, num_tokens)
    width = whole_number("width", width, minimum=1)
    if width > model.config.vocabulary_size:
        raise ValueError(f"{width} beams cannot start from {model.config.vocabulary_size} different tokens")
    with _prefilled(model, cache, prompt) as (seq_ids, logits):
        beams = Beams(np.zeros((1, 0), np.int64), np.zeros(1), np.zeros(1, np.int64))
        for step in range(num_tokens):
            beams = best(beams, logits, width)
            yield beams
            if step == num_tokens - 1:
                break
            if step == 0:
                _fork(cache, seq_ids, width)
            else:
                cache.reorder(seq_ids, beams.parents)
            logits = model.next_logits(cache, seq_ids, beams.texts[:, -1:])  # [width, vocabulary]


def best(beams: Beams, logits: np.ndarray, width: int) -> Beams:  # logits [beams, vocabulary]
    """The `width` likeliest continuations by one token; among equals the earlier beam and the lower token win."""
    logits = logits.astype(np.float64)
    scores = beams.scores[:, None] + logits - softmax(logits)[1][:, None]  # [beams, vocabulary]
    chosen = np.argsort(-scores, axis=None, kind="stable")[:width]  # [width]
    parents, tokens = np.divmod(chosen, logits.shape[1])  # [width] each
    texts = np.column_stack([beams.texts[parents], tokens])  # [width, steps + 1]
    return Beams(texts, scores.ravel()[chosen], parents)


# --- what they have in common -------------------------------------------------------------------------------------


def checked_prompt(model: Llama, prompt: ArrayLike, num_tokens: int) -> np.ndarray:
    """The prompt as an array, or a ValueError before a block is taken."""
    prompt, num_tokens = np.asarray(prompt), whole_number("num_tokens", num_tokens)
    if not prompt.size:
        raise ValueError("the prompt is empty: there is nothing to continue")
    if len(prompt) + num_tokens > model.config.context:
        total = f"a prompt of {len(prompt)} and {num_tokens} new tokens"
        raise ValueError(f"{total} exceed the model's context of {model.config.context}")
    return prompt


@contextmanager
def _prefilled(
    model: Llama, cache: PagedKVCache, prompt: np.ndarray
) -> Iterator[tuple[list[SeqId], np.ndarray]]:
    """A sequence with the prompt, as a list that may grow, and the logits behind it; the whole list is freed."""
    seq_ids = [cache.add()]
    try:
        yield seq_ids, model.next_logits(cache, seq_ids, [prompt])  # [1, vocabulary]
    finally:
        cache.free(seq_ids)


def _fork(cache: PagedKVCache, seq_ids: list[SeqId], total: int) -> None:
    """Fork the only sequence of a list until there are `total`."""
    if total > 1:
        seq_ids += cache.fork(seq_ids[0], total - 1)


class Usage:
    """Counts blocks while others work: an observer, attached with `manager.observers.append(Usage(manager))`.

    `peak` is the most blocks in use at once, `shared` the most of them with several owners, `unshared` the most that
    the same sequences would need if each had its own, `copied` how many were copied before a write.
    """

    def __init__(self, manager: BlockManager):
        self.manager = manager
        self.peak = self.shared = self.unshared = self.copied = 0

    def __call__(self, event: Event) -> None:
        owners = self.manager.allocator.ref_counts  # [num_blocks]
        self.peak = max(self.peak, int(np.count_nonzero(owners)))
        self.shared = max(self.shared, int(np.count_nonzero(owners > 1)))
        self.unshared = max(self.unshared, int(owners.sum()))  # an owner is an entry in some block table
        self.copied += len(event.blocks.get("copies", ()))
