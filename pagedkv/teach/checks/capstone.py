"""Checks of the capstone: the parts joined, the evening served, a pool for a budget, and a sealed fault."""

import functools
from collections import deque

import numpy as np

from pagedkv.allocator import BlockAllocator, PoolExhausted
from pagedkv.decode import AttentionPlan
from pagedkv.manager import BlockManager
from pagedkv.teach import capstone
from pagedkv.teach.capstone import Pool, Request

from ._core import Learner, Wrong, check, expect_refusal, seeded, show, sizes
from .lesson_06 import TOLERANCE, _Model


class _Package:
    """The package's parts, as `keep.parts` gives them to somebody who has kept nothing."""

    allocator, manager, plan = BlockAllocator, BlockManager, AttentionPlan


class _Pool(Pool):
    """A pool of the package's parts, which remembers who left when."""

    def __init__(self, model, num_blocks: int = 8, block_size: int = 4):
        super().__init__(_Package, model, num_blocks, block_size)
        self.left: list[tuple[str, int]] = []  # name, tokens that it held

    def __repr__(self) -> str:
        return "pool"

    def free(self, name: str) -> None:
        held = self.lengths[name]
        super().free(name)
        self.left.append((name, held))


# ---- run(model, pool, names, tokens)


class _Texts:
    """What each sequence of a pool must hold, beside the pool."""

    def __init__(self, learner: Learner, num_blocks: int = 8, block_size: int = 4):
        self.learner, self.model = learner, _Model()
        self.pool, self.texts = _Pool(self.model, num_blocks, block_size), {}

    def add(self, name: str) -> None:
        self.pool.add(name)
        self.texts[name] = []

    def fork(self, parent: str, child: str) -> None:
        self.pool.fork(parent, child)
        self.texts[child] = list(self.texts[parent])

    def run(self, new: dict[str, str], about: str) -> None:
        """Run n letters of each; the logits must be those of computing everything again."""
        names = list(new)
        tokens = np.array([self.model.tokenizer.encode(letters) for letters in new.values()])  # [batch, n]
        start = [len(self.texts[name]) for name in names]
        self.model.positions = []
        got = self.learner(self.model, self.pool, names, tokens)
        for name, row in zip(names, tokens.tolist(), strict=True):
            self.texts[name] += row
        positions = [s + i for s in start for i in range(tokens.shape[1])]
        if self.model.positions != positions:
            said = (
                f"{about}: the model was run at positions {show(self.model.positions)}, expected {positions}."
            )
            raise Wrong(said, "how many tokens stand in front of each new one?")
        shape = (len(names), self.model.config.vocabulary_size)
        if np.shape(got) != shape:
            said = f"{about}: run gave {show(got)}, expected logits of shape {shape}."
            raise Wrong(said, "whose next token will be chosen: of every row, or of every sequence?")
        for name, row in zip(names, got, strict=True):
            self._compare(name, np.asarray(row), about)

    def _compare(self, name: str, got: np.ndarray, about: str) -> None:
        right = self.model.forward_full(self.texts[name])[-1]
        if np.isnan(got).any():
            said = f"{about}: the logits of {name!r} are NaN, which stands in every slot that nobody wrote."
            raise Wrong(
                said, "does each row see its own token, and none behind it? And who carries out the copies?"
            )
        if (difference := float(np.abs(got - right).max())) > TOLERANCE:
            said = (
                f"{about}: the logits of {name!r} are off by {difference:.2g} from computing its "
                f"{len(self.texts[name])} tokens again."
            )
            raise Wrong(said, "which rows of keys has each of its tokens seen, in every layer?")


