"""Checks of lesson 04: fork, the copying write, a batch that writes all or nothing, drafts, and the manager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pagedkv.allocator import BlockAllocator, PoolExhausted
from pagedkv.block_table import slots_of
from pagedkv.manager import BlockManager
from pagedkv.teach import pages

from ._core import Learner, Wrong, _Raised, call_text, check, expect_refusal, same, seeded, show, sizes

NIGHT, DAY = "Good night", "Good day"
POSITION_10 = {"a": ",", "b": "!", "c": ".", "d": ";"}


class Memory(pages.Letters):
    """Letters that count the slots they are asked to fill, copied ones included."""

    filled = 0

    def write(self, slots, text):
        super().write(slots, text)
        self.filled += len(text)

    def copy_blocks(self, copies):
        super().copy_blocks(copies)
        self.filled += sum(
            copy[2] if len(copy) > 2 else self.block_size for copy in np.asarray(copies).tolist()
        )


@dataclass
class Pool:
    """Lesson 04's state: an allocator, a memory of letters, and who reads which blocks, how far."""

    allocator: BlockAllocator
    memory: Memory
    tables: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)

    @property
    def block_size(self) -> int:
        return self.memory.block_size

    def __repr__(self) -> str:
        return "pool"


# ---- a pool, and what must be true of it


def _pool(num_blocks: int = 8, block_size: int = 4) -> Pool:
    return Pool(BlockAllocator(num_blocks), Memory(num_blocks, block_size))


