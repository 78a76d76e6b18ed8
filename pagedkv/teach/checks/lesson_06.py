"""Checks of lesson 06: one decode step, top_p, blocks by hand, and a step of beam search over the cache."""

import copy
import functools

import numpy as np

from pagedkv.attention import softmax
from pagedkv.cache import PagedKVCache
from pagedkv.lm import Llama
from pagedkv.lm.generate import beam_search, best, keep_top_p
from pagedkv.teach import story, variants

from ._core import SETTING, Learner, Wrong, check, same, seeded, show

TOLERANCE = 1e-4  # of logits: float32 computed in another order


# ---- decode_step(model, cache, seq_ids, tokens)


class _Model(Llama):
    """The shipped model; it remembers at which positions it was run."""

    def __init__(self):
        self.__dict__.update(copy.copy(_shipped().__dict__))
        self.positions: list[int] = []

    def decode(self, tokens, positions, attend, *wanted):
        self.positions = np.ravel(positions).tolist()
        return super().decode(tokens, positions, attend, *wanted)

    def __repr__(self) -> str:
        return "model"


@functools.cache
def _shipped() -> Llama:
    return Llama.load()


class _Cache(PagedKVCache):
    def __repr__(self) -> str:
        return "cache"


def _cache(model: Llama, num_blocks: int, block_size: int) -> _Cache:
    c = model.config
    shape = (num_blocks, block_size, c.num_kv_heads, c.head_dim)
    return _Cache(*shape, num_layers=c.num_layers, poison=True)


def _decodes(
    learner: Learner, model: _Model, cache: _Cache, texts: dict[str, list[int]], letters: str
) -> None:
    """One step for all sequences of `texts`, which grow by their letter; each row equals its full recompute."""
    ids, new = list(texts), model.tokenizer.encode(letters)  # [batch]
    lengths = [len(texts[name]) for name in ids]
    model.positions = []
    got = learner(model, cache, ids, new[:, None])
    told, shape = list(model.positions), np.shape(got)
    wanted = (len(ids), model.config.vocabulary_size)
    if shape != wanted:
        raise Wrong(
            f"decode_step gave {show(got) if not shape else f'shape {shape}'} for a batch of {len(ids)}, "
            f"expected logits of shape {wanted}.",
            "how many tokens does each sequence run in this step, and what does the network say about each?",
        )
    after = [cache.length(name) for name in ids]
    if after != [n + 1 for n in lengths]:
        raise Wrong(
            f"Sequences of {show(lengths)} tokens hold {show(after)} after one step.",
            "which call takes a slot for a token, and how often may a step make it?",
        )
    for name, token in zip(ids, new.tolist(), strict=True):
        texts[name].append(token)
    full = np.array([model.forward_full(texts[name])[-1] for name in ids])  # [batch, vocabulary]
    apart = np.abs(np.asarray(got, float) - full).max(axis=1)  # [batch]
    bad = np.flatnonzero(~(apart <= TOLERANCE))
    if not bad.size:
        return
    row = int(bad[0])
    said = model.tokenizer.decode(texts[ids[row]])
    far = "are NaN" if np.isnan(apart[row]) else f"are off by {apart[row]:.2g}"
    seen = (
        f"Logits behind {said!r} {far}, compared with a full recompute ({TOLERANCE:g} is allowed).\n"
        f"lengths before the step {show(lengths)}, positions that the network was told {show(told)}"
    )
    if told == lengths:
        raise Wrong(seen, "what must be in the cache before the step's queries read it?")
    raise Wrong(
        seen, "the first letter of a text has position 0: which position has a letter behind ten others?"
    )