@check("the parts joined", own=(capstone.run,))
def parts_joined(learner: Learner) -> str:
    """`run(model, pool, names, tokens)`: prompts, steps of decoding, forks and refusals, against no cache at all."""
    texts = _Texts(learner)
    texts.add("night")
    texts.run({"night": "Good night"}, "the prompt of 10 tokens")
    texts.run({"night": ","}, "one token behind it")
    texts.add("day")
    texts.run({"day": "Good day"}, "a second prompt")
    texts.run({"night": " ", "day": "!"}, "both in one step, 11 and 8 tokens long")

    texts = _Texts(learner)
    texts.add("a")
    texts.run({"a": "Good night"}, "the prompt of 10 tokens")
    texts.fork("a", "b")
    texts.fork("a", "c")
    texts.run({"a": ",", "b": "!", "c": "."}, "three readers of block 2 write position 10")
    texts.run({"a": " ", "b": " ", "c": "\n"}, "one step after the copies")

    texts = _Texts(learner, num_blocks=3)
    texts.add("night")
    texts.run({"night": "Good night"}, "the prompt of 10 tokens")
    texts.add("day")
    text = texts.model.tokenizer.encode("Good day")[None]
    question = "the pool says PoolExhausted: who has to hear it?"
    expect_refusal(learner, texts.model, texts.pool, ["day"], text, error=PoolExhausted, question=question)
    texts.run({"night": ", "}, "two tokens, after another prompt was refused")

    steps = sum(_random_runs(learner, block_size) for block_size in sizes(1, 2, 4))
    return f"Prompts, steps and copies as without a cache, and {steps} random steps."


