"""Checks of lesson 02: the free list by hand, `release`, `broken`, a test of the reader's own, and the allocator."""

import copy
from collections import Counter
from dataclasses import dataclass

import numpy as np

from pagedkv.allocator import BlockAllocator, PoolExhausted

from .. import variants
from ._core import SETTING, Learner, Wrong, _Raised, check, expect_refusal, same, seeded, show, sizes

NUM_BLOCKS = 8
NIGHT, DAY, MORROW = [0, 1, 2], [3, 4], [5, 6, 7]


class Text(str):
    """A drawing in words."""

    def __repr__(self) -> str:
        return str(self)


@dataclass
class Pool:
    """The state that lesson 02 builds up to its flags: a free list, front first, and who is held."""

    free: list[int]
    in_use: list[bool]  # [num_blocks]

    def __repr__(self) -> str:
        return "pool"

    def drawn(self) -> Text:
        held = [block for block, flag in enumerate(self.in_use) if flag]
        return Text(f"free list {self.free}   in use {held}")


# ---- by hand


@check("the free list by hand", wants="value")
def free_list(learner: Learner) -> str:
    """The free list after texts left the full pool, and after a refused request (`Good night`, and four blocks)."""
    case, answer = variants.free_list(SETTING.variant), learner.value
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise Wrong(f"answer is {show(answer)}; it takes two lists: (after (1), after the refusal).")
    left, refused = answer
    if not isinstance(left, list) or not isinstance(refused, list):
        raise Wrong(f"answer is {show(answer)}; write block ids, a list for each of the two moments.")
    if not same(left, case.free):
        who, last = " and ".join(case.leaving), case.leaving[-1]
        if sorted(left, key=repr) == sorted(case.free, key=repr):
            question = (
                f"which of its blocks did {last} name first, and where does the next request take from?"
            )
        else:
            question = f"which boxes carried the name {who}, and who holds the others?"
        raise Wrong(f"After {who} left you have {show(left)}.", question)
    if len(refused) < len(case.free):
        lost = len(case.free) - len(refused)
        raise Wrong(
            f"After the refusal you have {show(refused)}, so {lost} blocks went to a request that was turned away.",
            "who would ever give them back?",
        )
    if not same(refused, case.free):
        raise Wrong(f"After the refusal you have {show(refused)}.", "what may a refusal change?")
    return "A refusal changes nothing."


# ---- release(pool, ids)


def _stays(pool: Pool, before: Pool, said: str, question: str) -> None:
    if pool != before:
        raise Wrong(f"{said} was refused, but the pool is another one now.", question, pool.drawn())


def _refuses(learner: Learner, pool: Pool, ids: list[int], refused: str, unchanged: str = "") -> None:
    before = copy.deepcopy(pool)
    expect_refusal(learner, pool, ids, question=refused, drawing=before.drawn())
    _stays(pool, before, f"{learner._name}(pool, {show(ids)})", unchanged or refused)


def _releases(learner: Learner, pool: Pool, ids: list[int], question: str) -> None:
    said = f"{learner._name}(pool, {show(ids)})"
    expected = Pool(ids + pool.free, [flag and b not in ids for b, flag in enumerate(pool.in_use)])
    learner(pool, ids)
    if not same(pool.free, expected.free):
        raise Wrong(
            f"After {said} the free list is {show(list(pool.free))}, expected {show(expected.free)}.",
            question,
            pool.drawn(),
        )
    if not same(pool.in_use, expected.in_use):
        raise Wrong(
            f"After {said} the flags are {show(list(pool.in_use))}, expected {show(expected.in_use)}.",
            "what does the flag of a block say that nobody holds?",
        )


