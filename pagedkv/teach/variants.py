"""Other numbers for graded work: questions by hand of lessons 02, 03, 06 and 08 to 11, drawn anew for each variant.

Variant 0 is the story, with the questions as the lessons ask them. Every other number draws texts, a block size and
lengths of its own; the answers come from the engine, so a question cannot be at odds with its check.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..allocator import BlockAllocator, PoolExhausted
from ..block_table import slots_of
from ..metrics import Metrics
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


@dataclass(frozen=True)
class Walls:
    """08, 09, 10: answers forked from one prompt write until a call is refused; the last gives way; and once more."""

    block_size: int
    num_blocks: int
    prompt: str
    answers: str  # one letter each, in the order of coming

    def wall(self, number: int) -> tuple[story.TextPool, str, Metrics]:
        """The pool when a call is refused for the `number`-th time, who runs, and what was counted since the fork."""
        pool, running = story.TextPool(self.num_blocks, self.block_size), self.answers
        pool.add(running[0], self.prompt)
        pool.fork(running[0], list(running[1:]))
        counted = Metrics(pool.manager)
        while True:
            try:
                pool.append(self._next_letters(pool, running))
            except PoolExhausted:
                if counted.refused == number:
                    return pool, running, counted
                pool.free(running[-1])
                running = running[:-1]

    def put_off(self) -> story.TextPool:
        """Behind the first wall: the last answer is gone, and the others have written their next token."""
        pool, running, _ = self.wall(1)
        pool.free(running[-1])
        pool.append(self._next_letters(pool, running[:-1]))
        return pool

    def _next_letters(self, pool: story.TextPool, running: str) -> dict[str, str]:
        written = pool.manager.length(running[0]) - len(self.prompt)
        signs = dict(zip(self.answers, ",!.;?", strict=False))
        return {name: (" now "[(written - 1) % 5] if written else signs[name]) for name in running}

    def _told(self) -> str:
        first, *others = self.answers
        return (
            f"A pool has {self.num_blocks} blocks of {self.block_size}. `{self.prompt}`, {len(self.prompt)} tokens, "
            f"is answer {first}; {', '.join(others)} are forked from it. They go on by one token each, all in one "
            "call, until the call is refused: the first wall. The last of them gives way, and"
        )


class GivingWay(Walls):
    """08: who gives way at both walls, what comes free by it, what must be computed again."""

    @property
    def answer(self) -> tuple[tuple[str, int, int], ...]:
        rows = []
        for number in (1, 2):
            pool, running, _ = self.wall(number)
            tokens = pool.manager.length(running[-1])
            rows.append((running[-1], len(pool.free(running[-1])), tokens))
        return tuple(rows)

    def question(self) -> tuple[str, str]:
        return (
            f"{self._told()} the others go on to the second wall. At each wall: who gives way, how many blocks come "
            "free by that, and how many tokens must be computed again when it comes back (if nothing of it is found "
            "in a prefix cache)?",
            "answer = ...  # ((who, blocks that come free, tokens again), (the same for the second wall))",
        )


@dataclass(frozen=True)
class Kept(Walls):
    """09: what the texts behind the first wall keep of a damaged snapshot."""

    damages: tuple[tuple[int, ...], ...] = ()  # blocks

    @property
    def answer(self) -> tuple[tuple[int, ...], ...]:
        pool = self.put_off()
        return tuple(tuple(story.tokens_left(pool, *damage).values()) for damage in self.damages)

    def question(self) -> tuple[str, str]:
        pool = self.put_off()
        names = ", ".join(pool.manager.seq_ids)
        tables = ", ".join(f"{name} `{pool.table(name)}`" for name in pool.manager.seq_ids)
        cases = ", ".join(
            f"**({number})** {' and '.join(map(str, damage))}"
            for number, damage in enumerate(self.damages, start=1)
        )
        length = pool.manager.length(pool.manager.seq_ids[0])
        return (
            f"In blocks of {self.block_size}, these texts of {length} tokens each were saved: {tables}. The snapshot "
            f"is damaged, and nobody saved the tokens. What does each of them keep if the bad pages are {cases}?",
            f"answer = ...  # (({names}), ({names}), ({names})): tokens kept after damage 1, 2, 3",
        )


class Counted(Walls):
    """10: the counters from the fork to the second wall."""

    @property
    def answer(self) -> tuple[int, int, int, float]:
        pool, _, counted = self.wall(2)
        return counted.appended, counted.cloned, counted.refused, 1 - pool.num_free / self.num_blocks

    def question(self) -> tuple[str, str]:
        return (
            f"{self._told()} the others go on until a call is refused again: the second wall. What do the counters "
            "say there, all the way from the fork, and what is the usage?",
            "answer = ...  # (tokens appended, clones, refusals, usage)",
        )


@dataclass(frozen=True)
class LateWrites:
    """11: writes of two workers, one of which sleeps past its lease, and the other one not.

    Each worker renews its lease at 0, `beat`, 2 `beat` … while it is awake. A write is `(letter, worker, looked,
    arrives)`: the worker looks at its own lease, sends if that holds, and the write arrives, maybe after a sleep.
    """

    lease: int  # seconds
    beat: int
    sleeps: dict[int, tuple[int, int]]  # worker -> from, until
    writes: tuple[tuple[str, int, int, int], ...]

    def ends(self, worker: int, second: int) -> int:
        """When the lease of a worker ends, as it stands at a second: it is renewed up to then."""
        start, stop = self.sleeps[worker]
        beats = [beat for beat in range(0, second + 1, self.beat) if not start <= beat < stop]
        for earlier, later in pairwise(beats):
            if later >= earlier + self.lease:
                return earlier + self.lease  # it was over before the next heartbeat came
        return beats[-1] + self.lease

    @property
    def answer(self) -> tuple[str, str, str]:
        sent = [write for write in self.writes if write[2] < self.ends(write[1], write[2])]
        lands = [letter for letter, worker, _, arrives in sent if arrives < self.ends(worker, arrives)]
        alone = [letter for letter, *_ in sent]
        return "".join(lands), "".join(letter for letter in alone if letter not in lands), "".join(alone)

    def question(self) -> tuple[str, str]:
        naps = " ".join(f"Worker {w} sleeps from {a} to {b}." for w, (a, b) in self.sleeps.items())
        rows = "\n".join(
            f"| {letter} | {worker} | {looked} | {arrives} |"
            for letter, worker, looked, arrives in self.writes
        )
        return (
            f"Two workers renew their leases of {self.lease} s at 0, {self.beat}, {2 * self.beat} … while they are "
            f"awake. {naps} A reaper looks at every second; who was given up does not come back in this exercise. "
            "Before each write a worker looks at its own lease, and does not send if it is over.\n\n"
            f"| write | worker | looks at | arrives at |\n|---|---|---|---|\n{rows}\n\n"
            "Write three words made of letters: **(1)** what lands if the store compares tokens, **(2)** what it "
            "refuses, **(3)** what lands if it does not compare.",
            'answer = ...  # ("lands", "is refused", "lands without tokens"), each as letters, such as "AB"',
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


def _walls(variant: int, lesson: int) -> tuple[int, int, str, str]:
    """Block size, blocks, prompt and answers: those of the story, or drawn."""
    if variant == 0:
        return story.BLOCK_SIZE, story.NUM_BLOCKS, story.NIGHT, "".join(story.ANSWERS)
    rng, names = _drawn(variant, lesson)
    block_size, answers = int(rng.choice(BLOCK_SIZES)), "klmnp"[: int(rng.integers(3, 6))]
    prompt = next((TEXTS[name] for name in names if len(TEXTS[name]) % block_size), story.NIGHT)
    full = len(prompt) // block_size
    # Room for every answer's own tail, and for the next block of all answers but one or two.
    return block_size, full + 2 * len(answers) - int(rng.integers(1, 3)), prompt, answers


def giving_way(variant: int) -> GivingWay:
    """The case of lesson 08's question by hand."""
    return GivingWay(*_walls(variant, 8))


