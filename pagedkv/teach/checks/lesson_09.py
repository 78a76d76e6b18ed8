"""Checks of lesson 09: who keeps what by hand, records, survivors, a save that a crash cannot tear, a faulty line."""

import struct
import zlib
from typing import Any

import numpy as np

from pagedkv.store.loading import _cut
from pagedkv.store.record import Layout
from pagedkv.teach import pages, story, variants
from pagedkv.teach.disk import Disk, Found

from ._core import SETTING, Learner, Wrong, _Raised, check, expect, seeded, show, sizes

# ---- by hand


@check("who keeps what", wants="value")
def who_keeps(learner: Learner) -> str:
    """Three damages behind the first wall of lesson 08: the tokens that a, b and c keep."""
    case, answer = variants.kept(SETTING.variant), learner.value
    pool = case.put_off()
    names = pool.manager.seq_ids
    rows = list(answer) if isinstance(answer, tuple | list) else []
    if len(rows) != len(case.damages) or not all(
        isinstance(row, tuple | list) and len(row) == len(names) for row in rows
    ):
        each = f"{', '.join(names[:-1])} and {names[-1]}"
        numbers = {2: "two", 3: "three", 4: "four"}[len(names)]
        raise Wrong(f"answer is {show(answer)}; it takes three rows of {numbers}: the tokens of {each}.")
    for number, (damaged, row) in enumerate(zip(case.damages, rows, strict=True), start=1):
        for (name, left), told in zip(story.tokens_left(pool, *damaged).items(), row, strict=True):
            if isinstance(told, bool) or not isinstance(told, int | np.integer) or told != left:
                question = _why_kept(pool, name, damaged, told)
                picture = pages.tables(pool.manager, caption="Their tables")
                raise Wrong(f"Damage {number}, {name}: you say {show(told)} tokens.", question, picture)
    return (
        "What stands before the first damaged page is kept: of that, nothing is lost, and nothing behind it."
    )


def _why_kept(pool: story.TextPool, name: str, damaged: tuple[int, ...], told: Any) -> str:
    table, length = pool.table(name), pool.manager.length(name)
    size = pool.manager.block_size
    hit = [place for place, block in enumerate(table) if block in damaged]
    if not hit:
        return f"{name}'s table is {table}: which damaged page does it name?"
    if told == length:
        return f"{name}'s table is {table}: is there a damaged page in it?"
    if told == length - size * len(hit):
        return "the tokens behind the hole are intact: can one attend over a text with a hole in it?"
    if len(hit) > 1 and told == hit[-1] * size:
        return "which damaged page comes first in the text?"
    if told == 0:
        return "what stands before the damaged page, and who needs it no more?"
    return "at which place of the table is the page, and how many tokens stand before that place?"


# ---- check_page(record, key, page_bytes)

HEAD = struct.Struct("<I8s")  # checksum of all that follows, key


def _packed(key: bytes, page: bytes) -> bytes:
    return struct.pack("<I", zlib.crc32(key + page)) + key + page


def _is_page(record: bytes, key: bytes, page_bytes: int) -> bool:
    if len(record) != HEAD.size + page_bytes:
        return False
    return record == _packed(key, record[HEAD.size :])