@check("release")
def release(learner: Learner) -> str:
    """`release(pool, ids)`: all of `ids` become free, in this order in front; ValueError changes nothing."""
    pool = Pool([], [True] * NUM_BLOCKS)
    _releases(learner, pool, NIGHT, "which block should the next request get?")
    _refuses(learner, pool, [0], "who holds block 0 at that moment?")
    _refuses(
        learner,
        pool,
        [3, 0],
        "who holds block 0?",
        "the caller catches the error and goes on: whose is 3 now?",
    )
    _releases(learner, pool, DAY, "blocks 0, 1, 2 were free before: where do the newly freed ones go?")

    pool = Pool([], [True] * NUM_BLOCKS)
    _refuses(learner, pool, [1, 1], "how many owners has block 1, and how many does this list give back?")
    _refuses(
        learner,
        pool,
        [1, 99],
        "which blocks does this pool have?",
        "the caller catches the error and goes on: what has become of block 1?",
    )
    _refuses(learner, pool, [-1], "which blocks does this pool have, and what does a list say to index -1?")
    _refuses(learner, pool, [8], "which blocks does a pool of eight have?")
    _releases(learner, pool, [], "what is there to do?")

    rng = seeded(2)
    for num_blocks in sizes(1, 2, 5, 16):
        real = BlockAllocator(num_blocks)
        real.allocate(num_blocks)
        pool = Pool([], [True] * num_blocks)
        for _ in range(12):
            held = np.flatnonzero(real.ref_counts)
            ids = rng.permutation(held)[: rng.integers(0, len(held) + 1)].tolist()
            real.release(ids)
            _releases(learner, pool, ids, "does the size of the pool, or of the list, matter?")
            taken = real.allocate(int(rng.integers(0, real.num_free + 1))).tolist()
            pool.free = pool.free[len(taken) :]
            for block in taken:
                pool.in_use[block] = True
    return "What it cannot take back it refuses, and then nothing has moved."


# ---- broken(free, owners, tables)


NAMES = ("unknown", "twice", "held", "lost", "count")

# what is wrong, free list, owners, tables
STATES = [
    (set(), [0, 1, 2], [0, 0, 0, 1, 1, 1, 1, 1], {"day": DAY, "morrow": MORROW}),
    ({"lost"}, [], [0, 0, 0, 1, 1, 1, 1, 1], {"day": DAY, "morrow": MORROW}),
    ({"held"}, [0, 1, 2, 3], [0, 0, 0, 1, 1, 1, 1, 1], {"day": DAY, "morrow": MORROW}),
    ({"twice", "lost"}, [6, 6], [1, 1, 1, 1, 1, 1, 0, 0], {"night": NIGHT, "day": DAY, "tail": [5]}),
    ({"count"}, DAY, [1, 1, 1, 0, 0, 1, 1, 1], {"night": NIGHT, "answer": NIGHT, "morrow": MORROW}),
    ({"unknown"}, [0, 1, 2, 8], [0, 0, 0, 1, 1, 1, 1, 1], {"day": DAY, "morrow": MORROW}),
]
QUESTIONS = {
    "unknown": "which ids does a pool of this size have?",
    "twice": "what will two requests get from this list?",
    "held": "may a block be in the free list while somebody owns it?",
    "lost": "go through the blocks one by one: where is each of them, in the list or with an owner?",
    "count": "how many tables name each block, and what does its count say?",
}


def _broken(free: list[int], owners: list[int], tables: dict[str, list[int]]) -> set[str]:
    blocks, named = range(len(owners)), [block for table in tables.values() for block in table]
    times = Counter(named)
    found = {
        "unknown": any(block not in blocks for block in free + named),
        "twice": any(n > 1 for n in Counter(free).values()),
        "held": any(owners[block] > 0 for block in free if block in blocks),
        "lost": any(owners[block] == 0 and block not in free for block in blocks),
        "count": any(owners[block] != times[block] for block in blocks),
    }
    return {name for name, is_broken in found.items() if is_broken}


def _state(free: list[int], owners: list[int], tables: dict[str, list[int]]) -> Text:
    drawn = "   ".join(f"{name} {table}" for name, table in tables.items())
    return Text(f"free list {free}\nowners    {owners}\ntables    {drawn}")