@check("decode_step", own=(Llama.next_logits, Llama.forward))
def decode_step(learner: Learner) -> str:
    """`decode_step(model, cache, seq_ids, tokens)`: one more token per sequence; logits [batch, vocabulary]."""
    model = _Model()
    cache, texts = _cache(model, 40, 4), {}
    for name, text in (("night", story.NIGHT), ("day", story.DAY), ("morrow", story.MORROW)):
        texts[name] = model.tokenizer.encode(text).tolist()
        cache.add(name)
        model.next_logits(cache, name, [texts[name]])
    _decodes(learner, model, cache, {"night": texts["night"]}, ",")
    _decodes(learner, model, cache, {"night": texts["night"]}, " ")
    for letters in (",.;", "\n A"):  # ragged, and not in the order in which they were added
        batch = {name: texts[name] for name in ("morrow", "night", "day")}
        _decodes(learner, model, cache, batch, letters)
    cache.fork("day", ["twin"])
    texts["twin"] = list(texts["day"])
    _decodes(learner, model, cache, {"twin": texts["twin"], "day": texts["day"]}, "xy")
    return (
        f"Every row as a full recompute says, to {TOLERANCE:g}: alone, in a ragged batch, and behind a fork."
    )


# ---- top_p(probabilities, p)

BY_HAND = [0.4, 0.3, 0.2, 0.1]


def _keeps(
    learner: Learner, probabilities: list[float], p: float, expected: np.ndarray, question: str
) -> None:
    got = learner(np.array(probabilities), p)
    said = (
        f"top_p({show(probabilities)}, {p:g})"
        if len(probabilities) < 9
        else f"top_p(65 random ones, {p:.3g})"
    )
    if np.shape(got) != np.shape(probabilities):
        raise Wrong(
            f"{said} gave {show(got)}, expected one probability per token, in the same order.",
            "a token that is dropped: what is its probability now?",
        )
    got = np.asarray(got, float)
    if np.allclose(got, expected, rtol=0, atol=1e-9):
        return
    seen = f"{said} gave {show(got.round(4))}, expected {show(expected.round(4))}."
    if len(probabilities) > 8:
        seen = f"{said} keeps {np.count_nonzero(got)} tokens of {len(got)}, expected {np.count_nonzero(expected)}."
    kept, wanted = got != 0, expected != 0
    if not np.isfinite(got).all() or not kept.any():
        raise Wrong(seen, "what is left to draw from, if even the likeliest token is more than p?")
    if (kept == wanted).all():
        raise Wrong(seen, f"the ones you keep sum to {got.sum():.4g}: what must probabilities sum to?")
    raise Wrong(seen, question)


@check("top_p", own=(keep_top_p,))
def top_p(learner: Learner) -> str:
    """`top_p(probabilities, p)`: the likeliest until they reach p, the crossing one included, scaled to sum to 1."""
    crossing = "0.4 alone is below p: does the token that crosses p stay?"
    one = "the first token reaches p alone: who else is needed?"
    order = "likeliest first, or first in the alphabet? and where does each go back to?"
    _keeps(learner, BY_HAND, 0.5, np.array([4 / 7, 3 / 7, 0, 0]), crossing)
    _keeps(learner, BY_HAND, 0.01, np.array([1.0, 0, 0, 0]), one)
    _keeps(learner, [0.1, 0.4, 0.2, 0.3], 0.5, np.array([0, 4 / 7, 0, 3 / 7]), order)
    _keeps(learner, [0.5, 0.25, 0.125, 0.125], 0.5, np.array([1.0, 0, 0, 0]), one)
    _keeps(learner, [0.25, 0.125, 0.5, 0.125], 0.75, np.array([1 / 3, 0, 2 / 3, 0]), order)
    _keeps(learner, BY_HAND, 1.0, np.array(BY_HAND), "p is 1: may anybody be left out?")
    rng = seeded(6)
    for _ in range(40):
        row, p = rng.dirichlet(np.full(65, 0.2)), float(rng.uniform(0.01, 0.99))
        _keeps(learner, row.tolist(), p, keep_top_p(row, p), crossing)
    return "Two tokens at 0.5, one at 0.01, and 40 random rows as the package keeps them."


# ---- by hand


