"""Checks of lesson 07: keys in a chain, hits, reviving and giving back blocks, and a key that was left behind."""

import builtins
import copy
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from pagedkv.allocator import BlockAllocator
from pagedkv.manager import BlockManager
from pagedkv.prefix_cache import PrefixIndex, Text, block_digest, root_link, token_bytes
from pagedkv.teach import story

from ._core import Learner, Wrong, check, expect, seeded, show, sizes

# ---- block_keys(tokens, block_size, salt)


def _keys(learner: Learner, tokens: list[int], block_size: int, salt: str = "") -> list[bytes]:
    got = learner(list(tokens), block_size, salt)
    said = f"{learner._name}({show(list(tokens))}, {block_size}, {show(salt)})"
    if not isinstance(got, list | tuple):
        raise Wrong(f"{said} gave {show(got)}, expected a list of keys.")
    full = len(tokens) // block_size
    if len(got) != full:
        question = "which of its blocks will never change any more, and can be promised to others?"
        if len(got) == full + 1 and len(tokens) == full * block_size:
            question = "there is no tail here, and one key too many: what stands before the first block?"
        raise Wrong(
            f"{said} gave {len(got)} keys; the text has {len(tokens)} tokens in blocks of {block_size}.",
            question,
        )
    for key in got:
        if not isinstance(key, bytes) or len(key) < 16:
            raise Wrong(
                f"{said} gave the key {show(key)}, expected a digest: bytes, at least 16 of them.",
                "how long may a key be if its text is a thousand blocks long, and how likely are two alike?",
            )
    return list(got)


@contextmanager
def _another_process():
    """Where `hash` gives other numbers, as it does for text in another process."""
    real = builtins.hash
    builtins.hash = lambda value: (real(value) * 2654435761 + 97) & (2**61 - 1)
    try:
        yield
    finally:
        builtins.hash = real


@check("block_keys", forbidden=(root_link, block_digest, token_bytes, Text))
def block_keys(learner: Learner) -> str:
    """`block_keys(tokens, block_size, salt)`: a digest per full block: its tokens, all before, the salt."""
    twice, night = story.tokens(story.TWICE), story.tokens(story.NIGHT)
    _keys(learner, story.tokens(story.DAY), 4)  # without a tail, where a root among the keys shows
    keys = _keys(learner, twice, 4)
    if keys[1] == keys[4]:
        raise Wrong(
            f"Blocks 1 and 4 of {story.TWICE!r} have the same key.",
            "their letters are equal: what does the model know at each of them that the letters do not tell?",
        )
    if _keys(learner, night, 4) != keys[:2]:
        raise Wrong(
            f"{story.NIGHT!r} begins {story.TWICE!r}, yet its keys are not the first two of the longer text.",
            "may a key depend on what comes behind its block?",
        )
    for what, one, other in (
        ("tokens [1, 23] and [12, 3]", [1, 23], [12, 3]),
        ("tokens [1, 256] and [257, 0]", [1, 256], [257, 0]),
        ("tokens [3, 2**40] and [3, 2**41]", [3, 2**40], [3, 2**41]),
        ("tokens [5, 6] and [6, 5]", [5, 6], [6, 5]),
    ):
        if _keys(learner, one, 2) == _keys(learner, other, 2):
            raise Wrong(f"{what} have the same key.", "written one behind the other, where does a token end?")
    _tell_salts_apart(learner, twice)
    with _another_process():
        elsewhere = _keys(learner, twice, 4), _keys(learner, twice, 4, "x")
    if elsewhere != (keys, _keys(learner, twice, 4, "x")):
        raise Wrong(
            "In a second process the keys are others.",
            "Python's hash of a text begins with a random number, drawn once per process: is there another hash?",
        )
    for block_size in sizes(1, 2, 4, 16):
        _agree_as_far_as_texts_do(learner, block_size)
    return "Equal as far as the texts are equal, and never again behind the first difference."


def _tell_salts_apart(learner: Learner, tokens: list[int]) -> None:
    by_salt = {salt: _keys(learner, tokens, 4, salt) for salt in ("", "x", "y", "x1", "1")}
    for salt, keys in by_salt.items():
        for other, others in by_salt.items():
            if salt < other and (alike := [i for i, key in enumerate(keys) if key == others[i]]):
                raise Wrong(
                    f"With salts {salt!r} and {other!r} the keys of blocks {alike} are equal.",
                    "whose prompt could be found out by a stranger who tries the same block?",
                )
    if set(_keys(learner, [50, 51], 2, "1")) & set(_keys(learner, [51], 1, "12")):
        raise Wrong(
            "Salt '1' with tokens [50, 51] and salt '12' with token [51] have the same key.",
            "where does the salt end, and where do the tokens begin?",
        )