@check("broken")
def broken(learner: Learner) -> str:
    """`broken(free, owners, tables)`: the names of the rules that a state breaks, as a set."""
    cases = [*STATES, *_random_states()]
    for expected, *state in cases:
        got = learner(*state)
        if not isinstance(got, set | frozenset | list | tuple) or not all(n in NAMES for n in got):
            raise Wrong(f"broken gave {show(got)}, expected a set of names out of {', '.join(NAMES)}.")
        got = set(got)
        if missed := [name for name in NAMES if name in expected - got]:
            question = QUESTIONS[missed[0]]
            raise Wrong(f"broken says {_said(got)}; it misses something.", question, _state(*state))
        if extra := [name for name in NAMES if name in got - expected]:
            raise Wrong(
                f"broken says {_said(got)}, but nothing is {extra[0]!r} here.",
                QUESTIONS[extra[0]],
                _state(*state),
            )
    return f"{len(cases)} states told apart."


def _said(names: set[str]) -> str:
    return "{" + ", ".join(repr(name) for name in NAMES if name in names) + "}" if names else "nothing"


def _random_states() -> list[tuple]:
    rng, states = seeded(2), []
    for _ in range(60):
        num_blocks = int(rng.integers(2, 10))
        order = rng.permutation(num_blocks).tolist()
        cut, half = sorted(rng.integers(0, num_blocks + 1, 2).tolist())
        tables = {"a": order[:cut], "b": order[cut:half], "c": order[:cut][: int(rng.integers(0, 3))]}
        times = Counter(block for table in tables.values() for block in table)
        owners, free = [times[block] for block in range(num_blocks)], order[half:]
        for fault in rng.permutation(5)[: rng.integers(0, 3)]:
            block = int(rng.integers(0, num_blocks))
            if fault == 0:
                (free if rng.integers(2) else tables["b"]).append(int(rng.choice([-1, num_blocks])))
            elif fault == 1 and free:
                free.append(free[0])
            elif fault == 2:
                free.append(block)
            elif fault == 3 and free:
                free.pop()
            elif fault == 4:
                owners[block] += 1
        if free.count(-1) + free.count(num_blocks) <= 1:
            states.append((_broken(free, owners, tables), free, owners, tables))
    return states


# ---- a test of the reader's own


class _Make:
    """Makes allocators of one kind; shown as `make` in messages."""

    def __init__(self, kind: type):
        self.kind = kind

    def __call__(self, num_blocks: int):
        return self.kind(num_blocks)

    def __repr__(self) -> str:
        return "make"


class _Allocator:
    """A right allocator of the plainest kind; the wrong ones below change one thing each."""

    def __init__(self, num_blocks: int):
        self.num_blocks, self.free, self.in_use = num_blocks, list(range(num_blocks)), set()

    @property
    def num_free(self) -> int:
        return len(self.free)

    def allocate(self, n: int = 1) -> list[int]:
        if n > len(self.free):
            raise PoolExhausted(n, len(self.free))
        ids, self.free = self.free[:n], self.free[n:]
        self.in_use.update(ids)
        return ids

    def release(self, ids: list[int]) -> None:
        if len(set(ids)) < len(ids) or not self.in_use.issuperset(ids):
            raise ValueError(f"not all of {ids} are in use")
        self.in_use.difference_update(ids)
        self.free = list(ids) + self.free


class _FromTheEnd(_Allocator):
    """As right as the other: it hands out the highest ids first and takes them back at the far end."""

    def __init__(self, num_blocks: int):
        super().__init__(num_blocks)
        self.free.reverse()

    def release(self, ids: list[int]) -> None:
        front = self.free
        super().release(ids)
        self.free = front + list(ids)


class _LooksIntoTheMemory(_Allocator):
    """The idea of the listing this project grew from: a block is free when it holds only zeros."""

    def __init__(self, num_blocks: int):
        super().__init__(num_blocks)
        self.memory = np.zeros((num_blocks, 4), np.float32)  # nobody has written yet

    @property
    def num_free(self) -> int:
        return int((self.memory == 0).all(axis=1).sum())

    def allocate(self, n: int = 1) -> list[int]:
        if n > self.num_free:
            raise PoolExhausted(n, self.num_free)
        ids = np.flatnonzero((self.memory == 0).all(axis=1))[:n].tolist()
        self.in_use.update(ids)
        return ids


