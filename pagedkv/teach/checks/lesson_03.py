"""Checks of lesson 03: slots by hand and in code, reading over pages, blocks for an append, and tables with pages."""

import dis
from collections.abc import Iterator
from types import CodeType

import numpy as np

from pagedkv.allocator import BlockAllocator, PoolExhausted
from pagedkv.block_table import BlockTables, slots_of
from pagedkv.storage import KVStorage

from .. import pages, variants
from ._core import SETTING, Learner, Wrong, _Raised, check, expect, same, seeded, show, sizes
from .lesson_02 import DAY, MORROW, NIGHT, NUM_BLOCKS, Text

BLOCK_SIZE = 4
TABLE, TEXT = [5, 6, 7, 0], "Good morrow, "  # 13 tokens
POSITIONS = [0, 4, 11, 12]
BLOCK_SIZES = (1, 2, 4, 16)


def _edges(block_size: int) -> list[int]:
    """The lengths at which an off-by-one shows."""
    around = (-1, 0, 1)
    return sorted({0, 1, *(times * block_size + d for times in (1, 2) for d in around)})


# ---- by hand


@check("slots by hand", wants="value")
def slots_by_hand(learner: Learner) -> str:
    """The slots of some positions in a given table (of 0, 4, 11 and 12 in [5, 6, 7, 0], blocks of 4)."""
    case, answer = variants.slots(SETTING.variant), learner.value
    if not isinstance(answer, list | tuple | np.ndarray) or len(answer) != len(case.positions):
        raise Wrong(
            f"answer is {show(answer)}; it takes four numbers, the slots of positions {case.positions}."
        )
    drawing = _table_drawn(case.table, case.block_size)
    if same(answer, case.positions):
        raise Wrong(
            "These are the positions themselves.",
            "positions are counted from the beginning of the text: where in the memory does its first block begin?",
            drawing,
        )
    if same(answer, [case.table[position // case.block_size] for position in case.positions]):
        raise Wrong("These are the blocks.", f"how many slots lie before block {case.table[0]}?", drawing)
    if same(answer, slots_of(sorted(case.table), case.positions, case.block_size)):
        order = ", ".join(map(str, sorted(case.table)))
        raise Wrong(f"These slots go through the blocks as {order}.", "what does entry 0 say?", drawing)
    for position, got, slot in zip(case.positions, answer, case.slots, strict=True):
        if not same(got, slot):
            question = (
                "under which entry of the table is it, and how many letters of that block come before it?"
            )
            raise Wrong(f"Position {position}: you have slot {show(got)}.", question, drawing)
    return f"The text ends in slot {case.slots[-1]}, and its first letter is in slot {case.slots[0]}."


def _table_drawn(table: list[int], block_size: int) -> Text:
    """The positions of each entry above its block."""
    spans = [f"{i * block_size}–{(i + 1) * block_size - 1}" for i in range(len(table))]
    pairs = zip(spans, map(str, table), strict=True)
    above, below = zip(*((span, block.rjust(len(span))) for span, block in pairs), strict=True)
    return Text(f"positions  {'  '.join(above)}\nblock      {'  '.join(below)}")


# ---- slots(table, positions, block_size)


@check("slots", own=(slots_of,))
def slots(learner: Learner) -> str:
    """`slots(table, positions, block_size)`: the slot of every position, without a loop."""
    every = np.arange(len(TEXT))
    cases = [
        (TABLE, [0], 4, "position 0 is the first letter of the text: in which block, at which place?"),
        (
            TABLE,
            [4],
            4,
            "position 4 is the first letter of the second block: which entry, which place in it?",
        ),
        (TABLE, POSITIONS, 4, "what did you get by hand?"),
        (TABLE, every, 4, "at which positions does the block change?"),
        (TABLE, [12, 0, 12], 4, "does it matter in which order positions come, or how often?"),
        (TABLE, [], 4, "what are the slots of no positions?"),
        ([3, 1, 2], [0, 1, 2], 1, "the blocks hold one token: what is left of the offset?"),
        ([2, 0], [0, 15, 16, 31], 16, "which numbers change when a block holds 16?"),
    ]
    rng = seeded(3)
    for block_size in sizes(*BLOCK_SIZES):
        table = rng.permutation(9)[:5]
        positions = rng.integers(0, len(table) * block_size, 12)
        cases.append((table, positions, block_size, "does the size of a block stand wherever it should?"))
    for table, positions, block_size, question in cases:
        table, positions = np.array(table, np.int64), np.array(positions, np.int64)
        right = slots_of(table, positions, block_size)
        got = expect(learner, table, positions, block_size, gives=right, question=question)
        if len(positions) and np.asarray(got).dtype.kind not in "iu":
            raise Wrong(f"The slots came as {np.asarray(got).dtype}.", "can you index an array with 20.0?")
    if _loops(getattr(learner.value, "__code__", None)):
        raise Wrong(
            "The slots are right, and found one by one.",
            "which operations of NumPy take all positions at once?",
        )
    return f"{len(cases)} tables and sets of positions, and no loop."


def _loops(code: CodeType | None) -> bool:
    """Whether a function, or one inside it, goes through something step by step."""
    if code is None:
        return False
    inside = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    steps = ("FOR_ITER", "JUMP_BACKWARD")
    return any(op.opname.startswith(steps) for op in dis.get_instructions(code)) or any(map(_loops, inside))


# ---- read(pages, table, length)


def _letter_pages() -> np.ndarray:
    letters = np.full((NUM_BLOCKS, BLOCK_SIZE), pages.POISON)  # [num_blocks, block_size]
    letters.reshape(-1)[slots_of(TABLE, np.arange(len(TEXT)), BLOCK_SIZE)] = list(TEXT)
    return letters


@check("read")
def read(learner: Learner) -> str:
    """`read(pages, table, length)`: what the first `length` positions hold, in their order."""
    letters = _letter_pages()
    table = np.array(TABLE)
    for length in (len(TEXT), 4, 1, 11):
        _reads_text(learner, letters, table, length)

    rng, cases = seeded(4), 0
    for block_size in sizes(*BLOCK_SIZES):
        for length in _edges(block_size):
            needed = -(-length // block_size)
            table = rng.permutation(7)[:needed]
            rows = rng.standard_normal((length, 2, 3))  # [length, num_kv_heads, head_dim]
            kv = np.full((7, block_size, 2, 3), np.nan)  # [num_blocks, block_size, num_kv_heads, head_dim]
            kv.reshape(-1, 2, 3)[slots_of(table, np.arange(length), block_size)] = rows
            for padding in (0, 2):
                padded = np.concatenate([table, np.full(padding, -1)]).astype(np.int64)
                _reads_rows(learner, kv, padded, length, rows)
                cases += 1
    return f"The story's text, and {cases} tables of keys."


def _reads_text(learner: Learner, letters: np.ndarray, table: np.ndarray, length: int) -> None:
    said, expected = f"read(pages, {show(table)}, {length})", TEXT[:length]
    got = np.asarray(learner(letters, table, length))
    if got.dtype.kind != "U" or got.ndim != 1:
        raise Wrong(
            f"{said} gave {show(got)}, expected an array of {length} letters, shape ({length},).",
            "two axes of the pages are gone when the text is one line: which?",
        )
    text = "".join(got)
    if text == expected:
        return
    blocks = Text("   ".join(f"block {b}: {pages.shown(''.join(letters[b]))}" for b in TABLE))
    if text.startswith(expected):
        question = f"it holds {length} tokens: how many slots of its last block are its own?"
    elif expected.startswith(text):
        question = f"{length} tokens: how many whole blocks are these, and where is the rest?"
    else:
        question = "in which order does the text go through its blocks, and where is that written down?"
    raise Wrong(f"{said} gave {pages.shown(text)!r}, expected {pages.shown(expected)!r}.", question, blocks)


def _reads_rows(learner: Learner, kv: np.ndarray, table: np.ndarray, length: int, rows: np.ndarray) -> None:
    got = np.asarray(learner(kv, table, length))
    said = f"read(pages, {show(table)}, {length}) with blocks of {kv.shape[1]}"
    if got.shape != rows.shape:
        raise Wrong(
            f"{said} gave shape {got.shape}, expected {rows.shape}: {length} rows of keys.",
            "a slot may hold a letter, or heads and numbers: which axes stay as they are?",
        )
    if not same(got, rows):
        seen = "NaN" if got.dtype.kind == "f" and np.isnan(got).any() else "other rows"
        raise Wrong(f"{said} gave {seen}.", "which slots did nobody write, and what keeps you from them?")


# ---- new_blocks(length, more, block_size)


@check("new blocks")
def new_blocks(learner: Learner) -> str:
    """`new_blocks(length, more, block_size)`: how many blocks a text of `length` tokens needs for `more`."""
    cases = [
        ((11, 2, 4), "morrow has one slot left: who takes it, and who does not fit?"),
        ((10, 2, 4), "how many slots of night's last block are free?"),
        ((8, 1, 4), "day fills its blocks exactly: where does its 9th token go?"),
        ((0, 10, 4), "a new text holds no block yet: how many does Good night need?"),
        ((12, 0, 4), "nothing is added: what is there to fetch?"),
        ((7, 1, 8), "blocks of 8, and 7 are filled: what is left?"),
        ((8, 1, 8), "blocks of 8, and all 8 are filled: what is left?"),
        ((8, 129, 8), "how many blocks do 137 tokens need in all, and how many are there?"),
        ((1, 8, 1), "a block of one token: what does each token need?"),
    ]
    for block_size in sizes(*BLOCK_SIZES):
        lengths = _edges(block_size)
        question = "how many blocks before, how many after?"
        cases += [((length, more, block_size), question) for length in lengths for more in lengths]
    for (length, more, block_size), question in cases:
        right = -(-(length + more) // block_size) - -(-length // block_size)
        expect(learner, length, more, block_size, gives=right, question=question)
    return f"{len(cases)} appends, at every edge of a block."


# ---- tables and pages together


LAYERS, HEADS, HEAD_DIM = 2, 1, 2


class _Twin:
    """The learner's tables beside plain lists: what each sequence's keys and values must be."""

    def __init__(self, learner: Learner, num_blocks: int, block_size: int, seed: int):
        self.pool, self.block_size = BlockAllocator(num_blocks), block_size
        self.mine = learner(self.pool, LAYERS, block_size, HEADS, HEAD_DIM)
        self.kv: dict[str, np.ndarray] = {}  # name -> [2, layers, length, heads, head_dim]
        self.rng = seeded(seed)

    def add(self, name: str) -> None:
        self.mine.add(name)
        self.kv[name] = np.zeros((2, LAYERS, 0, HEADS, HEAD_DIM), np.float32)

    def new_rows(self, n: int) -> np.ndarray:
        return self.rng.standard_normal((2, LAYERS, n, HEADS, HEAD_DIM)).astype(np.float32)

    def append(self, name: str, n: int, question: str = "where do its new positions begin?") -> None:
        new, start = self.new_rows(n), self.kv[name].shape[2]
        got = self.mine.append(name, *new)
        self.kv[name] = np.concatenate([self.kv[name], new], axis=2)
        table = self.table(name)
        said = f"append({name!r}, …) of {_tokens(n)} to {start}"
        needed = -(-(start + n) // self.block_size)
        if len(table) != needed:
            raise Wrong(
                f"After {said} its table is {show(table)}, expected {needed} entries.",
                "how many blocks before, how many after? And does a second layer need more of them?",
            )
        right = slots_of(table, np.arange(start, start + n), self.block_size)
        if not same(got, right):
            raise Wrong(
                f"{said}, table {show(table)}, gave slots {show(got)}, expected {show(right)}.", question
            )

    def free(self, name: str) -> None:
        self.mine.free(name)
        del self.kv[name]

    def refuses(self, name: str, n: int) -> None:
        before, free = self.table(name), self.pool.num_free
        said, question = (
            f"append({name!r}, …) of {_tokens(n)}",
            "the pool has said no: what may have changed by then?",
        )
        try:
            got = self.mine.append(name, *self.new_rows(n))
        except _Raised as raised:
            if not isinstance(raised.error, PoolExhausted):
                raise
        else:
            raise Wrong(f"{said} was accepted with {free} blocks free, and gave {show(got)}.", question)
        if self.table(name) != before or self.pool.num_free != free:
            now = f"{self.pool.num_free} blocks are free, and its table is {show(self.table(name))}"
            raise Wrong(f"{said} was refused with {free} free and table {show(before)}; now {now}.", question)
        try:
            self.look(f"{said} was refused")
        except _Raised as raised:
            raise Wrong(f"{said} was refused, and then {raised}", question) from None

    def table(self, name: str) -> list[int]:
        tables = self.mine.tables
        if not isinstance(tables, dict) or not isinstance(tables.get(name), list | np.ndarray):
            raise Wrong(
                f"tables should be a dict, with a list of block ids for {name!r}.",
                "who names the blocks of a sequence?",
            )
        return [int(block) for block in tables[name]]

    def is_table(self, name: str, expected: list[int], question: str) -> None:
        if self.table(name) != expected:
            raise Wrong(
                f"The table of {name!r} is {show(self.table(name))}, expected {show(expected)}.", question
            )

    def look(self, after: str) -> None:
        """Every sequence reads back what was written, and no block is lost or owned twice."""
        for name, layer, (keys, values) in self._expected():
            got = self.mine.read(layer, name)
            said = f"After {after}, read({layer}, {name!r})"
            if not isinstance(got, tuple | list) or len(got) != 2:
                raise Wrong(f"{said} gave {show(got)}, expected two arrays: keys and values.")
            got_keys, got_values = map(np.asarray, got)
            if got_keys.shape != keys.shape or got_values.shape != values.shape:
                shapes = f"shapes {got_keys.shape} and {got_values.shape}, expected {keys.shape} twice"
                question = "how many tokens does it hold, and how many slots has its last block?"
                raise Wrong(f"{said} gave {shapes}.", question)
            if (same(got_values, got_keys) or same(got_keys, values)) and keys.size:
                raise Wrong(f"{said} gave the same numbers twice.", "one table; and how many memories?")
            if not same(got_keys, keys) or not same(got_values, values):
                wrong = "keys" if not same(got_keys, keys) else "values"
                raise Wrong(
                    f"{said} gave other {wrong} than were written.",
                    "whose are they: another layer's, another sequence's, or nobody's?",
                )
        held = sum(len(self.table(name)) for name in self.kv)
        if self.pool.num_free != self.pool.num_blocks - held:
            raise Wrong(
                f"After {after}, tables name {held} of {self.pool.num_blocks} blocks, {self.pool.num_free} are free.",
                "who took a block and wrote it down nowhere, or forgot to give it back?",
            )

    def _expected(self) -> Iterator[tuple[str, int, np.ndarray]]:
        return ((name, layer, kv[:, layer]) for name, kv in self.kv.items() for layer in range(LAYERS))


def _tokens(n: int) -> str:
    return f"{n} token" + "s" * (n != 1)


@check(
    "tables and pages",
    own=(slots_of, BlockTables.put, BlockTables.append, BlockTables.slots, KVStorage.write, KVStorage.read),
    wants="class",
)
def tables(learner: Learner) -> str:
    """`MyTables(allocator, num_layers, block_size, num_kv_heads, head_dim)`: add, append, read, free, tables."""
    twin = _Twin(learner, NUM_BLOCKS, BLOCK_SIZE, seed=0)
    for name, table, n in (("night", NIGHT, 10), ("day", DAY, 8), ("morrow", MORROW, 11)):
        twin.add(name)
        twin.append(name, n, "the first token of a text: at which position?")
        twin.is_table(name, table, "which blocks does the allocator give, and in which order do they go in?")
    twin.look("the three moved in")
    twin.refuses("day", 1)
    twin.free("night")
    twin.look("night left")
    twin.append("morrow", 2, "morrow held 11 tokens, positions 0 to 10: what is the position of the next?")
    twin.is_table("morrow", TABLE, "night named block 0 first when it left: who gets it?")
    twin.look("morrow went on")
    twin.refuses("day", 12)
    twin.append("day", 8)
    twin.look("day went on")

    steps = sum(_random_steps(learner, block_size) for block_size in sizes(*BLOCK_SIZES))
    return f"The story, and {steps} random steps against plain lists."


def _random_steps(learner: Learner, block_size: int, steps: int = 40) -> int:
    twin = _Twin(learner, 6, block_size, seed=block_size)
    for step in range(steps):
        if len(twin.kv) < 3:
            twin.add(f"s{step}")
        name = str(twin.rng.choice(list(twin.kv)))
        if twin.rng.random() < 0.15:
            twin.free(name)
            twin.look(f"{name} left")
            continue
        n, start = int(twin.rng.integers(1, block_size + 3)), twin.kv[name].shape[2]
        if -(-(start + n) // block_size) - -(-start // block_size) > twin.pool.num_free:
            twin.refuses(name, n)
        else:
            twin.append(name, n)
            twin.look(f"append({name!r}, …) of {_tokens(n)}")
    return steps