def _agree_as_far_as_texts_do(learner: Learner, block_size: int) -> None:
    rng = seeded(70 + block_size)
    for _ in range(12):
        length = int(rng.integers(0, 5 * block_size + 1))
        one = rng.integers(0, 50_000, length).tolist()
        other = list(one)
        place = int(rng.integers(0, length)) if length else 0
        if length:
            other[place] += 1
        keys, others = _keys(learner, one, block_size), _keys(learner, other, block_size)
        if len(set(keys)) < len(keys):
            raise Wrong("Two blocks of one text have the same key.", "may two places of a text be the same?")
        for i, (a, b) in enumerate(zip(keys, others, strict=True)):
            if (a == b) != (i < place // block_size):
                alike = "the same" if a == b else "another"
                raise Wrong(
                    f"Two texts differ at position {place}, in block {place // block_size} of {block_size} tokens; "
                    f"block {i} has {alike} key.",
                    "of which tokens is a key the key?",
                )


# ---- hit(keys, known, length, block_size)


@check("hit", forbidden=(PrefixIndex, BlockManager))
def hit(learner: Learner) -> str:
    """`hit(keys, known, length, block_size)`: the blocks to read, first block first; the last token stays to run."""
    night, day = [b"Good", b" nig"], [b"Good", b" day"]
    known = {b"Good": 0, b" nig": 1, b" day": 3}
    twice = [*night, b"ht, ", b"good", b"other nig"]
    cases = [
        ((night, known, 10, 4), [0, 1], "which full blocks of the prompt are known?"),
        (
            (day, known, 8, 4),
            [0],
            "if all eight tokens are there already, what does the model run to say the ninth?",
        ),
        (
            (twice, known | {b"good": 6, b"other nig": 7}, 22, 4),
            [0, 1],
            "a miss, then keys that are known: the blocks in between are not there; whose place would be empty?",
        ),
        ((day, {b" day": 3}, 8, 4), [], "its first block is not there: what can be read behind a gap?"),
        ((day, known, 9, 4), [0, 3], "nine tokens: which of them is the last?"),
        (([], known, 3, 4), [], "how many full blocks do three tokens have?"),
        (([], known, 0, 4), [], "what is there to find for an empty prompt?"),
        ((day, {}, 8, 4), [], "what is there to find in an empty cache?"),
        (([b"a", b"b"], {b"a": 5, b"b": 0}, 2, 1), [5], "blocks of one token: which one must run?"),
        (([b"a", b"b"], {b"a": 0, b"b": 5}, 3, 1), [0, 5], "is block 0 a block?"),
    ]
    for case, blocks, question in cases:
        expect(learner, *case, gives=blocks, question=question)
    rng = seeded(7)
    for _ in range(150):
        size, length = int(rng.choice(sizes(1, 2, 4, 16))), int(rng.integers(0, 60))
        keys = [b"key %d" % i for i in range(length // size)]
        known = {key: int(rng.integers(0, 99)) for key in keys if rng.random() < 0.8}
        run = next((i for i, key in enumerate(keys) if key not in known), len(keys))
        blocks = [known[key] for key in keys[: min(run, max(length - 1, 0) // size)]]
        expect(learner, keys, known, length, size, gives=blocks, question="first miss, or last token?")
    return "Up to the first miss, and never the last token."


# ---- revive(pool, blocks) and give_back(pool, table)


@dataclass
class Pool:
    """The state that lesson 07 builds: a free queue, counts, and which block holds the text of which key."""

    free: list[int]  # the next one in front
    owners: list[int]  # [num_blocks]
    block_of: dict[bytes, int] = field(default_factory=dict)
    key_of: dict[int, bytes] = field(default_factory=dict)

    def __repr__(self) -> str:
        return "pool"

    def drawn(self) -> "_Words":
        return _Words(f"free queue {self.free}   owners {self.owners}   with a key {sorted(self.key_of)}")


class _Words(str):
    """A drawing in words."""

    def __repr__(self) -> str:
        return str(self)


def _pool(free: list[int], owners: list[int], keyed: list[int]) -> Pool:
    keys = {block: b"key of %d" % block for block in keyed}
    return Pool(free, owners, {key: block for block, key in keys.items()}, keys)


def _compare(pool: Pool, expected: Pool, said: str, questions: dict[str, str], before: _Words) -> None:
    words = {"owners": "the counts are", "free": "the free queue is"}
    for name, question in questions.items():
        got, wanted = getattr(pool, name), getattr(expected, name)
        got = list(got) if name in words and isinstance(got, list | tuple | np.ndarray) else got
        if got != wanted:
            if name in words:
                seen = f"After {said} {words[name]} {show(got)}, expected {show(wanted)}."
            else:
                seen = f"After {said} the keys are no longer what they were."
            raise Wrong(seen, question, before)


def _revives(learner: Learner, pool: Pool, blocks: list[int]) -> None:
    before, expected = pool.drawn(), copy.deepcopy(pool)
    for block in blocks:
        expected.owners[block] += 1
        if block in expected.free:
            expected.free.remove(block)
    learner(pool, list(blocks))
    questions = {
        "owners": "how many read each of these blocks now?",
        "free": "who gets the front of this queue next, and does anybody own it? And what was nobody's before?",
        "key_of": "the text is still in the block: will the next one who brings this prompt find it?",
        "block_of": "the text is still in the block: will the next one who brings this prompt find it?",
    }
    _compare(pool, expected, f"{learner._name}(pool, {show(blocks)})", questions, before)


@check("revive", forbidden=(BlockAllocator, BlockManager))
def revive(learner: Learner) -> str:
    """`revive(pool, blocks)`: one more owner for each block that was found; who was free is free no more."""
    left = _pool([5, 2, 6, 7, 1, 3, 4, 0], [0] * 8, [1, 3, 4, 0])
    _revives(learner, left, [0, 1])
    _revives(learner, left, [0])
    _revives(learner, left, [0, 3])
    _revives(learner, left, [])
    shared = _pool([6, 7], [3, 1, 1, 1, 1, 1, 0, 0], [0, 1, 3, 4])
    _revives(learner, shared, [0, 4])
    rng = seeded(77)
    for num_blocks in sizes(1, 2, 5, 16):
        owners = rng.integers(0, 3, num_blocks).tolist()
        free = rng.permutation([b for b, n in enumerate(owners) if n == 0]).tolist()
        pool = _pool(free, owners, rng.permutation(num_blocks).tolist())
        for _ in range(8):
            found = rng.permutation(num_blocks)[: rng.integers(0, num_blocks + 1)].tolist()
            _revives(learner, pool, found)
    return "In use again, with its text, and findable for the next one."


def _gives_back(learner: Learner, pool: Pool, table: list[int]) -> None:
    before, expected = pool.drawn(), copy.deepcopy(pool)
    plain = []
    for block in reversed(table):
        expected.owners[block] -= 1
        if expected.owners[block] == 0:
            (expected.free if block in expected.key_of else plain).append(block)
    expected.free[:0] = plain
    learner(pool, list(table))
    said = f"{learner._name}(pool, {show(table)})"
    got = list(pool.free) if isinstance(pool.free, list | tuple) else pool.free
    question = _why_this_order(got, expected, before, table)
    questions = {
        "owners": "how many read each of these blocks now?",
        "free": question,
        "key_of": "nobody reads it, and nobody has overwritten it: must its text be forgotten?",
        "block_of": "nobody reads it, and nobody has overwritten it: must its text be forgotten?",
    }
    _compare(pool, expected, said, questions, before)


def _why_this_order(got, expected: Pool, before: _Words, table: list[int]) -> str:
    wanted = expected.free
    if not isinstance(got, list) or sorted(map(str, got)) != sorted(map(str, wanted)):
        return "who still reads them, and which blocks has nobody left?"
    keyed = [block for block in wanted if block in expected.key_of]
    if [block for block in got if block in expected.key_of] != keyed:
        mine = [block for block in got if block in table and block in expected.key_of]
        if mine == [block for block in table if block in mine] and len(mine) > 1:
            return (
                "the next request takes one of these blocks: which one can be spared, so that the others are "
                "still found?"
            )
        return "which text was used last, and which longest ago? Where do those with a key stand?"
    if [block for block in got if block not in expected.key_of] != [b for b in wanted if b not in keyed]:
        return "blocks without a key: as one group, in which order, and in front of which others?"
    return "which blocks hold something that somebody may still ask for, and who should be taken first?"


@check("give_back", forbidden=(BlockAllocator, BlockManager))
def give_back(learner: Learner) -> str:
    """`give_back(pool, table)`: one owner less, last block first; no key: in front as a group; a key: to the back."""
    full = _pool([6, 7], [3, 1, 1, 1, 1, 1, 0, 0], [0, 1, 3, 4])
    _gives_back(learner, full, [0, 1, 2])  # the three of the story leave
    _gives_back(learner, full, [0, 3])
    _gives_back(learner, full, [0, 4, 5])
    ten = _pool(
        [5, 6, 7, 8, 9], [2, 2, 2, 1, 1, 0, 0, 0, 0, 0], [0, 1, 2]
    )  # two prompts of three blocks alike
    _gives_back(learner, ten, [0, 1, 2, 3])
    _gives_back(learner, ten, [0, 1, 2, 4])
    _gives_back(learner, _pool([0], [0, 1, 1, 1], []), [1, 2, 3])
    _gives_back(learner, _pool([], [1], [0]), [0])
    _gives_back(learner, _pool([1], [1, 0], []), [])
    rng = seeded(78)
    for num_blocks in sizes(1, 2, 5, 16):
        for _ in range(8):
            table = rng.permutation(num_blocks)[: rng.integers(0, num_blocks + 1)].tolist()
            owners = rng.integers(0, 3, num_blocks)
            owners[table] += 1
            free = rng.permutation(np.flatnonzero(owners == 0)).tolist()
            keyed = rng.permutation(num_blocks)[: rng.integers(0, num_blocks + 1)].tolist()
            _gives_back(learner, _pool(free, owners.tolist(), keyed), table)
    return "The tail goes before the beginning, and what nobody can ask for before both."


# ---- by hand


@check("found and evicted, by hand", wants="value")
def next_evicted(learner: Learner) -> str:
    """After everybody has left: tokens found by `Good morning`, then by `Good day`, and the next text to go."""
    answer = learner.value
    if not isinstance(answer, tuple | list) or len(answer) != 3:
        raise Wrong(
            f"answer is {show(answer)}; it takes three numbers: (tokens found, tokens found, a block id)."
        )
    pool = story.everybody_left()
    for text, said in zip(("Good morning", story.DAY), answer, strict=False):
        found = pool.match(text)
        strip = pool.strip(f"When {text} comes")
        if not _is_number(said) or said != found:
            question = "which of its blocks have a key that is known, one behind the other from the first on?"
            if said == len(text):
                question = "and which token does the model run to say the next one?"
            elif _is_number(said) and said % story.BLOCK_SIZE:
                question = "in which unit is found what is found?"
            raise Wrong(f"{text}: you say {show(said)} tokens are found.", question, strip)
        pool.add(text, text)
    queue, allocator = pool.manager.allocator.queue(), pool.manager.allocator
    evicted = queue[-allocator.num_cached]
    if not _is_number(answer[2]) or answer[2] != evicted:
        question = "of the free blocks that have a key, which one became free first?"
        if answer[2] in queue[: -allocator.num_cached]:
            question = "that block is taken earlier, but is there a text in it that can be found?"
        elif answer[2] not in queue:
            question = "may a block be taken that somebody reads?"
        raise Wrong(
            f"You say that the text of block {show(answer[2])} goes next.", question, pool.strip("Now")
        )
    return "8 of 12, 4 of 8; then block 1, when the plain ones are used up."


def _is_number(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# ---- the faulty line


FAULTY, LINES = 8, 12


@check("the key that stayed", wants="value")
def stale_line(learner: Learner) -> str:
    """The line that lets a block go on to be found under the key of a text that it does not hold any more."""
    answer = learner.value
    if not _is_number(answer) or not 1 <= answer <= LINES:
        raise Wrong(f"answer is {show(answer)}; it takes the number of one line, 1 to {LINES}.")
    if answer != FAULTY:
        if answer <= 5:
            question = (
                "the search finds what it was told: who should have told it that this block is another's?"
            )
        elif answer in (6, 7, 9):
            question = "the block is rightly taken, and has one owner: what does it still promise?"
        else:
            question = "what is entered here is true when it is entered: when does it stop being true?"
        raise Wrong(f"Line {answer} does what it should.", question)
    return (
        "It forgets the block's key and leaves the key's block: two notes of one fact, and one of them lies."
    )