class _RefusesTooLate(_Allocator):
    """Takes what there is, one by one, and only then finds that it is not enough."""

    def allocate(self, n: int = 1) -> list[int]:
        available, ids = len(self.free), []
        for _ in range(n):
            if not self.free:
                raise PoolExhausted(n, available)
            ids += super().allocate(1)
        return ids


class _TakesEverythingBack(_Allocator):
    """Never asks whether anybody holds what is given back."""

    def release(self, ids: list[int]) -> None:
        self.in_use.difference_update(ids)
        self.free = list(ids) + self.free


RIGHT = [
    (BlockAllocator, "the package's own"),
    (_FromTheEnd, "one that hands out the highest ids first, which is nobody's business"),
]
WRONG_KINDS = [
    (
        _LooksIntoTheMemory,
        "looks into the memory for blocks of zeros",
        "nobody has written anything yet: what do two requests in a row get?",
    ),
    (_RefusesTooLate, "refuses too late", "what should you see before and after a refusal?"),
    (
        _TakesEverythingBack,
        "takes back everything it is given",
        "what would a careless caller give back that it does not have?",
    ),
]


@check("a test of your own")
def allocator_test(learner: Learner) -> str:
    """`test_allocator(make)`: silent on right allocators, an exception on each of three wrong ones."""
    for kind, who in RIGHT:
        try:
            learner(_Make(kind))
        except _Raised as raised:
            if not isinstance(raised.error, AssertionError):
                raise
            raise Wrong(
                f"Your test fails on a right allocator ({who}).\n{raised}",
                "does it ask for more than was promised?",
            ) from None
    passed = []
    for kind, what, question in WRONG_KINDS:
        try:
            learner(_Make(kind))
        except _Raised:
            continue
        passed.append((what, question))
    if passed:
        caught = len(WRONG_KINDS) - len(passed)
        what, question = passed[0]
        raise Wrong(
            f"Your test finds {caught} of {len(WRONG_KINDS)} wrong allocators; it passes on one that {what}.",
            question,
        )
    return "Two right allocators pass, three wrong ones fail."


# ---- the allocator itself


def _queue(pool: Learner) -> list:
    queue = pool.queue()
    if not isinstance(queue, list | tuple | np.ndarray):
        raise Wrong(f"queue() gave {show(queue)}, expected a list of block ids, the next one first.")
    return list(queue)


def _drawn(pool: Learner) -> Text:
    return Text(f"queue {show(_queue(pool))}   num_free {show(pool.num_free)}")


def _gives(pool: Learner, method: str, *args, expected, question: str):
    got = getattr(pool, method)(*args)
    if not same(got, expected):
        said = f"{method}({', '.join(map(show, args))})"
        raise Wrong(f"{said} gave {show(got)}, expected {show(expected)}.", question, _drawn(pool))


def _has(pool: Learner, queue: list[int], after: str, question: str) -> None:
    if not same(_queue(pool), queue) or not same(pool.num_free, len(queue)):
        raise Wrong(
            f"After {after} the queue should be {show(queue)}, {len(queue)} free.", question, _drawn(pool)
        )


def _turns_down(pool: Learner, method: str, arg, error: str | tuple[str, ...], question: str) -> None:
    """`method(arg)` must raise an exception of this name (or one of these) and change nothing."""
    names = (error,) if isinstance(error, str) else error
    wanted = " or ".join(names)
    before, said = (_queue(pool), pool.num_free), f"{method}({show(arg)})"
    try:
        got = getattr(pool, method)(arg)
    except _Raised as raised:
        kinds = [kind.__name__ for kind in type(raised.error).__mro__]
        if not set(names) & set(kinds):
            wrong = f"{said} raised {kinds[0]}: {raised.error}, expected {wanted}."
            raise Wrong(wrong, question, _drawn(pool)) from None
    else:
        raise Wrong(f"{said} was accepted and gave {show(got)}, expected {wanted}.", question, _drawn(pool))
    if (_queue(pool), pool.num_free) != before:
        raise Wrong(
            f"{method}({show(arg)}) was refused, but the pool has changed.",
            "the caller may catch the error and go on: what has it lost?",
            _drawn(pool),
        )