def _random_runs(learner: Learner, block_size: int, steps: int = 8) -> int:
    rng, texts = seeded(block_size), _Texts(learner, 5 + 60 // block_size, block_size)
    for step in range(steps):
        names = list(texts.texts)
        if len(names) < 3:
            texts.add(f"s{step}")
            prompt = "".join(rng.choice(list("Good night, my lord"), rng.integers(1, 7)))
            texts.run({f"s{step}": prompt}, f"a prompt of {len(prompt)} tokens, block size {block_size}")
        elif len(names) < 5:
            texts.fork(str(rng.choice(names)), f"s{step}")
        else:
            batch = rng.permutation(names)[: rng.integers(1, 6)].tolist()
            texts.run(
                dict(zip(batch, "abcdef", strict=False)), f"a step of {len(batch)}, block size {block_size}"
            )
    return steps


# ---- serve(pool, requests, run)


@functools.cache
def _solo(prompt: tuple[int, ...], new: int, seed: int) -> list[int]:
    return capstone.recompute(_Model(), Request("solo", list(prompt), new, seed))


class _TooLong(BaseException):
    """The server does not come to an end; not an Exception, so that nobody takes it for a refusal."""


class _Evening:
    """One evening at the learner's server."""

    def __init__(self, requests: list[Request], num_blocks: int, block_size: int):
        self.model = _Model()
        self.pool, self.requests = _Pool(self.model, num_blocks, block_size), requests
        self.asked = self.steps = self.tokens = self.most = 0  # a refused run was asked for, and is no step
        self.limit = 10 * sum(request.new for request in requests)

    def run(self, names: list[str], tokens: np.ndarray) -> np.ndarray:
        self.asked += 1
        if self.asked > self.limit:
            raise _TooLong
        logits = capstone.run(self.model, self.pool, names, tokens)
        self.steps += 1
        self.tokens += tokens.size
        self.most = max(self.most, len(names))
        return logits

    def serve(self, learner: Learner) -> None:
        try:
            learner(self.pool, deque(self.requests), self.run)
        except _TooLong:
            open_ones = [request.name for request in self.requests if not request.done]
            said = f"After {self.limit} runs {open_ones} are still not done."
            raise Wrong(said, "does the oldest request get on in every step?", self.strip()) from None
        for request in self.requests:
            self._text(request)
        if self.pool.lengths:
            said = f"Everybody is done, and the pool still holds {list(self.pool.lengths)}."
            raise Wrong(said, "who gives back the blocks of a request that is done?", self.strip())
        try:
            self.pool.check()
        except AssertionError as lost:
            raise Wrong(
                f"Everybody has left: {lost}.", "who took a block and is gone?", self.strip()
            ) from None

    def _text(self, request: Request) -> None:
        right = _solo(tuple(request.prompt), request.new, request.seed)
        if request.text == right:
            return
        say, name = self.pool.to_text, request.name
        if len(request.text) != request.new:
            said = f"{name} asked for {request.new} letters and got {len(request.text)}."
            raise Wrong(said, "when is a request done, and who looks?", self.strip())
        same = next(i for i, (a, b) in enumerate(zip(request.text, right, strict=True)) if a != b)
        said = (
            f"{name} got {say(request.text)!r}, alone it gets {say(right)!r}: the same up to letter {same}."
        )
        way = [held - len(request.prompt) for left, held in self.pool.left if left == name][:-1]
        if way:
            question = (
                "it gave way in the middle: what must be run again, and what must not be touched (lesson 08)?"
            )
        else:
            question = "it never gave way: whose logits were these, and from whose stream came the number?"
        raise Wrong(said, question)

    def strip(self):
        return self.pool.strip(self.requests, caption="The pool now")


@check("the evening served")
def serve_evening(learner: Learner) -> str:
    """`serve(pool, requests, run)`: twelve requests in 8 blocks, every text as alone, no block lost."""
    evening = _Evening(capstone.evening(_Model()), 8, 4)
    evening.serve(learner)
    if evening.most < 2:
        said = "All texts are right, but no step served more than one of them."
        raise Wrong(said, "what does a step cost for one sequence, and what for eight (lesson 01)?")
    for block_size in sizes(2, 4):
        _Evening(_random_requests(block_size), -(-32 // block_size), block_size).serve(learner)
    letters = sum(request.new for request in evening.requests)
    return (
        f"Twelve texts, each as alone, in 8 blocks: {letters} letters, {evening.tokens} tokens run in "
        f"{evening.steps} runs, at most {evening.most} side by side. Fewer of both is better."
    )


def _random_requests(seed: int) -> list[Request]:
    rng, encode = seeded(seed), _Model().tokenizer.encode
    prompts = [encode(text).tolist() for text in ("Good night", "Good my lord", "To be", "O")]
    return [
        Request(f"r{i}", list(prompts[rng.integers(4)]), int(rng.integers(1, 16)), seed=100 * seed + i)
        for i in range(6)
    ]


# ---- a pool for a budget


@check("a pool for the budget", wants="value")
def pool_choice(learner: Learner) -> str:
    """(block_size, num_blocks): within the budget, and the promise is kept."""
    answer = learner.value
    pair = list(answer) if isinstance(answer, tuple | list) else []
    if len(pair) != 2 or not all(type(number) is int and number > 0 for number in pair):
        raise Wrong(f"answer is {show(answer)}; it takes two whole numbers: (block_size, num_blocks).")
    block_size, num_blocks = pair
    if block_size not in capstone.BLOCK_SIZES:
        raise Wrong(f"Blocks of {block_size}: the kernel takes {', '.join(map(str, capstone.BLOCK_SIZES))}.")
    used = block_size * num_blocks * capstone.TOKEN_BYTES
    if used > capstone.BUDGET:
        raise Wrong(
            f"{num_blocks} blocks of {block_size} are {used / 2**30:.2f} GiB, "
            f"the budget is {capstone.BUDGET / 2**30:.2f}.",
            "how many bytes has a block?",
        )
    waited = capstone.first_token(capstone.replay(block_size, num_blocks))
    if waited > capstone.PROMISE:
        raise Wrong(
            f"With {num_blocks} blocks of {block_size}, 95 of 100 requests wait up to {waited:.2f} s for their first "
            f"token; promised is {capstone.PROMISE:g} s.",
            "what are the others waiting for, and which part of each block is idle?",
        )
    return f"{used / 2**30:.2f} GiB, and 95 of 100 see their first token within {waited:.2f} s."


# ---- a sealed fault


@check("a sealed fault", wants="value")
def sealed_fault(learner: Learner) -> str:
    """(number, letter): which fault that pool has."""
    answer = learner.value
    pair = list(answer) if isinstance(answer, tuple | list) else []
    if len(pair) != 2 or type(pair[0]) is not int or type(pair[1]) is not str:
        raise Wrong(f'answer is {show(answer)}; it takes a number and a letter, such as (1, "a").')
    number, letter = pair
    if number not in range(1, 7) or letter not in list("abcdef"):
        raise Wrong(f"answer is {show(answer)}; the pools are 1 to 6, the faults a to f.")
    if not capstone.has_fault(number, letter):
        raise Wrong(
            f"Pool {number} does not do what {letter} says.",
            "which rule is broken first, by which call, and what does the sound pool 0 show after the same call?",
        )
    return f"Pool {number} has fault {letter}. Say in two sentences what you saw; the letter alone could be luck."
