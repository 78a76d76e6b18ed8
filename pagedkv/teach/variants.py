"""Other numbers for graded work: the questions by hand of lessons 02, 03 and 06, drawn anew for each variant.

Variant 0 is the story, with the questions as the lessons ask them. Every other number draws texts, a block size and
lengths of its own; the answers come from the engine, so a question cannot be at odds with its check.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..allocator import BlockAllocator
from ..block_table import slots_of
from . import story

TEXTS = {
    **story.REQUESTS,
    "even": "Good even",
    "lord": "Good my lord",
    "lady": "Good sweet lady",
    "adieu": "Adieu",
    "farewell": "Farewell, sir",
    "welcome": "Welcome hither",
}
BLOCK_SIZES = (3, 5, 6, 7)


@dataclass(frozen=True)
class FreeList:
    """02: a full pool, texts that leave, and a request that is refused."""

    block_size: int
    texts: dict[str, str]
    leaving: tuple[str, ...]  # in this order
    refused: int  # blocks

    @property
    def tables(self) -> dict[str, list[int]]:
        """The blocks of each text: the pool has as many as they need together."""
        needs = [-(-len(text) // self.block_size) for text in self.texts.values()]
        pool = BlockAllocator(sum(needs))
        return {name: pool.allocate(n).tolist() for name, n in zip(self.texts, needs, strict=True)}

    @property
    def free(self) -> list[int]:
        """The free list when they have left, and also after the refusal."""
        tables = self.tables
        pool = BlockAllocator(sum(map(len, tables.values())))
        pool.allocate(pool.num_blocks)
        for name in self.leaving:
            pool.release(tables[name])
        return pool.queue()

    @property
    def answer(self) -> tuple[list[int], list[int]]:
        return self.free, self.free

    def question(self) -> tuple[str, str]:
        lives = ", ".join(f"{name} `{table}`" for name, table in self.tables.items())
        first, second = self.leaving
        return (
            f"The pool is full: {lives}. What comes back goes to the front of the free list, as one group in "
            f"its order. **(1)** {first.capitalize()} leaves, then {second}. **(2)** A request for "
            f"{self.refused} blocks comes and is refused. Write the free list after (1) and after (2).",
            "answer = ...  # ([…], […]): after (1), after (2)",
        )


@dataclass(frozen=True)
class Slots:
    """03: positions of a text whose table is given."""

    block_size: int
    table: list[int]
    positions: list[int]

    @property
    def slots(self) -> list[int]:
        return slots_of(self.table, self.positions, self.block_size).tolist()

    @property
    def answer(self) -> list[int]:
        return self.slots

    def question(self) -> tuple[str, str]:
        *some, last = map(str, self.positions)
        length = self.positions[-1] + 1
        return (
            f"The table of a text of {length} tokens is `{self.table}`, a block has {self.block_size} "
            f"slots. Write the slots of positions {', '.join(some)} and {last}.",
            f"answer = ...  # [slot of {', of '.join((*some, last))}]",
        )


@dataclass(frozen=True)
class SharedBlocks:
    """06: answers forked from one prompt, in blocks of two sizes."""

    prompt: int  # tokens
    answers: int
    length: int  # tokens of each answer
    sizes: tuple[int, int]

    def blocks(self, block_size: int) -> tuple[int, int]:
        """In use at the end: without sharing, and with it."""
        return story.answer_blocks(block_size, prompt=self.prompt, answers=self.answers, length=self.length)

    @property
    def answer(self) -> tuple[int, ...]:
        return tuple(self.blocks(size)[1] for size in self.sizes)

    def question(self) -> tuple[str, str]:
        small, large = self.sizes
        return (
            f"A prompt of {self.prompt} tokens, {self.answers} answers of {self.length} tokens each, forked from it. "
            f"How many blocks are in use at the end **(1)** in blocks of {small} and **(2)** in blocks of {large}?",
            f"answer = ...  # (in blocks of {small}, in blocks of {large})",
        )


def free_list(variant: int) -> FreeList:
    """The case of lesson 02's question by hand."""
    if variant == 0:
        return FreeList(story.BLOCK_SIZE, story.REQUESTS, ("night",), 4)
    rng, names = _drawn(variant, 2)
    block_size = int(rng.choice(BLOCK_SIZES))
    case = FreeList(block_size, {name: TEXTS[name] for name in names}, (names[0], names[2]), 0)
    return FreeList(case.block_size, case.texts, case.leaving, len(case.free) + int(rng.integers(1, 3)))


def slots(variant: int) -> Slots:
    """The case of lesson 03's question by hand."""
    if variant == 0:
        return Slots(story.BLOCK_SIZE, story.morrow_goes_on()[0], [0, 4, 11, 12])
    rng, _ = _drawn(variant, 3)
    block_size = int(rng.choice(BLOCK_SIZES))
    table = []
    while table == sorted(table):  # reading in the order of the ids must show
        table = rng.permutation(story.NUM_BLOCKS)[:3].tolist()
    last = 2 * block_size + int(rng.integers(1, block_size))
    return Slots(block_size, table, [0, block_size, 2 * block_size - 1, last])


def shared_blocks(variant: int) -> SharedBlocks:
    """The case of lesson 06's question by hand."""
    if variant == 0:
        return SharedBlocks(len(story.NIGHT), len(story.ANSWERS), 40, (4, 16))
    rng, _ = _drawn(variant, 6)
    small, large = int(rng.choice(BLOCK_SIZES)), int(rng.choice([12, 16, 20]))
    prompt = 2 * small + int(rng.integers(1, small))  # two full blocks and a part of a third
    return SharedBlocks(prompt, int(rng.integers(3, 7)), int(rng.integers(30, 61)), (small, large))


BY_HAND = {"free_list": free_list, "slots_by_hand": slots, "shared_blocks": shared_blocks}


def question(exercise: str, variant: int) -> tuple[str, str] | None:
    """The text and the stub of a question by hand, or None where an exercise is the same in every variant.

    Args: exercise: the name of its check; variant: 1 and up.
    """
    case = BY_HAND.get(exercise)
    return case(variant).question() if case else None


def answer(exercise: str, variant: int) -> object | None:
    """The right answer to a question by hand, or None where an exercise is the same in every variant."""
    case = BY_HAND.get(exercise)
    return case(variant).answer if case else None


def _drawn(variant: int, lesson: int) -> tuple[np.random.Generator, Sequence[str]]:
    """The random numbers of one question, and three names for it."""
    rng = np.random.default_rng([2023, variant, lesson])
    return rng, rng.choice(list(TEXTS), 3, replace=False).tolist()