@check("check_page", forbidden=(Layout.fault,))
def check_page(learner: Learner) -> str:
    """`check_page(record, key, page_bytes)`: whether a record is the page that was asked for, whole."""
    keys = [b"evening "[:7] + bytes([number]) for number in range(8)]
    good = _packed(keys[1], b" nig")
    cases = [
        (
            good,
            keys[1],
            "the page as it was written",
            "which bytes does the checksum cover?",
        ),
        (_packed(keys[0], bytes(4)), keys[0], "a page of zeros", "is a page of zeros damaged?"),
    ]
    for record, key, about, question in cases:
        expect(learner, record, key, len(record) - HEAD.size, gives=True, about=about, question=question)
    for bit in range(8 * len(good)):
        part = "checksum" if bit < 32 else "key" if bit < 96 else "page"
        question = f"who notices when the {part} is damaged?"
        _refuses(
            learner,
            flipped(good, bit),
            keys[1],
            f"bit {bit % 8} of byte {bit // 8} flipped, in the {part}",
            question,
        )
    question = "two pages changed places, and both are whole: whose letters do you hand out?"
    _refuses(learner, _packed(keys[3], b"ht, "), keys[1], "the intact record of page 3", question)
    question = "the number is right, the file is of another evening: what else does the key say?"
    _refuses(learner, _packed(b"morning\x01", b" day"), keys[1], "page 1 of another snapshot", question)
    for length in range(len(good)):
        _refuses(learner, good[:length], keys[1], f"cut to {length} bytes", "how long must a record be?")
    longer = _packed(keys[1], b" night, ")
    _refuses(
        learner, longer, keys[1], "a page of 8 bytes where 4 are asked for", "how long must a record be?", 4
    )
    rng = seeded(9)
    for trial in range(200):
        size = int(rng.choice(sizes(1, 4, 16, 64)))
        key, page = rng.bytes(8), rng.bytes(size)
        record = _packed(key, page)
        if trial % 2:
            record = flipped(record, int(rng.integers(8 * len(record))))
        expect(
            learner,
            record,
            key,
            size,
            gives=_is_page(record, key, size),
            question="one bit makes the difference",
        )
    return "Every flipped bit, every cut, a page in another's place, and a page of another snapshot."


