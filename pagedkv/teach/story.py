"""The course's running example: one pool of 8 blocks of 4 tokens, one token a character, four good nights.

Lessons start from these states and speak of these numbers; tests/teach/test_story.py asserts each number against
the engine. The start states: `one_question`, `three_requests`, `four_answers`, `diverged`, `at_the_wall`,
`preempted`, `second_wall`, `shuffled`, `three_prompts`, `everybody_left`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..allocator import BlockAllocator
from ..block_table import SeqId, slots_of
from ..cache import PagedKVCache
from ..manager import BlockManager, Reservation
from . import pages

NUM_BLOCKS, BLOCK_SIZE = 8, 4
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE
MAX_LENGTH = 16  # what a server without paging reserves per request

NIGHT, DAY, MORROW = "Good night", "Good day", "Good morrow"  # 10, 8 and 11 tokens
TWICE = "Good night, good night"  # 22 tokens; its blocks 1 and 4 hold the same letters
REQUESTS = {"night": NIGHT, "day": DAY, "morrow": MORROW}
ANSWERS = ("a", "b", "c", "d")
POSITION_10 = {"a": ",", "b": "!", "c": ".", "d": ";"}  # the 11th token of each answer
POSITION_11 = dict.fromkeys(ANSWERS, " ")


class TextPool:
    """A pool whose tokens are letters: a BlockManager, the letters in its slots, and its history.

    It shows itself as the strip. Every call is one of the manager's, with the letters moved as it says.
    A refused call raises PoolExhausted and leaves tables, letters and free blocks as they were.
    Leaving sequences release their last block first, as in every BlockManager: night frees 2, 1, 0, and the
    next block taken is 2. (Lessons 02 and 03 call `release([0, 1, 2])` on an allocator: the next is 0.)

    Args: poison: mark the slots of freed blocks, which otherwise keep their letters; prefix_cache: let a text that
        is added find the blocks that it begins with.
    """

    def __init__(
        self,
        num_blocks: int = NUM_BLOCKS,
        block_size: int = BLOCK_SIZE,
        *,
        poison: bool = False,
        prefix_cache: bool = False,
    ):
        self.manager = BlockManager(num_blocks, block_size, prefix_cache=prefix_cache)
        self.letters = pages.Letters(num_blocks, block_size, poison=poison)
        self.history = pages.History(self.manager, self.letters)
        self.manager.observers.append(self.history)

    @property
    def num_free(self) -> int:
        """Blocks that no sequence uses."""
        return self.manager.num_free

    def add(self, name: SeqId, text: str = "") -> None:
        """Register a sequence and write its text. PoolExhausted if it does not fit; it is not registered then."""
        self.manager.add(name, tokens=tokens(text))
        try:
            reservation = self.manager.extend(name, None)
        except Exception:
            self.manager.free(name)
            raise
        self.letters.write(reservation.slots, text[reservation.start[0] :])
        if self.manager.prefix_cache:
            self.manager.commit(name)

    def append(self, texts: Mapping[SeqId, str]) -> Reservation:
        """Let sequences go on, all in one batch: {"a": ",", "b": "!"}. All of them, or PoolExhausted and none.

        Returns: the manager's Reservation, after its copies were made and the letters written.
        """
        reservation = self.manager.extend(list(texts), [len(text) for text in texts.values()])
        self.letters.copy_blocks(reservation.copies)
        self.letters.write(reservation.slots, "".join(texts.values()))
        if self.manager.prefix_cache:
            self.manager.commit(list(texts), [tokens(text) for text in texts.values()])
        return reservation

    def fork(self, parent: SeqId, children: int | Iterable[SeqId] = 1) -> list[SeqId]:
        """As BlockManager.fork: the children share the parent's blocks."""
        return self.manager.fork(parent, children)

    def reorder(self, names: Iterable[SeqId], parents: Sequence[int]) -> np.ndarray:
        """As BlockManager.reorder: row i goes on from what row parents[i] says now."""
        return self._poisoned(self.manager.reorder(names, parents))

    def truncate(self, name: SeqId, length: int) -> np.ndarray:
        """As BlockManager.truncate: forget the letters from position `length` on."""
        return self._poisoned(self.manager.truncate(name, length))

    def free(self, names: SeqId | Iterable[SeqId]) -> np.ndarray:
        """As BlockManager.free: forget sequences. The letters stay in memory, unless `poison` was asked for."""
        return self._poisoned(self.manager.free(names))

    def table(self, name: SeqId) -> list[int]:
        """The block ids of one sequence."""
        return self.manager.block_tables([name])[0].tolist()

    def match(self, text: str) -> int:
        """Letters of a text that stand in the cache already; touches nothing."""
        name = self.manager.add(tokens=tokens(text))
        found = self.manager.match(name)
        self.manager.free(name)
        return found

    def read(self, name: SeqId) -> str:
        """What a sequence says, read through its table."""
        positions = np.arange(self.manager.length(name))
        return self.letters.read(slots_of(self.table(name), positions, self.manager.block_size))

    def owners(self) -> list[int]:
        """How many sequences own each block."""
        return self.manager.allocator.ref_counts.tolist()

    def strip(self, caption: str | None = None) -> pages.Strip:
        """The pool now."""
        return pages.strip(self, caption=caption)

    def tables(self) -> pages.Tables:
        """The block tables now."""
        return pages.tables(self)

    def sequence(self, name: SeqId) -> pages.SequenceView:
        """One sequence, position by position."""
        return pages.sequence(self, name)

    def __repr__(self) -> str:
        return repr(self.strip())

    def _repr_html_(self) -> str:
        return self.strip(caption="The pool now")._repr_html_()

    def _poisoned(self, freed: np.ndarray) -> np.ndarray:
        if self.letters.poisoned:
            self.letters.poison(freed)
        return freed