@check("allocator", own=(BlockAllocator,), wants="class")
def allocator(learner: Learner) -> str:
    """`MyAllocator(num_blocks)`: allocate, share, release, ref_count, num_free, queue, as gathered in lesson 02."""
    pool = learner(NUM_BLOCKS)
    for ids in (NIGHT, DAY, MORROW):
        _gives(pool, "allocate", len(ids), expected=ids, question="which blocks stand in front of the queue?")
    _turns_down(
        pool, "allocate", 1, "PoolExhausted", "eight blocks are in use: where should a ninth come from?"
    )
    _gives(pool, "release", NIGHT, expected=NIGHT, question="which of them has no owner any more?")
    _has(pool, NIGHT, "night left", "do its blocks go to the front, as one group?")
    _turns_down(pool, "allocate", 4, "PoolExhausted", "three are free: what may a request for four take?")
    _turns_down(pool, "release", [0], "ValueError", "who owns block 0 at that moment?")
    _turns_down(pool, "release", [3, 99], "ValueError", "which blocks does this pool have?")
    _turns_down(pool, "release", [4, -1], "ValueError", "what does a Python list say to index -1?")
    _turns_down(pool, "release", [3, 3], "ValueError", "how many owners has block 3?")
    _turns_down(pool, "allocate", -1, ("ValueError", "PoolExhausted"), "what does a slice do with -1?")
    _turns_down(pool, "share", [0], "ValueError", "what would the second reader read in a free block?")
    _gives(pool, "allocate", 0, expected=[], question="what is the answer to a request for nothing?")

    pool.share([3, 4])
    _gives(pool, "release", DAY, expected=[], question="a second reader is left: may its pages be free?")
    _has(pool, NIGHT, "the first of two readers left", "who still reads blocks 3 and 4?")
    _turns_down(pool, "share", [4, 0], "ValueError", "which of the two is in use?")
    _gives(pool, "ref_count", 4, expected=1, question="who owns block 4 now?")
    _gives(pool, "release", [4, 3], expected=[4, 3], question="who is left?")
    _has(pool, [4, 3, 0, 1, 2], "the second reader left", "in which order did it give them back?")

    steps = sum(_as_the_package(learner, num_blocks) for num_blocks in sizes(1, 2, 5, 16))
    return f"The story, and {steps} random steps as pagedkv.BlockAllocator takes them."


def _as_the_package(learner: Learner, num_blocks: int, steps: int = 100) -> int:
    rng, mine, real = seeded(num_blocks), learner(num_blocks), BlockAllocator(num_blocks)
    for _ in range(steps):
        method = str(rng.choice(["allocate", "release", "share"]))
        if method == "allocate":
            arg = int(rng.integers(0, num_blocks // 2 + 2))
        else:
            arg = rng.integers(0, num_blocks, rng.integers(1, 4)).tolist()
        try:
            expected = getattr(real, method)(arg)
        except (ValueError, PoolExhausted) as refusal:
            question = "what has to be asked before anything moves?"
            _turns_down(mine, method, arg, type(refusal).__name__, question)
            continue
        if method == "share":
            mine.share(arg)
        else:
            _gives(mine, method, arg, expected=expected, question="what did the story's pool do here?")
        counts = [mine.ref_count(block) for block in range(num_blocks)]
        if not same(counts, real.ref_counts):
            raise Wrong(
                f"After {method}({show(arg)}) the owners are {show(counts)}, expected {show(real.ref_counts)}.",
                "an id that is named twice: how many owners come or go?",
                _drawn(mine),
            )
        _has(mine, real.queue(), f"{method}({show(arg)})", "which blocks came back, and where do they wait?")
    return steps