def _add(pool: Pool, name: str, text: str) -> None:
    table = pool.allocator.allocate(-(-len(text) // pool.block_size)).tolist()
    pool.memory.write(slots_of(table, range(len(text)), pool.block_size), text)
    pool.tables[name], pool.lengths[name] = table, len(text)


def _share(pool: Pool, parent: str, children: Sequence[str]) -> None:
    for child in children:
        pool.allocator.share(pool.tables[parent])
        pool.tables[child], pool.lengths[child] = list(pool.tables[parent]), pool.lengths[parent]


def _leave(pool: Pool, name: str) -> None:
    pool.allocator.release(pool.tables.pop(name)[::-1])
    del pool.lengths[name]


def _shared(text: str, names: str, num_blocks: int = 8, block_size: int = 4) -> Pool:
    """A pool in which every name says `text`, from the same blocks."""
    pool = _pool(num_blocks, block_size)
    _add(pool, names[0], text)
    _share(pool, names[0], names[1:])
    return pool


def _strip(pool: Pool):
    try:
        free = pool.allocator.queue()
        return pages.strip_of(
            pool.tables,
            num_blocks=pool.memory.num_blocks,
            block_size=pool.block_size,
            letters=pool.memory,
            lengths=pool.lengths,
            free=free,
        )
    except (ValueError, KeyError, TypeError, IndexError):  # the learner's tables may name anything
        return None


def _state(pool: Pool) -> tuple:
    """All that a refusal must leave alone."""
    tables = {name: list(table) for name, table in pool.tables.items()}
    counts, queue = pool.allocator.ref_counts.tolist(), pool.allocator.queue()
    return tables, dict(pool.lengths), counts, queue, {name: _text(pool, name) for name in tables}


def _text(pool: Pool, name: str) -> str:
    try:
        return pool.memory.read(slots_of(pool.tables[name], range(pool.lengths[name]), pool.block_size))
    except (ValueError, TypeError, KeyError) as error:
        raise Wrong(
            f"{name} cannot be read any more: {error}.",
            "do the table and the length of a sequence grow together?",
            _strip(pool),
        ) from None


def _agrees(pool: Pool, texts: Mapping[str, str], after: str, question: str) -> None:
    """Every sequence says what it should, and a block's count is the number of table entries that name it."""
    if set(pool.tables) != set(texts) or set(pool.lengths) != set(texts):
        raise Wrong(
            f"After {after} the pool has tables of {show(sorted(pool.tables, key=str))} and lengths of "
            f"{show(sorted(pool.lengths, key=str))}, expected {show(sorted(texts))}.",
            question,
        )
    for name, text in texts.items():
        if not same(pool.lengths[name], len(text)):
            said = f"After {after} the length of {name} is {show(pool.lengths[name])}, expected {len(text)}."
            raise Wrong(said, question, _strip(pool))
        if (got := _text(pool, name)) != text:
            said = f"After {after} {name} reads {show(got)}, expected {show(text)}."
            raise Wrong(said, question, _strip(pool))
        if len(pool.tables[name]) != -(-len(text) // pool.block_size):
            said = f"After {after} the table of {name} is {show(list(pool.tables[name]))}"
            raise Wrong(f"{said}, for {len(text)} tokens.", question, _strip(pool))
    named = Counter(int(block) for table in pool.tables.values() for block in table)
    counts = pool.allocator.ref_counts.tolist()
    off = [
        f"block {block} has the count {count}, and {named[block]} table entries name it"
        for block, count in enumerate(counts)
        if count != named[block]
    ]
    if off:
        raise Wrong(
            f"After {after} {'; '.join(off[:3])}.",
            "whose count changes when a table stops naming a block, or begins to?",
            _strip(pool),
        )


def _filled_by(learner: Learner, pool: Pool, *args) -> int:
    """Call, and say how many slots were filled meanwhile."""
    before = pool.memory.filled
    learner(pool, *args)
    return pool.memory.filled - before


def _is_refusal(error: Exception) -> bool:
    """Whether it is a PoolExhausted: the package's, or one of the reader's own."""
    return "PoolExhausted" in [kind.__name__ for kind in type(error).__mro__]


def _must_be_a_refusal(raised: _Raised, said: str, question: str, drawing=None) -> None:
    if not _is_refusal(raised.error):
        kind = type(raised.error).__name__
        wrong = f"{said} raised {kind}: {raised.error}, expected PoolExhausted."
        raise Wrong(wrong, question, drawing) from None


def _refuses(learner: Learner, pool: Pool, *args, question: str) -> None:
    """The call must raise PoolExhausted, of whatever module, and leave everything as it was."""
    before, said = _state(pool), call_text(learner._name, pool, *args)
    drawing = _strip(pool)
    try:
        learner(pool, *args)
    except _Raised as raised:
        _must_be_a_refusal(raised, said, question, drawing)
    else:
        raise Wrong(f"{said} was accepted, expected PoolExhausted.", question, drawing)
    names = ("tables", "lengths", "counts", "free list", "texts")
    for name, was, now in zip(names, before, _state(pool), strict=True):
        if was != now:
            raise Wrong(
                f"{said} was refused, but the {name} changed: {show(was)} became {show(now)}.",
                question,
                _strip(pool),
            )


# ---- fork(pool, parent, children)


@check("fork", own=(BlockManager,))
def fork(learner: Learner) -> str:
    """`fork(pool, parent, children)`: the children share the parent's blocks; ValueError for a name in use."""
    pool = _shared(NIGHT, "a")
    learner(pool, "a", ["b", "c", "d"])
    said = call_text(learner._name, pool, "a", ["b", "c", "d"])
    if pool.memory.filled > len(NIGHT) or pool.allocator.num_free != 5:
        raise Wrong(
            f"After {said} {pool.allocator.num_free} blocks are free, expected 5.",
            "what do the children need that is not in memory yet?",
            _strip(pool),
        )
    _agrees(pool, dict.fromkeys("abcd", NIGHT), said, "what does a child know that its parent knew?")
    for name in "abcd":
        others = [other for other in "abcd" if other != name and pool.tables[other] is pool.tables[name]]
        if others:
            pool.tables[name].append(3)
            raise Wrong(
                f"{name}'s table was given a block 3, and now {others[0]}'s table is {pool.tables[others[0]]}.",
                "how many lists are there, and how many names for each?",
            )
    _leave(pool, "a")
    _agrees(pool, dict.fromkeys("bcd", NIGHT), f"{said}, and a has left", "who still reads these blocks?")

    for children in (["e", "b"], ["e", "e"]):
        before = _state(pool)
        expect_refusal(
            learner, pool, "b", children, question="whose table would that be?", drawing=_strip(pool)
        )
        if _state(pool) != before:
            raise Wrong(
                f"{call_text('fork', pool, 'b', children)} was refused, but the pool has changed.",
                "when do you look at the second name?",
                _strip(pool),
            )

    rng = seeded(4)
    for block_size in sizes(1, 2, 4):
        for length in (0, 1, 3, 4, 5, 8):
            pool = _shared("Good night"[:length], "a", 16, block_size)
            names = ["a"]
            for more in ("bc", "d", "efg"):
                parent = str(rng.choice(names))
                learner(pool, parent, list(more))
                names += more
                texts = dict.fromkeys(names, "Good night"[:length])
                _agrees(
                    pool,
                    texts,
                    call_text(learner._name, pool, parent, list(more)),
                    "a fork of a fork: who counts?",
                )
    return "Nothing was copied, and each block knows its owners."


# ---- write(pool, name, letter)

WHO = "when this write begins, how many tables name the last block?"


def _writes(
    learner: Learner, pool: Pool, texts: dict[str, str], name: str, letter: str, question: str
) -> None:
    """One write by `name`: right text everywhere, right counts, and no slot filled that need not be."""
    offset = len(texts[name]) % pool.block_size
    copies = bool(offset) and pool.allocator.ref_count(pool.tables[name][-1]) > 1
    said = call_text(learner._name, pool, name, letter)
    got = _filled_by(learner, pool, name, letter)
    texts[name] += letter
    _agrees(pool, texts, said, question)
    expected = 1 + offset * copies
    if got < expected:
        question = (
            "this letter lies in a block that others read too: what will the others read when they go on?"
        )
    if got != expected:
        raise Wrong(
            f"{said} filled {got} slots, expected {expected}: {offset * copies} copied and 1 new.",
            question,
            _strip(pool),
        )


@check("write", own=(BlockManager,))
def write(learner: Learner) -> str:
    """`write(pool, name, letter)`: one token more; a shared last block is copied, its filled slots only."""
    pool, texts = _shared(NIGHT, "abcd"), dict.fromkeys("abcd", NIGHT)
    for name, letter in POSITION_10.items():
        question = "which of the four slots of block 2 hold a token?" if name == "a" else WHO
        _writes(learner, pool, texts, name, letter, question)
    if list(pool.tables["d"]) != [0, 1, 2] or pool.allocator.num_free != 2:
        raise Wrong("d, the last to write, has left block 2.", "who else still reads block 2?", _strip(pool))
    for name in "abcd":
        _writes(learner, pool, texts, name, " ", "who else still reads that block?")

    pool, texts = _shared(DAY, "ab"), dict.fromkeys("ab", DAY)
    _writes(
        learner, pool, texts, "a", ",", "the last block is shared and full: will anybody write there again?"
    )
    _writes(learner, pool, texts, "b", "!", "the last block is full: where does the ninth token go?")

    pool, texts = _shared("", "a"), {"a": ""}
    for letter in NIGHT:
        _writes(learner, pool, texts, "a", letter, "when does a sequence need a block that it does not have?")

    pool = _shared(NIGHT, "ab", num_blocks=3)
    _refuses(learner, pool, "a", ",", question="what may have changed before the pool said no?")
    pool = _shared(DAY, "ab", num_blocks=2)
    _refuses(learner, pool, "a", ",", question="what may have changed before the pool said no?")

    pool, texts = _shared(NIGHT, "ab"), dict.fromkeys("ab", NIGHT)
    _leave(pool, "a")
    del texts["a"]
    _writes(learner, pool, texts, "b", "!", "the parent has left: who else reads block 2?")

    steps = 0
    for block_size in sizes(1, 2, 3, 4):
        steps += _random_writes(learner, seeded(block_size), block_size)
    return f"Copies 1, 1, 1, 0, two slots each; {steps} random steps agree."


def _random_writes(learner: Learner, rng: np.random.Generator, block_size: int, steps: int = 60) -> int:
    pool, texts = _shared("Go", "a", 40, block_size), {"a": "Go"}
    for step in range(steps):
        name = str(rng.choice(sorted(texts)))
        act = rng.integers(6)
        if act == 0 and len(texts) < 6:
            child = f"s{step}"
            _share(pool, name, [child])
            texts[child] = texts[name]
        elif act == 1 and len(texts) > 1:
            _leave(pool, name)
            del texts[name]
        elif len(texts[name]) < 12:
            _writes(learner, pool, texts, name, str(rng.choice(list("abcdefgh"))), WHO)
    return steps


# ---- extend_all(pool, letters)


def _extends(
    learner: Learner, pool: Pool, texts: dict[str, str], letters: dict[str, str], question: str
) -> None:
    twin = _twin(pool)
    copies = twin.extend(list(letters), 1).copies
    expected = len(letters) + int(copies[:, 2].sum())
    said = call_text(learner._name, pool, letters)
    drawing = _strip(pool)
    try:
        got = _filled_by(learner, pool, letters)
    except _Raised as raised:
        if not _is_refusal(raised.error):
            raise
        wrong = f"{said} was refused ({raised.error}), and there is room."
        raise Wrong(wrong, question, drawing) from None
    for name, letter in letters.items():
        texts[name] += letter
    _agrees(pool, texts, said, question)
    if got != expected or pool.allocator.num_free != twin.num_free:
        raise Wrong(
            f"{said} filled {got} slots and left {pool.allocator.num_free} blocks free, "
            f"expected {expected} and {twin.num_free}.",
            question,
            _strip(pool),
        )


def _twin(pool: Pool) -> BlockManager:
    """The package's manager in the same state."""
    twin = BlockManager(pool.memory.num_blocks, pool.block_size)
    queue = pool.allocator.queue()
    twin.allocator.allocate(twin.num_blocks)
    named = Counter(block for table in pool.tables.values() for block in table)
    for block, times in named.items():
        twin.allocator.share([block] * (times - 1))
    twin.allocator.release(queue)
    for name, table in pool.tables.items():
        twin.tables.put(twin.tables.add(name), np.array(table, np.int32), pool.lengths[name])
    return twin


@check("extend_all", own=(BlockManager,))
def extend_all(learner: Learner) -> str:
    """`extend_all(pool, letters)`: one letter for each of several sequences; all of them, or PoolExhausted."""
    pool, texts = _shared(NIGHT, "abcd"), dict.fromkeys("abcd", NIGHT)
    _extends(
        learner, pool, texts, POSITION_10, "c has moved out of block 2 when d's turn comes: who reads it?"
    )
    tables = {name: list(table) for name, table in pool.tables.items()}
    if tables != {"a": [0, 1, 3], "b": [0, 1, 4], "c": [0, 1, 5], "d": [0, 1, 2]}:
        raise Wrong(
            f"The tables are {show(tables)}.", "in the order of the letters: who takes block 3?", _strip(pool)
        )
    _extends(learner, pool, texts, dict.fromkeys("abcd", " "), "does position 11 need a block?")
    wall = "the caller frees a sequence and tries the same step again: what will a say then?"
    _refuses(learner, pool, dict.fromkeys("abcd", "n"), question=wall)
    _extends(learner, pool, texts, {"b": "n", "c": "n"}, "two blocks are free and two are needed")

    pool, texts = _shared("Goo", "abc", num_blocks=2), dict.fromkeys("abc", "Goo")
    _refuses(
        learner, pool, {"b": "d", "c": "l"}, question="no new block is needed: what else takes a free one?"
    )
    _extends(learner, pool, texts, {"b": "d"}, "one copy, one free block")
    _refuses(learner, pool, {"c": "l"}, question="who reads block 0 besides c?")

    pool, texts = _shared(NIGHT, "abcd", num_blocks=6), dict.fromkeys("abcd", NIGHT)
    question = "four owners write: how many of them copy, and who is left with the old block?"
    _extends(learner, pool, texts, POSITION_10, question)

    pool = _shared(NIGHT, "ab", num_blocks=6)
    _add(pool, "e", DAY)
    texts = {"a": NIGHT, "b": NIGHT, "e": DAY}
    _refuses(
        learner,
        pool,
        {"e": ",", "a": ",", "b": "!"},
        question="new blocks and copies: what do they sum up to?",
    )
    _extends(learner, pool, texts, {"e": ","}, "one new block, one free")

    steps = sum(_random_batches(learner, seeded(n), n) for n in sizes(1, 2, 3, 4))
    return f"The wall of the story, and {steps} random batches, refused and granted as pagedkv does it."


def _random_batches(learner: Learner, rng: np.random.Generator, block_size: int, steps: int = 40) -> int:
    pool, texts = _shared("Go", "a", 12, block_size), {"a": "Go"}
    question = "what does this batch need, before anything moves?"
    for step in range(steps):
        name = str(rng.choice(sorted(texts)))
        act = rng.integers(5)
        if act == 0 and len(texts) < 5:
            child = f"s{step}"
            _share(pool, name, [child])
            texts[child] = texts[name]
        elif act == 1 and len(texts) > 1:
            _leave(pool, name)
            del texts[name]
        else:
            names = rng.permutation(sorted(texts))[: rng.integers(1, len(texts) + 1)].tolist()
            letters = {n: str(rng.choice(list("abcdefgh"))) for n in names}
            if _twin(pool).can_extend(names):
                _extends(learner, pool, texts, letters, question)
            else:
                _refuses(learner, pool, letters, question=question)
    return steps


# ---- drafts(pool, names, parents)


def _drafts(learner: Learner, pool: Pool, parents: list[int], question: str) -> None:
    names = list(pool.tables)
    before = {name: _text(pool, name) for name in names}
    texts = {name: before[names[parent]] for name, parent in zip(names, parents, strict=True)}
    tables = {name: list(pool.tables[names[parent]]) for name, parent in zip(names, parents, strict=True)}
    said, filled = call_text(learner._name, pool, names, parents), pool.memory.filled
    try:
        learner(pool, names, parents)
    except _Raised as raised:
        if "can gain an owner" not in str(raised.error):
            raise
        question = "for a moment nobody owned that block: who reads it one line later?"
        raise Wrong(f"{said} stopped: {raised.error}.", question) from None
    if {name: list(table) for name, table in pool.tables.items()} != tables or pool.memory.filled != filled:
        now = {name: list(table) for name, table in pool.tables.items()}
        raise Wrong(
            f"After {said} the tables are {show(now)}, expected {show(tables)}.", question, _strip(pool)
        )
    _agrees(pool, texts, said, question)
    lists = list(pool.tables.values())
    if len({id(table) for table in lists}) < len(lists):
        raise Wrong(
            f"After {said} two drafts share one list.",
            "the first of the two moves to a block of its own: what does the other's table say then?",
            _strip(pool),
        )


def _three_drafts() -> Pool:
    pool = _pool()
    _add(pool, "a", "Good")
    _share(pool, "a", "bc")
    for name, letter in zip("abc", " bs", strict=True):
        pool.tables[name] += pool.allocator.allocate(1).tolist()
        pool.memory.write([4 * pool.tables[name][1]], letter)
        pool.lengths[name] += 1
    return pool


@check("drafts", own=(BlockManager,))
def drafts(learner: Learner) -> str:
    """`drafts(pool, names, parents)`: row i goes on from what names[parents[i]] says now."""
    pool = _three_drafts()
    _drafts(learner, pool, [0, 0, 1], "when c's turn comes, is b's old table still to be found?")
    counts, free = pool.allocator.ref_counts.tolist()[:4], pool.allocator.queue()
    if counts != [3, 2, 1, 0] or free.count(3) != 1:
        raise Wrong(f"The counts of blocks 0 to 3 are {counts}.", "who reads block 3 now?", _strip(pool))
    for parents, question in [
        ([1, 0, 2], "two drafts change places: from where does the second take its table?"),
        ([2, 2, 2], "all go on from the last: when may the blocks of the first two be given back?"),
        ([1, 2, 0], "each goes on from another: which tables must be read before any is written?"),
        ([0, 1, 2], "everybody goes on from itself: what should change?"),
    ]:
        _drafts(learner, _three_drafts(), parents, question)

    rng, steps = seeded(4), 40
    for _ in range(steps):
        pool = _pool(24, int(rng.integers(1, 5)))
        size = int(rng.integers(1, 6))
        for name in "abcde"[:size]:
            _add(pool, name, "Good night"[: rng.integers(0, 9)])
        for _ in range(3):
            question = "which tables and lengths must be read before any is written?"
            _drafts(learner, pool, rng.integers(0, size, size).tolist(), question)
    return f"[0, 1], [0, 1], [0, 2], counts 3, 2, 1, block 3 free; {steps} random pools agree."


# ---- find the bug


@check("the faulty line", wants="value")
def faulty_line(learner: Learner) -> str:
    """The number of the line that must change when the listing's test meets the copying write."""
    answer = learner.value
    if not isinstance(answer, int) or isinstance(answer, bool) or not 1 <= answer <= 10:
        raise Wrong(f"answer is {show(answer)}; it takes the number of one line, 1 to 10.")
    if answer in (2, 3):
        raise Wrong(
            f"Line {answer} does what it says: a writes a letter.", "is there anything wrong with its result?"
        )
    if answer in (1, 4):
        raise Wrong(
            f"Line {answer} holds: a alone reads its blocks, and it reads what it wrote.",
            "what does the failing line expect instead?",
        )
    if answer > 5:
        raise Wrong(
            f"With another line {answer} the test may pass.",
            "a is alone in the pool: whom would a copy protect, and what would it cost at the wall?",
        )
    return "The test expects a copy that nobody needs."


# ---- the manager


class _Driver:
    """A manager, the learner's or the package's, and the letters that its slots and copies move."""

    def __init__(self, manager, num_blocks: int, block_size: int):
        self.manager, self.memory = manager, Memory(num_blocks, block_size)
        self.block_size, self.num_blocks = block_size, num_blocks

    def append(self, texts: Mapping[str, str]) -> int:
        """Extend and write, all letters of equal number; returns how many blocks were copied."""
        names, letters = list(texts), list(texts.values())
        room = self.manager.extend(names, len(letters[0]))
        slots, copies = _part(room, "slots"), _part(room, "copies")
        try:
            copies = np.asarray(copies, np.int64).reshape(-1, 3)
            self.memory.copy_blocks(copies)
            self.memory.write(slots, "".join(letters))
        except (ValueError, TypeError) as error:
            raise Wrong(
                f"extend({names}, {len(letters[0])}) gave slots {show(slots)} and copies {show(copies)}: {error}.",
                "one slot for each new token, and (source, destination, filled slots) for each copy?",
            ) from None
        return len(copies)

    def table(self, name: str) -> list[int]:
        rows = self.manager.block_tables([name])
        if not isinstance(rows, list | tuple | np.ndarray) or len(rows) != 1:
            raise Wrong(f"block_tables([{name!r}]) gave {show(rows)}, expected one row of block ids.")
        return [int(block) for block in rows[0] if block != -1]

    def strip(self, lengths: Mapping[str, int]):
        try:
            tables = {name: self.table(name) for name in lengths}
            return pages.strip_of(
                tables,
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                letters=self.memory,
                lengths=lengths,
            )
        except (ValueError, KeyError, TypeError, Wrong, _Raised):
            return None

    def agree(self, texts: Mapping[str, str], num_free: int, after: str, question: str) -> None:
        lengths = {name: len(text) for name, text in texts.items()}
        for name, text in texts.items():
            table = self.table(name)
            try:
                got = self.memory.read(slots_of(table, range(len(text)), self.block_size))
            except ValueError as error:
                raise Wrong(f"After {after}, {name} cannot be read: {error}.", question) from None
            if got != text:
                said = f"After {after} {name} reads {show(got)}, expected {show(text)}."
                raise Wrong(said, question, self.strip(lengths))
        if not same(self.manager.num_free, num_free):
            raise Wrong(
                f"After {after} {show(self.manager.num_free)} blocks are free, expected {num_free}.",
                question,
                self.strip(lengths),
            )


def _part(room, name: str):
    if not hasattr(room, name):
        raise Wrong(f"extend gave {show(room)}, expected an object with .slots and .copies.")
    return getattr(room, name)


def _denied(driver: _Driver, texts: Mapping[str, str], letters: Mapping[str, str], question: str) -> None:
    """The batch must be refused, and all tables stay."""
    before = {name: driver.table(name) for name in texts}
    free, said = driver.manager.num_free, f"extend({list(letters)})"
    try:
        driver.append(letters)
    except _Raised as raised:
        _must_be_a_refusal(raised, said, question)
    else:
        raise Wrong(f"{said} was accepted, expected PoolExhausted.", question)
    now = {name: driver.table(name) for name in texts}
    if now != before or not same(driver.manager.num_free, free):
        raise Wrong(
            f"{said} was refused, but now {show(driver.manager.num_free)} blocks are free, tables {show(now)}.",
            question,
        )
    driver.agree(texts, free, said, question)


def _four_answers(learner: Learner) -> _Driver:
    pool = _Driver(learner(8, 4), 8, 4)
    pool.manager.add("a")
    pool.append({"a": NIGHT})
    pool.agree({"a": NIGHT}, 5, "add('a') and ten tokens", "how many blocks do ten tokens take?")
    pool.manager.fork("a", ["b", "c", "d"])
    return pool


@check("manager", own=(BlockManager,), wants="class")
def manager(learner: Learner) -> str:
    """`MyManager(num_blocks, block_size)`: add, extend, fork, reorder, free, block_tables, num_free."""
    pool = _four_answers(learner)
    texts = dict.fromkeys("abcd", NIGHT)
    pool.agree(texts, 5, "the forks", "what do the children need that is not in memory yet?")
    pool.manager.free(["a"])
    del texts["a"]
    pool.agree(texts, 5, "the forks, and a has left", "who still reads these blocks?")

    pool = _four_answers(learner)
    if (copies := pool.append(POSITION_10)) != 3:
        raise Wrong(
            f"Four owners of block 2 wrote in one step, and {copies} blocks were copied.",
            "how many of them must copy, and who is left with the old block?",
        )

    pool, texts = _four_answers(learner), dict.fromkeys("abcd", NIGHT)
    copies = []
    for name, letter in POSITION_10.items():
        copies.append(pool.append({name: letter}))
        texts[name] += letter
        free = 5 - len(copies) + (name == "d")
        pool.agree(texts, free, f"{name}'s write", "who reads the last block when this write begins?")
    if copies != [1, 1, 1, 0]:
        raise Wrong(f"The four writes copied {copies} blocks.", "who reads block 2 when d's turn comes?")
    ids = {name: pool.table(name) for name in texts}
    if ids != {"a": [0, 1, 3], "b": [0, 1, 4], "c": [0, 1, 5], "d": [0, 1, 2]}:
        raise Wrong(f"The tables are {show(ids)}.", "who moved out of block 2, and in which order?")
    pool.append(dict.fromkeys("abcd", " "))
    texts = {name: text + " " for name, text in texts.items()}
    pool.agree(texts, 2, "position 11", "is there room in the last blocks?")
    wall = "four blocks are needed and two are free: who gets one?"
    _denied(pool, texts, dict.fromkeys("abcd", "n"), wall)
    pool.manager.free(["d"])
    del texts["d"]
    pool.agree(texts, 3, "d has left", "which of d's three blocks has no other reader?")

    pool = _Driver(learner(8, 4), 8, 4)
    pool.manager.add("a")
    pool.append({"a": "Good"})
    pool.manager.fork("a", ["b", "c"])
    pool.append({"a": " ", "b": "b", "c": "s"})
    pool.manager.reorder(["a", "b", "c"], [0, 0, 1])
    texts = {"a": "Good ", "b": "Good ", "c": "Goodb"}
    pool.agree(texts, 5, "reorder([0, 0, 1])", "is every table read before one is written?")

    steps = sum(_as_the_package(learner, block_size) for block_size in sizes(1, 2, 4))
    return f"The story, and {steps} random steps as pagedkv.BlockManager takes them."


def _as_the_package(learner: Learner, block_size: int, steps: int = 80) -> int:
    rng = seeded(block_size)
    mine = _Driver(learner(12, block_size), 12, block_size)
    real = _Driver(BlockManager(12, block_size), 12, block_size)
    texts: dict[str, str] = {}
    for step in range(steps):
        names = sorted(texts)
        act = str(rng.choice(["add", "fork", "free", "reorder", *["append"] * 4]))
        if act == "add" and len(names) < 4:
            said, name = f"add('s{step}')", f"s{step}"
            mine.manager.add(name), real.manager.add(name)
            texts[name] = ""
        elif not names:
            continue
        elif act == "fork" and len(names) < 5:
            parent = str(rng.choice(names))
            children = [f"s{step}", f"t{step}"]
            said = f"fork({parent!r}, {children})"
            mine.manager.fork(parent, children), real.manager.fork(parent, children)
            texts |= dict.fromkeys(children, texts[parent])
        elif act == "free":
            gone = [str(rng.choice(names))]
            said = f"free({gone})"
            mine.manager.free(gone), real.manager.free(gone)
            del texts[gone[0]]
        elif act == "reorder":
            parents = rng.integers(0, len(names), len(names)).tolist()
            said = f"reorder({names}, {parents})"
            mine.manager.reorder(names, parents), real.manager.reorder(names, parents)
            texts = {name: texts[names[parent]] for name, parent in zip(names, parents, strict=True)}
        elif act == "append":
            batch = rng.permutation(names)[: rng.integers(1, len(names) + 1)].tolist()
            n = int(rng.integers(1, 4))
            letters = {name: "".join(rng.choice(list("abcdefgh"), n)) for name in batch}
            said, question = f"extend({batch}, {n})", "what does this batch need, before anything moves?"
            try:
                copies = real.append(letters)
            except PoolExhausted:
                _denied(mine, texts, letters, question)
                continue
            if (got := mine.append(letters)) != copies:
                raise Wrong(f"{said} copied {got} blocks, expected {copies}.", WHO)
            texts |= {name: texts[name] + letter for name, letter in letters.items()}
        else:
            continue
        mine.agree(texts, real.manager.num_free, said, "who reads which block now?")
    return steps