def kept(variant: int) -> Kept:
    """The case of lesson 09's question by hand."""
    walls = _walls(variant, 9)
    if variant == 0:
        return Kept(*walls, ((2,), (4, 5), (1, 6)))
    rng, _ = _drawn(variant, 90)
    tables = list(map(Kept(*walls).put_off().table, walls[3][:-1]))
    in_all = [block for block in tables[0] if all(block in table for table in tables)]
    shared, own = int(rng.choice(in_all or tables[0])), [table[-1] for table in tables]
    tail = int(rng.choice([block for block in tables[1] if block not in tables[0]]))
    pair = rng.choice(sorted({block for table in tables for block in table[1:]}), 2, replace=False).tolist()
    return Kept(*walls, ((tail,), tuple(pair), (shared, int(rng.choice(own)))))


def counted(variant: int) -> Counted:
    """The case of lesson 10's question by hand."""
    return Counted(*_walls(variant, 10))


def late_writes(variant: int) -> LateWrites:
    """The case of lesson 11's question by hand."""
    if variant == 0:
        return _late_writes(5, 2, 1, (5, 12), (9, 11), "ABCDEF")
    rng, _ = _drawn(variant, 11)
    lease, beat = int(rng.integers(5, 9)), int(rng.integers(2, 4))
    start = beat * int(rng.integers(2, 5)) + 1
    sleep = start, start + lease + int(rng.integers(1, 5))
    nap = start + beat * int(rng.integers(1, 3))
    letters = sorted(rng.choice(list("GHJKLMNPQRST"), 6, replace=False).tolist())
    return _late_writes(lease, beat, int(rng.integers(1, 3)), sleep, (nap, nap + 2), letters)


def _late_writes(
    lease: int, beat: int, sleeper: int, sleep: tuple[int, int], nap: tuple[int, int], letters: Sequence[str]
) -> LateWrites:
    """Six writes: each worker's before its sleep, across it, and after it."""
    writes = []
    for worker, (start, stop), early in ((sleeper, sleep, 2), (3 - sleeper, nap, 1)):
        writes += [(worker, start - early, start - early), (worker, start, stop)]
        writes.append((worker, max(stop, sleep[1]) + early, max(stop, sleep[1]) + early))
    writes.sort(key=lambda write: write[2])
    named = tuple((letter, *write) for letter, write in zip(letters, writes, strict=True))
    return LateWrites(lease, beat, dict(sorted({sleeper: sleep, 3 - sleeper: nap}.items())), named)


BY_HAND = {
    "free_list": free_list,
    "slots_by_hand": slots,
    "shared_blocks": shared_blocks,
    "the_wall": giving_way,
    "who_keeps": kept,
    "second_wall": counted,
    "late_writes": late_writes,
}


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