def tokens(text: str) -> list[int]:
    """A token per character: its code."""
    return [ord(letter) for letter in text]


# ---- start states ------------------------------------------------------------------------------------------


def three_requests(*, poison: bool = False) -> TextPool:
    """night [0,1,2], day [3,4], morrow [5,6,7]: the pool is full."""
    pool = TextPool(poison=poison)
    for name, text in REQUESTS.items():
        pool.add(name, text)
    return pool


def one_question(*, poison: bool = False) -> TextPool:
    """a says `Good night`: blocks 0, 1, 2, five free."""
    pool = TextPool(poison=poison)
    pool.add("a", NIGHT)
    return pool


def four_answers(*, poison: bool = False) -> TextPool:
    """a, b, c, d share the three blocks of `Good night`, five free: nothing was copied."""
    pool = one_question(poison=poison)
    pool.fork("a", ANSWERS[1:])
    return pool


def diverged(*, poison: bool = False) -> TextPool:
    """The four have written position 10: three of them copied block 2, two blocks are free."""
    pool = four_answers(poison=poison)
    pool.append(POSITION_10)
    return pool


def at_the_wall(*, poison: bool = False) -> TextPool:
    """The four hold 12 tokens each: position 12 needs four blocks, and two are free."""
    pool = diverged(poison=poison)
    pool.append(POSITION_11)
    return pool


def preempted(*, poison: bool = False) -> TextPool:
    """d was put off, so a, b and c could write position 12: the pool is full again."""
    pool = at_the_wall(poison=poison)
    pool.free("d")
    pool.append(dict.fromkeys("abc", "n"))
    return pool


def shuffled(*, poison: bool = False) -> TextPool:
    """The three requests over ids out of order: night [6,1,3], day [0,5], morrow [7,2,4].

    Its history begins with the requests: the pool was used before, so its free queue is mixed up.
    """
    pool = TextPool(poison=poison)
    manager = pool.manager
    manager.observers.clear()
    for block in range(NUM_BLOCKS):
        manager.add(block)
        manager.extend(block, BLOCK_SIZE)
    manager.free([4, 2, 7, 5, 0, 3, 1, 6][::-1])  # the last released is the first in the queue
    manager.observers.append(pool.history)
    for name, text in REQUESTS.items():
        pool.add(name, text)
    return pool


def second_wall(*, poison: bool = False) -> TextPool:
    """a, b and c hold 16 tokens each: position 16 needs three blocks, and none is free."""
    pool = preempted(poison=poison)
    for letter in "ow ":
        pool.append(dict.fromkeys("abc", letter))
    return pool


def three_prompts() -> TextPool:
    """With a prefix cache: night [0,1,2], day [0,3], morrow [0,4,5]; block 0 is computed once, two are free."""
    pool = TextPool(prefix_cache=True)
    for name, text in REQUESTS.items():
        pool.add(name, text)
    return pool


def everybody_left() -> TextPool:
    """The three have left in their order: all eight blocks are free, and 1, 3, 4, 0 are cached."""
    pool = three_prompts()
    for name in REQUESTS:
        pool.free(name)
    return pool


# ---- the numbers of single lessons -------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """How many requests a memory admits, and what its slots are used for."""

    admitted: int
    used: int  # slots that hold a token
    idle: int  # slots that are taken and hold none
    blocks: tuple[int, ...] = ()  # per admitted request