def flipped(data: bytes, bit: int) -> bytes:
    """Bytes with one bit turned over."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _refuses(learner: Learner, record: bytes, key: bytes, about: str, question: str, size: int = 4) -> None:
    try:
        expect(learner, record, key, size, gives=False, about=about, question=question)
    except _Raised as raised:
        kind = type(raised.error).__name__
        raise Wrong(
            f"{about}: {kind}: {raised.error}, expected False.", "may damage stop the whole load?"
        ) from None


# ---- survivors(tables, lengths, bad, block_size)


def _survivors(tables: dict, lengths: dict, bad: list, block_size: int) -> dict:
    left = {}
    for name, table in tables.items():
        hit = [place for place, block in enumerate(table) if block in bad]
        left[name] = hit[0] * block_size if hit else lengths[name]
    return left


@check("survivors", forbidden=(story.tokens_left, _cut))
def survivors(learner: Learner) -> str:
    """`survivors(tables, lengths, bad, block_size)`: the tokens that each sequence keeps."""
    wall = _tables(story.at_the_wall())
    later = _tables(story.preempted())
    three = _tables(story.three_requests())
    cases = [
        (wall, [1], "who has page 1 in their table, and who can go on behind a hole?"),
        (wall, [3], "who has page 3 in their table, and at which place?"),
        (wall, [0], "what stands before the first page?"),
        (wall, [], "nothing is damaged: who loses anything?"),
        (wall, [6, 7], "whose pages are 6 and 7?"),
        (wall, [3, 1], "which damaged page comes first in the text?"),
        (later, [2], "page 2 is the last in a's table: who else has it, and how many tokens do they have?"),
        (later, [7], "c's last page holds one token: how many stand before it?"),
        (three, [5, 2], "page 5 is morrow's first: the number of a page, or its place in the table?"),
    ]
    for state, bad, question in cases:
        expect(learner, *state, bad, 4, gives=_survivors(*state, bad, 4), question=question)
    rng = seeded(90)
    for _ in range(200):
        size = int(rng.choice(sizes(1, 2, 4, 16)))
        tables, lengths = {}, {}
        for name in "abcd"[: rng.integers(1, 5)]:
            lengths[name] = int(rng.integers(0, 5 * size + 1))
            tables[name] = rng.permutation(12)[: -(-lengths[name] // size)].tolist()
        bad = rng.permutation(12)[: rng.integers(0, 4)].tolist()
        gives = _survivors(tables, lengths, bad, size)
        expect(
            learner, tables, lengths, bad, size, gives=gives, question="the first damaged page of each table"
        )
    return "The wall, half-full tails, several damages, and 200 random tables."


def _tables(pool: story.TextPool) -> tuple[dict, dict]:
    names = pool.manager.seq_ids
    return {name: pool.table(name) for name in names}, {name: pool.manager.length(name) for name in names}


# ---- save_atomically(disk, name, data)

OLD, NEW = b"the old snapshot", b"the new snapshot, a little longer"


@check("save_atomically")
def save_atomically(learner: Learner) -> str:
    """`save_atomically(disk, name, data)`: after a crash at any moment, the old file or the new one."""
    for old in (OLD, None):
        disk = Disk({"wall": OLD} if old else {})
        disk.write("other", b"whatever")
        before = len(disk.steps)
        learner(disk, "wall", NEW)
        _old_or_new(disk, old, before)
        if disk.read("other") != b"whatever":
            raise Wrong("Another file in the folder was changed.", "whose file is it?")
        if extra := sorted(set(disk.names()) - {"wall", "other"}):
            raise Wrong(
                f"When all is done, {extra} lie beside the snapshot.",
                "who tidies up?",
            )
    disk = Disk({"wall": OLD})
    for data in (NEW, OLD):
        learner(disk, "wall", data)
    names = [what.removesuffix(" is empty") for what, _ in disk.steps if what.endswith(" is empty")]
    if len(set(names)) < len(names):
        raise Wrong(
            f"Two saves wrote under the names {names}.", "what if another process saves at the same moment?"
        )
    _full_disk(learner)
    return "Old or new after a crash at any step, the new one when it returns, the old one on a full disk."


def _old_or_new(disk: Disk, old: Found, before: int) -> None:
    if "wall" not in disk.names():
        raise Wrong(
            f"Afterwards there is no file called wall, only {disk.names()}.", "what was the last step to be?"
        )
    if disk.read("wall") != NEW:
        raise Wrong(f"Afterwards wall holds {show(disk.read('wall'))}.", "what was to be saved?")
    for what, found in disk.crashes("wall")[before:]:
        for data in found:
            if data not in (old, NEW):
                seen = _in_words(data)
                raise Wrong(f"{what}, and the power fails: wall may be {seen}.", _why_torn(what, data))
    found = disk.crashes("wall")[-1][1]
    if found != [NEW]:
        seen = " or ".join(_in_words(data) for data in found)
        raise Wrong(
            f"save has returned, then the power fails: wall may be {seen}.",
            "the bytes are safe: is their name?",
        )


def _why_torn(what: str, data: Found) -> str:
    if data is None:
        return "is there a moment at which neither the old nor the new file has the name?"
    if what in ("wall is empty", "half of wall is written", "wall is written"):
        return "under which name may half a file lie?"
    return "the name has arrived: have the bytes?"


def _in_words(data: Found) -> str:
    if data is None:
        return "missing"
    if data == b"":
        return "empty"
    names = {OLD: "the old one", NEW: "the new one"}
    return names.get(data, f"a part, {show(data)}")


def _full_disk(learner: Learner) -> None:
    disk = Disk({"wall": OLD}, room=len(OLD) + 20)
    try:
        learner(disk, "wall", NEW)
    except _Raised as raised:
        if not isinstance(raised.error, OSError):
            raise
    else:
        raise Wrong("The disk was full, and nobody was told.", "who must learn that nothing was saved?")
    for what, found in disk.crashes("wall"):
        if found != [OLD]:
            seen = " or ".join(_in_words(data) for data in found)
            raise Wrong(
                f"The disk is full. After {what!r} wall may be {seen}.", "is the old file still needed?"
            )
    if extra := sorted(set(disk.names()) - {"wall"}):
        raise Wrong(
            f"The disk is full, the save gave up, and {extra} still take room.",
            "a full disk, and who cleans up half a file?",
        )


# ---- the faulty line

FAULTY = 5


@check("the faulty line", wants="value")
def temporary_line(learner: Learner) -> str:
    """The line that lets two writers get in each other's way."""
    answer = learner.value
    if isinstance(answer, bool) or not isinstance(answer, int) or not 1 <= answer <= 11:
        raise Wrong(f"answer is {show(answer)}; it takes the number of one line, 1 to 11.")
    if answer != FAULTY:
        if answer in (3, 4):
            question = "the key tells the contents: if the file is there, what would a second one add?"
        elif answer in (6, 8):
            question = "these bytes are right, and safe: whose file is it that they go into?"
        elif answer == 10:
            question = (
                "the rename failed, for its file was gone: who took it, and how could they know its name?"
            )
        else:
            question = "what do the two writers share, though neither needs it from the other?"
        raise Wrong(f"Line {answer} does what it should.", question)
    return "Both writers use one temporary file. Its name must be nobody else's."