@check("blocks by hand", wants="value")
def shared_blocks(learner: Learner) -> str:
    """Blocks of answers to a forked prompt, in blocks of two sizes (four of 40 tokens to 10, blocks of 4 and 16)."""
    case, answer = variants.shared_blocks(SETTING.variant), learner.value
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        wants = " and ".join(f"in blocks of {size}" for size in case.sizes)
        raise Wrong(f"answer is {show(answer)}; it takes two numbers: {wants}.")
    for given, size in zip(answer, case.sizes, strict=True):
        unshared, shared = case.blocks(size)
        if same(given, shared) and not isinstance(given, bool):
            continue
        rounded_up = unshared - (case.answers - 1) * -(-case.prompt // size)
        if same(given, unshared):
            question = "which blocks hold the prompt's letters for all of them, to the end?"
        elif same(given, rounded_up):
            question = "the prompt's last block is not full: who writes into it next, and what happens then?"
        elif same(given, case.answers * -(-case.length // size)):
            question = "how long is a text, its prompt included?"
        else:
            whole = f"one answer of {case.prompt + case.length} tokens"
            question = f"how many blocks has {whole}, and how many of these are full of the prompt?"
        raise Wrong(f"You say {show(given)} in blocks of {size}.", question)
    (small, saved), (large, saved_too) = ((n, case.blocks(n)[0] - case.blocks(n)[1]) for n in case.sizes)
    before = " and ".join(str(case.blocks(n)[0]) for n in case.sizes)
    return f"{before} without sharing: blocks of {small} save {saved}, blocks of {large} save {saved_too or 'none'}."


# ---- beam_step(cache, seq_ids, texts, scores, logits, width)


class _Beams:
    """A search that copies everything: texts are lists, scores are sums of logs. The cache is not asked."""

    def __init__(self, prompt: list[int]):
        self.prompt, self.texts, self.scores = prompt, [[]], np.zeros(1)

    def best(self, logits: np.ndarray, width: int) -> "_Beams":
        logs = logits - softmax(logits)[1][:, None]  # [beams, vocabulary]
        return self.chosen(self.scores[:, None] + logs, width)

    def chosen(self, scores: np.ndarray, width: int) -> "_Beams":
        order = np.argsort(-scores, axis=None, kind="stable")[:width]
        after = _Beams(self.prompt)
        pairs = [divmod(int(i), scores.shape[1]) for i in order]
        after.texts = [[*self.texts[parent], token] for parent, token in pairs]
        after.scores, after.parents = scores.ravel()[order], [parent for parent, _ in pairs]
        return after


def _search(
    learner: Learner, prompt: list[int], block_size: int, widths: list[int], all_logits: list
) -> None:
    """Drive a whole search step by step; after each, texts, scores, cached tokens and blocks must be right."""
    cache = _Cache(80, block_size, 1, 1, poison=True)
    twin = PagedKVCache(80, block_size, 1, 1)  # the same search by reorder, for the number of blocks
    ids, twins = [cache.add("start")], [twin.add("start")]
    _feed(cache, ids, [prompt])
    _feed(twin, twins, [prompt])
    beams = _Beams(prompt)
    for logits, width in zip(all_logits, widths, strict=True):
        before, beams = beams, beams.best(logits, width)
        ids = _step(learner, cache, ids, before, beams, logits, width)
        twins += twin.fork(twins[0], width - len(twins)) if width > len(twins) else []
        twin.reorder(twins, beams.parents + [0] * (len(twins) - width))
        if cache.num_free != twin.num_free:
            used, wanted = cache.num_blocks - cache.num_free, twin.num_blocks - twin.num_free
            raise Wrong(
                f"The beams use {used} blocks, expected {wanted}: parents {beams.parents}.",
                "which blocks does a beam need that its parent does not have?",
            )
        for where, names in ((cache, ids), (twin, twins)):
            _feed(where, names, [[text[-1]] for text in beams.texts])


def _step(learner, cache, ids, before: _Beams, expected: _Beams, logits, width) -> list:
    given = learner(
        cache, list(ids), [list(t) for t in before.texts], before.scores.copy(), logits.copy(), width
    )
    if not isinstance(given, tuple) or len(given) != 3:
        raise Wrong(f"beam_step gave {show(given)}, expected three things: seq_ids, texts, scores.")
    new_ids, texts, scores = (
        list(given[0]),
        [list(map(int, t)) for t in given[1]],
        np.asarray(given[2], float),
    )
    state = f"scores before {show(before.scores.round(3))}, texts {before.texts}, width {width}"
    if (
        texts != expected.texts
        or np.shape(scores) != (width,)
        or not np.allclose(scores, expected.scores, atol=1e-6)
    ):
        raise Wrong(
            f"beam_step chose {texts} with scores {show(scores.round(3))}, "
            f"expected {expected.texts} with {show(expected.scores.round(3))}.\n{state}",
            _why(before, expected, logits, width, texts, scores),
        )
    if len(new_ids) != width or len(set(new_ids)) < width:
        raise Wrong(
            f"beam_step gave the sequences {show(new_ids)} for {width} beams.",
            "two beams go on from one parent and write different letters: can they be one sequence?",
        )
    if left := [name for name in cache.seq_ids if name not in new_ids]:
        raise Wrong(
            f"After the step the cache still holds {show(left)} beside the {width} beams.",
            "who will ever give back the blocks of a beam that nobody continues?",
        )
    if gone := [name for name in new_ids if name not in cache.seq_ids]:
        raise Wrong(
            f"beam_step gave {show(gone)}, which the cache does not know any more.",
            "in which order must you take and let go?",
        )
    for name, text in zip(new_ids, expected.texts, strict=True):
        held, wanted = cache.gather(0, name)[0][:, 0, 0].tolist(), before.prompt + text[:-1]
        if held != wanted:
            raise Wrong(
                f"The beam that goes on as {text} stands on the cached tokens {show(held)}, expected {show(wanted)}"
                f" (parents {expected.parents}).",
                "beams may change places: was the parent still what it had been when you took it?",
            )
    return new_ids


def _why(before: _Beams, expected: _Beams, logits, width: int, texts: list, scores) -> str:
    """The question that fits a wrong choice."""
    p = softmax(logits)[0]
    if (
        len(scores) == len(texts)
        and sorted(map(tuple, texts)) == sorted(map(tuple, expected.texts))
        and (np.diff(scores) > 0).any()
    ):
        return "which beam should come first?"
    for wrong in (before.scores[:, None] + p, np.exp(before.scores)[:, None] + p):
        if texts == before.chosen(wrong, width).texts:
            return "a letter of probability 0.5 behind a text of 0.5: how likely are both together?"
    if texts == before.chosen(before.scores[:, None] + logits, width).texts:
        return "logits of two beams: are they on one scale before each row is made to sum to 1?"
    if len(set(expected.parents)) < width:
        return "may two of the best continue the same parent, and may a parent have no child?"
    return "which texts of all beams together are the likeliest, each with its whole past?"


def _feed(cache: PagedKVCache, ids: list, tokens: list[list[int]]) -> None:
    """Keys and values that are the tokens' own numbers, so that a cache can be read like a text."""
    flat = np.concatenate([np.asarray(t, np.float32) for t in tokens])[None, :, None, None]  # [1, n, 1, 1]
    cache.append(ids, flat, flat, [len(t) for t in tokens])


@check("beam_step", forbidden=(best, beam_search))
def beam_step(learner: Learner) -> str:
    """`beam_step(cache, seq_ids, texts, scores, logits, width)` → new seq_ids, texts and scores, best first."""
    prompt = [7, 8, 9, 7, 8, 9, 7, 8, 9, 7]  # ten tokens, like the story's
    log = np.log
    two = [  # [beams, vocabulary]: two beams, then both of the best from the second, then a swap
        log([[0.6, 0.3, 0.1]]),
        log([[0.4, 0.3, 0.3], [0.9, 0.05, 0.05]]),
        log([[0.4, 0.35, 0.25], [0.5, 0.4, 0.1]])
        + np.array([[5.0], [0.0]]),  # logits are not logs of probabilities
        log([[0.2, 0.2, 0.6], [0.1, 0.8, 0.1]]),
    ]
    _search(learner, prompt, 4, [2, 2, 2, 2], two)
    swaps = [log([[0.5, 0.3, 0.2]]), log([[0.34, 0.33, 0.33], [0.02, 0.96, 0.02], [0.9, 0.05, 0.05]])]
    _search(learner, prompt, 4, [3, 3], swaps)
    rng, steps = seeded(6), 0
    for width in (1, 2, 3, 5):
        for block_size in (1, 4, 16):
            all_logits = [rng.normal(size=(width if i else 1, 8)) * 3 + rng.normal() for i in range(8)]
            _search(learner, prompt, block_size, [width] * 8, all_logits)
            steps += 8
    return f"Two small searches, and {steps} random steps as a search takes them that copies everything."