def reserve_the_maximum(
    lengths: Sequence[int] = (10, 8, 11), num_slots: int = NUM_SLOTS, maximum: int = MAX_LENGTH
) -> Packed:
    """01: every request gets room for the longest it could become."""
    admitted = min(len(lengths), num_slots // maximum)
    used = sum(lengths[:admitted])
    return Packed(admitted, used, admitted * maximum - used)


def in_blocks(
    lengths: Sequence[int] = (10, 8, 11), num_blocks: int = NUM_BLOCKS, block_size: int = BLOCK_SIZE
) -> Packed:
    """01: every request gets blocks for the tokens that it has."""
    blocks: list[int] = []
    for length in lengths:
        need = -(-length // block_size)
        if sum(blocks) + need > num_blocks:
            break
        blocks.append(need)
    used = sum(lengths[: len(blocks)])
    return Packed(len(blocks), used, sum(blocks) * block_size - used, tuple(blocks))


def allocated() -> tuple[BlockAllocator, dict[str, list[int]]]:
    """02: the three requests as block ids from one allocator, which has none left."""
    allocator = BlockAllocator(NUM_BLOCKS)
    needs = zip(REQUESTS, in_blocks().blocks, strict=True)
    return allocator, {name: allocator.allocate(n).tolist() for name, n in needs}


def night_leaves() -> tuple[BlockAllocator, dict[str, list[int]]]:
    """02: night has left; its three blocks are free, block 0 first in the queue."""
    allocator, tables = allocated()
    allocator.release(tables.pop("night"))
    return allocator, tables


def morrow_goes_on() -> tuple[list[int], str, pages.Letters]:
    """03: night has left and morrow goes on with ", ": its table [5,6,7,0], its text, and the letters in memory.

    Only morrow is written, so the other slots of block 0 are unwritten ones.
    """
    allocator, tables = night_leaves()
    text = MORROW + ", "
    table = tables["morrow"] + allocator.allocate(1).tolist()
    letters = pages.Letters(NUM_BLOCKS, BLOCK_SIZE)
    letters.write(slots_of(table, np.arange(len(text)), BLOCK_SIZE), text)
    return table, text, letters


def answer_blocks(
    block_size: int, *, prompt: int = 10, answers: int = 4, length: int = 40
) -> tuple[int, int]:
    """06: blocks at the end of `answers` answers of `length` tokens: without sharing, and with it.

    What stays shared are the prompt's full blocks.
    """
    unshared = answers * -(-(prompt + length) // block_size)
    return unshared, unshared - (answers - 1) * (prompt // block_size)


def tokens_left(pool: TextPool, *damaged_blocks: int) -> dict[SeqId, int]:
    """09: the tokens that each sequence keeps when pages cannot be read: all before the first of them."""
    size = pool.manager.block_size
    left = {}
    for name in pool.manager.seq_ids:
        hit = [place for place, block in enumerate(pool.table(name)) if block in damaged_blocks]
        left[name] = hit[0] * size if hit else pool.manager.length(name)
    return left


def in_a_cache(pool: TextPool) -> PagedKVCache:
    """09: the same sequences in the package's cache; the key and the value of a token are its letter's code.

    Blocks are numbered anew, in the order in which the tables name them.
    """
    manager, letters = pool.manager, pool.letters
    cache = PagedKVCache(manager.num_blocks, manager.block_size, 1, 1)
    for old, new in cache.manager.restore(manager.snapshot()).tolist():
        codes = [ord(letter) for letter in letters.block(old) if letter != pages.UNFILLED]
        for array in cache.storage.arrays.values():
            array[0, new, : len(codes), 0, 0] = codes
    return cache


# 06: block size -> blocks of four answers of 40 characters, unshared and shared
ANSWER_BLOCKS = {1: (200, 170), 2: (100, 85), 4: (52, 46), 8: (28, 25), 16: (16, 16)}

# 07: who has nothing in common with the three, and needs seven blocks
STRANGER = "To be, or not to be: that"

# 08: name, prompt, tokens to write, step of arrival; with a pool of 8 blocks three of them have to give way.
EVENING = (
    ("night", NIGHT, 3, 0),
    ("day", DAY, 14, 0),
    ("morrow", MORROW, 5, 0),
    ("lord", "Good my lord", 14, 4),
    ("even", "Good even", 5, 7),
)
EVENING_GIVES_WAY = ((1, "morrow", 3), (9, "lord", 4), (18, "even", 3))  # step, who, blocks that come free
EVENING_MS = (269, 251, 214, 276, 297)  # mean time to be done with a watermark of 0, 1, 2, 3 and 4 blocks

# 09: entries of the four tables at the wall, and pages that they name
SNAPSHOT = (12, 6)

# 10: tokens appended by the four answers up to the wall, blocks cloned, refusals, usage; and usage when d gave way
COUNTED = (8, 3, 1, 0.75)
USAGE_PREEMPTED = 1.0
