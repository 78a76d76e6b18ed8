"""Drawings of pages: the strip, the block tables, one sequence, and the history of a pool.

Every drawing is data that shows itself twice: `repr` gives compact text, and a notebook shows an HTML table.
Letters, ids and owners are always written out, so colour never carries anything alone. Tables rather than
SVG, because JupyterLab drops SVG from a notebook that was just cloned and is not trusted yet.

`strip`, `tables` and `sequence` draw an engine's state; `strip_of`, `tables_of` and `sequence_of` draw a
reader's own lists before there is an engine.
"""

import html
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike

from ..allocator import BlockAllocator, Event, whole_number, whole_numbers, whole_numbers_below
from ..block_table import NOTHING, SeqId
from ..manager import BlockManager

UNFILLED = "·"  # a slot that holds no token
POISON = "✗"  # a slot that holds NaN
FILLED = "▪"  # a slot that holds a token whose letter is not known
MOST_OWNERS = 8  # names at one block
MOST_BOXES = 64  # larger pools are summed up in numbers
MOST_SEQUENCES = 20
MOST_POSITIONS = 96
BOXES_A_ROW = 8  # half as many where they hold pieces of words
LONGEST_PIECE = 24  # letters of a token that is a piece of a word
WIDEST_BLOCK = 8  # longer blocks are written in several lines, or as "11/16" where letters are not known

# Okabe and Ito's palette, told apart with any kind of colour vision: background, foreground.
PALETTE = (
    ("#E69F00", "#000"),
    ("#56B4E9", "#000"),
    ("#009E73", "#000"),
    ("#CC79A7", "#000"),
    ("#F0E442", "#000"),
    ("#0072B2", "#fff"),
    ("#D55E00", "#000"),
    ("#999999", "#000"),
)
_PLACES = {"night": 0, "day": 1, "morrow": 2}  # the three requests of the story


def colours(name: SeqId) -> tuple[str, str]:
    """Background and foreground of a sequence, the same in every drawing: "a", "b", "c", "d" are the first four."""
    if isinstance(name, int):
        place = name
    elif len(name) == 1 and name.isalpha():
        place = ord(name.lower()) - ord("a")
    else:
        place = _PLACES.get(name, zlib.crc32(name.encode()))
    return PALETTE[place % len(PALETTE)]


def shown(text: str) -> str:
    """A text with its blanks made visible: space as ␣, line end as ↵."""
    return "".join({" ": "␣", "\n": "↵"}.get(c, c if c.isprintable() else "�") for c in text)


# ---- a storage of letters ----------------------------------------------------------------------------------


class Letters:
    """A storage of one character per slot, with KVStorage's ways. Memory is not erased when a block is freed.

    Where a token is a piece of a word, a slot holds that: `write` takes a list of pieces as well as a text.

    Args: num_blocks, block_size: as in KVStorage; poison: mark slots without a token (`POISON`, drawn as NaN).
    """

    def __init__(self, num_blocks: int = 8, block_size: int = 4, *, poison: bool = False):
        self.num_blocks = whole_number("num_blocks", num_blocks, minimum=1)
        self.block_size = whole_number("block_size", block_size, minimum=1)
        self.poisoned = bool(poison)
        empty = POISON if poison else UNFILLED
        shape = self.num_blocks, self.block_size
        self._letters = np.full(shape, empty, f"<U{LONGEST_PIECE}")  # [num_blocks, block_size]

    def write(self, slots: ArrayLike, text: str | list[str]) -> None:
        """Put a letter, or piece, into each slot. ValueError for a slot outside the pool, or too few or many."""
        slots = whole_numbers_below("slot", slots, self._letters.size)
        if len(slots) != len(text):
            raise ValueError(f"{len(slots)} slots need as many letters, got {len(text)}: {text!r}")
        self._letters.reshape(-1)[slots] = list(text)

    def read(self, slots: ArrayLike) -> str:
        """The letters in some slots, in the order of the slots; a slot that was never written gives "·"."""
        return "".join(self._letters.reshape(-1)[whole_numbers_below("slot", slots, self._letters.size)])

    def block(self, block: int) -> str:
        """The letters of one block, whoever wrote them."""
        return "".join(self.pieces(block))

    def pieces(self, block: int) -> list[str]:
        """What each slot of one block holds."""
        return self._letters[whole_numbers_below("block", [block], self.num_blocks)[0]].tolist()

    def copy_blocks(self, copies: ArrayLike) -> None:
        """Copy blocks: whole numbers [m, 3] of source, destination, filled slots; [m, 2] copies whole blocks."""
        copies = whole_numbers("copies", copies)
        if copies.size and (copies.ndim != 2 or copies.shape[1] not in (2, 3)):
            raise ValueError(f"copies must have shape (m, 2) or (m, 3), got {copies.shape}")
        whole_numbers_below("block", copies[:, :2] if copies.size else [], self.num_blocks)
        whole_numbers_below("filled slot count", copies[:, 2:] if copies.size else [], self.block_size + 1)
        for source, destination, *filled in copies.tolist():
            stop = filled[0] if filled else self.block_size
            self._letters[destination, :stop] = self._letters[source, :stop]

    def poison(self, blocks: ArrayLike, start: int = 0) -> None:
        """Mark the slots of some blocks, from offset `start` on, as holding no token."""
        self._letters[whole_numbers_below("block", blocks, self.num_blocks), start:] = POISON

    def copy(self) -> "Letters":
        """The same letters in a storage of their own."""
        twin = Letters(self.num_blocks, self.block_size, poison=self.poisoned)
        twin._letters = self._letters.copy()
        return twin

    def __repr__(self) -> str:
        return " | ".join(f"{b} {shown(self.block(b))}" for b in range(min(self.num_blocks, MOST_BOXES)))


# ---- the strip ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    """One block of a strip."""

    block: int
    slots: str  # what to show per slot; empty if nothing is known about the contents
    filled: int = 0
    owners: tuple[SeqId, ...] = ()
    count: int = 0  # owners, also where their names are not known
    free: bool = False
    poisoned: bool = False
    note: str = ""  # what just happened to it
    lines: tuple[str, ...] = ()  # of slots, where pieces of words must not be torn

    @property
    def owner_text(self) -> str:
        """Who owns it: "abcd", "night,day", "×2" (names not known), "–" (free), "?" (lost: neither)."""
        names = [str(name) for name in self.owners[:MOST_OWNERS]]
        text = ("" if all(len(n) == 1 and n.isalpha() for n in names) else ",").join(names)
        if not names and self.count:
            text = f"×{self.count}"
        if len(self.owners) > MOST_OWNERS:
            text += f"… ×{self.count}"
        return text + "–" * self.free or "?"


@dataclass(frozen=True)
class Strip:
    """The pool as a row of boxes: id, letters, owners. A pool of more than 64 blocks is summed up."""

    num_blocks: int
    block_size: int  # 0 if it is not known
    num_free: int
    boxes: tuple[Box, ...] = ()  # empty in a large pool
    caption: str | None = None
    num_shared: int = 0
    num_sequences: int | None = None
    has_notes: bool = False  # keeps the row of notes, though it may be empty: a player must not jump

    @property
    def summary(self) -> str:
        """The pool in one line."""
        shared = f" ({self.num_shared} shared)" if self.num_shared else ""
        sequences = "" if self.num_sequences is None else f", {_several(self.num_sequences, 'sequence')}"
        used = self.num_blocks - self.num_free
        return (
            f"{_several(self.num_blocks, 'block')}{f' of {self.block_size}' if self.block_size else ''}: "
            f"{used} in use{shared}, {self.num_free} free{sequences}"
        )

    @property
    def _boxes_a_row(self) -> int:
        widest = max((len(line) for box in self.boxes for line in box.lines), default=0)
        return BOXES_A_ROW if widest <= WIDEST_BLOCK else BOXES_A_ROW // 2

    def noted(self, notes: Mapping[int, str], caption: str | None = None) -> "Strip":
        """The same strip with a note under some blocks, such as {3: "new"}."""
        boxes = tuple(replace(box, note=notes.get(box.block, "")) for box in self.boxes)
        return replace(self, boxes=boxes, caption=caption or self.caption, has_notes=True)

    def __repr__(self) -> str:
        lines = [self.caption] if self.caption else []
        if not self.boxes:
            return self.caption or self.summary
        boxes = [
            " ".join(
                filter(
                    None, [str(b.block), "NaN" if b.poisoned and b.free else b.slots.rstrip(), b.owner_text]
                )
            )
            for b in self.boxes
        ]
        rows = [" | ".join(row) for row in _rows(boxes, self._boxes_a_row)]
        return "\n".join([*lines, *rows]) + f"   free {self.num_free}"

    def _repr_html_(self) -> str:
        caption = self.caption or self.summary
        if not self.boxes:
            used = self.num_blocks - self.num_free
            numbers = {
                "blocks": self.num_blocks,
                "in use": used,
                "shared": self.num_shared,
                "free": self.num_free,
            }
            return _table(
                caption,
                _row([_head(name, "col") for name in numbers]),
                _row([_cell(str(number), _NUMBER) for number in numbers.values()]),
            )
        rows = []
        for boxes in _rows(self.boxes, self._boxes_a_row):
            rows.append(_row([_head("block", "row"), *(_head(str(b.block), "col", _ID) for b in boxes)]))
            if self.block_size:
                rows.append(_row([_head("letters", "row"), *map(_letters_cell, boxes)]))
            rows.append(_row([_head("owners", "row"), *map(_owners_cell, boxes)]))
            if self.has_notes:
                notes = (html.escape(b.note) or "&nbsp;" for b in boxes)
                name = "now" if any(b.note for b in boxes) else ""
                rows.append(_row([_head(name, "row"), *(_cell(note, _NOTE) for note in notes)]))
        free = "" if self.summary in caption else f" <span style='{_QUIET}'>free {self.num_free}</span>"
        return _table(html.escape(caption) + free, *rows, escaped=True)


def strip(source, letters: Letters | None = None, *, caption: str | None = None) -> Strip:
    """Draw a pool: what each block holds and who owns it.

    In text: `0 Good abcd | 1 ␣nig abcd | 2 ht·· a | 3 ···· –   free 5`. `·` is a slot without a token, `▪` a
    token whose letter is not known, `–` a free block. A free block shows the letters that are still in memory.

    Args: source: a BlockManager, PagedKVCache, BlockAllocator, or anything with a `.manager` (and `.letters`);
        letters: what the slots hold; caption: a sentence above the drawing.
    Returns: a Strip; it stays as it is when the pool goes on.
    """
    if isinstance(source, BlockAllocator):
        return _allocator_strip(source, caption)
    manager, letters, poisoned = _parts(source, letters)
    return _manager_strip(manager, letters, poisoned, caption)


def strip_of(
    tables: Mapping[SeqId, Sequence[int]],
    texts: Mapping[SeqId, str] | None = None,
    *,
    num_blocks: int = 8,
    block_size: int = 4,
    free: Iterable[int] | None = None,
    letters: Letters | None = None,
    lengths: Mapping[SeqId, int] | None = None,
    caption: str | None = None,
) -> Strip:
    """Draw a reader's own lists as a strip.

    Args: tables: block ids per sequence, in reading order; texts: what each sequence says (a later one
        overwrites an earlier one in a shared block, as in memory); free: the ids the reader holds for free,
        all others than the tables' if None: a block in neither shows the owner "?", one in both "a–"; letters,
        lengths: instead of texts, a storage and tokens per sequence (whole blocks if neither is known).
    Raises: ValueError for a block outside the pool or a text longer than its table.
    """
    tables = {name: [int(b) for b in table] for name, table in tables.items()}
    texts = dict(texts or {})
    for name, table in tables.items():
        outside = [b for b in table if not 0 <= b < num_blocks and b != NOTHING]
        if outside:
            raise ValueError(f"{name!r} names block {outside[0]}: the pool has 0 … {num_blocks - 1}")
        if len(texts.get(name, "")) > len(table) * block_size:
            raise ValueError(f"{len(texts[name])} letters of {name!r} do not fit in {len(table)} blocks")
    if texts and letters is None:
        letters = _letters_of(tables, texts, num_blocks, block_size)
    whole = {name: len(table) * block_size for name, table in tables.items()}
    lengths = whole | {name: len(text) for name, text in texts.items()} | dict(lengths or {})
    owned = {b for table in tables.values() for b in table if b != NOTHING}
    free_ids = set(range(num_blocks)) - owned if free is None else {int(b) for b in free}
    rows = [(name, table, lengths[name]) for name, table in tables.items()]
    boxes = _boxes(rows, num_blocks, block_size, letters, free_ids, poisoned=False)
    shared = sum(len(box.owners) > 1 for box in boxes)
    return Strip(num_blocks, block_size, len(free_ids), boxes, caption, shared, len(tables))


def drawn(source) -> str:
    """What an engine's part prints as: its kind and its strip. Never fails, as it stands in error messages."""
    kind = type(source).__name__
    try:
        with getattr(source, "_lock", nullcontext()):
            drawing = strip(source)
        return f"{kind}, {replace(drawing, caption=drawing.summary)}"
    except Exception:  # half built, or half way through a change in another thread
        return f"<{kind}>"


def drawn_html(source) -> str | None:
    """`drawn` as HTML, or None (a notebook then shows the text)."""
    try:
        with getattr(source, "_lock", nullcontext()):
            drawing = strip(source)
        return replace(drawing, caption=f"{type(source).__name__}, {drawing.summary}")._repr_html_()
    except Exception:
        return None


def _letters_of(tables: dict, texts: dict, num_blocks: int, block_size: int) -> Letters:
    letters = Letters(num_blocks, block_size)
    for name, text in texts.items():
        slots = [b * block_size + o for b in tables.get(name, []) for o in range(block_size)]
        letters.write(slots[: len(text)], text)
    return letters


def _manager_strip(manager, letters: Letters | None, poisoned: bool, caption: str | None = None) -> Strip:
    counts = manager.allocator.ref_counts
    boxes: tuple[Box, ...] = ()
    if manager.num_blocks <= MOST_BOXES:
        tables = _tables(manager)
        free = set(np.flatnonzero(counts == 0).tolist())
        boxes = _boxes(tables, manager.num_blocks, manager.block_size, letters, free, poisoned)
    return Strip(
        manager.num_blocks,
        manager.block_size,
        manager.num_free,
        boxes,
        caption,
        int((counts > 1).sum()),
        len(manager.tables),
    )


def _allocator_strip(allocator: BlockAllocator, caption: str | None) -> Strip:
    counts = allocator.ref_counts.tolist()
    boxes = tuple(Box(b, "", count=c, free=c == 0) for b, c in enumerate(counts))
    boxes = boxes if len(boxes) <= MOST_BOXES else ()
    return Strip(len(counts), 0, allocator.num_free, boxes, caption, sum(c > 1 for c in counts))


def _boxes(tables, num_blocks, block_size, letters, free, poisoned) -> tuple[Box, ...]:
    owners: dict[int, list[SeqId]] = {b: [] for b in range(num_blocks)}
    filled = dict.fromkeys(range(num_blocks), 0)
    for name, table, length in tables:
        for i, block in enumerate(table):
            if block != NOTHING:
                owners[block].append(name)
                filled[block] = max(filled[block], min(block_size, length - i * block_size))
    return tuple(
        _box(b, owners[b], max(0, filled[b]), block_size, letters, b in free, poisoned)
        for b in range(num_blocks)
    )


def _box(block, owners, filled, block_size, letters, free, poisoned) -> Box:
    lines = ()
    if letters is None:
        slots = FILLED * filled + UNFILLED * (block_size - filled)
        if block_size > WIDEST_BLOCK:
            slots = f"{filled}/{block_size}" if owners else UNFILLED
    else:
        pieces = [shown(piece) for piece in letters.pieces(block)]  # [block_size]
        poisoned = set(pieces) == {POISON}
        if not free or owners:
            pieces[filled:] = UNFILLED * (block_size - filled)
        slots, lines = "".join(pieces), _packed(pieces)
    return Box(block, slots, filled, tuple(owners), len(owners), free, poisoned and free, lines=lines)


def _packed(pieces: list[str]) -> tuple[str, ...]:
    """Lines of up to eight letters that tear no piece."""
    lines = [""]
    for piece in pieces:
        if lines[-1] and len(lines[-1]) + len(piece) > WIDEST_BLOCK:
            lines.append("")
        lines[-1] += piece
    return tuple(lines)


def _parts(source, letters: Letters | None) -> tuple[BlockManager, Letters | None, bool]:
    manager = getattr(source, "manager", source)
    letters = getattr(source, "letters", None) if letters is None else letters
    return manager, letters, bool(getattr(getattr(source, "storage", None), "poisoned", False))


def _tables(manager, at_most: int | None = None) -> list[tuple[SeqId, list[int], int]]:
    ids = manager.seq_ids[:at_most]
    rows = manager.tables.rows(ids)
    lengths = manager.tables.length(rows).tolist()
    return [(s, manager.tables.entries(r).tolist(), n) for s, r, n in zip(ids, rows, lengths, strict=True)]


# ---- block tables ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tables:
    """Every sequence's block table: logical block to physical block, and its length."""

    rows: tuple[tuple[SeqId, tuple[int, ...], int, str], ...]  # name, blocks, tokens, text ("" if not known)
    left_out: int = 0
    caption: str | None = None

    def __repr__(self) -> str:
        cells = [("sequence", "tokens", "block table", "text" if any(r[3] for r in self.rows) else "")]
        cells += [
            (str(name), str(length), "[" + ", ".join(map(_physical, blocks)) + "]", shown(text))
            for name, blocks, length, text in self.rows
        ]
        widths = [max(len(row[i]) for row in cells) for i in range(4)]
        lines = [self.caption] if self.caption else []
        for name, length, blocks, text in cells:
            line = f"{name:<{widths[0]}}  {length:>{widths[1]}}  {blocks:<{widths[2]}}  {text:<{widths[3]}}".rstrip()
            lines.append(line)
        return "\n".join(lines + [f"… and {self.left_out} more"] * bool(self.left_out))

    def _repr_html_(self) -> str:
        widest = max((len(blocks) for _, blocks, _, _ in self.rows), default=0)
        texts = any(text for *_, text in self.rows)
        head = [_head("logical block", "col"), *(_head(str(i), "col", _ID) for i in range(widest))]
        rows = [_row([*head, _head("tokens", "col"), *([_head("text", "col", _TEXT)] * texts)])]
        for name, blocks, length, text in self.rows:
            cells = [_head(_chip(name), "row", _NUMBER, escaped=True)]
            cells += [_cell(_physical(b), _coloured(name)) for b in blocks]
            cells += [_cell("", _PLAIN)] * (widest - len(blocks))
            cells += [_cell(str(length), _NUMBER)]
            cells += [_cell(html.escape(shown(text)), _TEXT)] * texts
            rows.append(_row(cells))
        more = f"; {self.left_out} more" if self.left_out else ""
        return _table(
            (self.caption or "Block tables: the physical block of each logical block") + more, *rows
        )


def tables(source, letters: Letters | None = None, *, caption: str | None = None) -> Tables:
    """Draw the block tables of a pool: per sequence its blocks in reading order, its length and its text.

    Args: as in `strip`. At most 20 sequences are drawn.
    """
    manager, letters, _ = _parts(source, letters)
    drawn = _tables(manager, MOST_SEQUENCES)
    rows = tuple((name, tuple(blocks), n, _text(blocks, n, letters)) for name, blocks, n in drawn)
    return Tables(rows, len(manager.tables) - len(rows), caption)


def tables_of(
    tables: Mapping[SeqId, Sequence[int]],
    texts: Mapping[SeqId, str] | None = None,
    *,
    lengths: Mapping[SeqId, int] | None = None,
    block_size: int = 4,
    caption: str | None = None,
) -> Tables:
    """Draw a reader's own tables; see `strip_of`."""
    texts = texts or {}
    known = {name: len(text) for name, text in texts.items()} | dict(lengths or {})
    rows = [
        (name, tuple(int(b) for b in table), known.get(name, len(table) * block_size), texts.get(name, ""))
        for name, table in tables.items()
    ]
    return Tables(tuple(rows[:MOST_SEQUENCES]), max(0, len(rows) - MOST_SEQUENCES), caption)


def _text(blocks: Sequence[int], length: int, letters: Letters | None) -> str:
    if letters is None:
        return ""
    left = [UNFILLED] * letters.block_size
    held = [piece for b in blocks for piece in (left if b == NOTHING else letters.pieces(b))]
    return "".join(held[:length])


def _physical(block: int) -> str:
    return "–" if block == NOTHING else str(block)


# ---- one sequence ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SequenceView:
    """One sequence, position by position: its letter, block, offset and slot."""

    name: SeqId
    blocks: tuple[int, ...]
    length: int
    block_size: int
    text: str = ""
    caption: str | None = None

    @property
    def columns(self) -> list[tuple[int, str, int, int, int]]:
        """Position, letter, block, offset, slot; −1 for the last two of a block that was left behind."""
        rows = []
        for position in range(min(self.length, MOST_POSITIONS)):
            block, offset = self.blocks[position // self.block_size], position % self.block_size
            letter = shown(self.text[position]) if position < len(self.text) else FILLED
            slot = NOTHING if block == NOTHING else block * self.block_size + offset
            rows.append((position, letter, block, offset, slot))
        return rows

    @property
    def title(self) -> str:
        """The default caption."""
        table = "[" + ", ".join(map(_physical, self.blocks)) + "]"
        return f"{self.name}: {_several(self.length, 'token')}, block table {table}"

    def __repr__(self) -> str:
        lines = [self.caption or self.title]
        width = max([2, *(len(str(slot)) for *_, slot in self.columns)])
        for row in self._rows():
            for name, which in (("position", 0), ("letter", 1), ("block", 2), ("offset", 3), ("slot", 4)):
                parts = []
                for group in _rows(row, self.block_size):
                    cells = [_physical(c[which]) if which in (2, 4) else str(c[which]) for c in group]
                    if name == "block":  # once, over the first of its positions
                        cells[1:] = [""] * (len(cells) - 1)
                    parts.append(" ".join(f"{cell:>{width}}" for cell in cells))
                lines.append(f"{name:<8} " + " | ".join(parts).rstrip())
        return "\n".join(lines + self._more())

    def _repr_html_(self) -> str:
        rows = []
        for row in self._rows():
            groups = list(_rows(row, self.block_size))
            rows.append(_row([_head("position", "row"), *(_cell(str(c[0]), _SMALL) for c in row)]))
            rows.append(_row([_head("letter", "row"), *(_cell(c[1], _coloured(self.name)) for c in row)]))
            rows.append(
                _row(
                    [
                        _head("block", "row"),
                        *(_cell(_physical(g[0][2]), _UNDER, colspan=len(g)) for g in groups),
                    ]
                )
            )
            rows.append(_row([_head("offset", "row"), *(_cell(str(c[3]), _SMALL) for c in row)]))
            rows.append(_row([_head("slot", "row"), *(_cell(_physical(c[4]), _SMALL) for c in row)]))
        return _table("; ".join([self.caption or self.title, *self._more()]), *rows)

    def _rows(self):
        return _rows(self.columns, max(1, 16 // self.block_size) * self.block_size)

    def _more(self) -> list[str]:
        hidden = self.length - MOST_POSITIONS
        return [f"… and {hidden} more positions"] if hidden > 0 else []


def sequence(
    source, seq_id: SeqId, letters: Letters | None = None, *, caption: str | None = None
) -> SequenceView:
    """Draw one sequence: positions above; below each its letter, block, offset and slot.

    Args: source, letters: as in `strip`; seq_id: a sequence of that pool.
    Raises: KeyError if it has no such sequence.
    """
    manager, letters, _ = _parts(source, letters)
    blocks = manager.block_tables([seq_id])[0].tolist()
    length = manager.length(seq_id)
    text = _text(blocks, length, letters)
    return SequenceView(seq_id, tuple(blocks), length, manager.block_size, text, caption)


def sequence_of(
    table: Sequence[int],
    text: str = "",
    *,
    length: int | None = None,
    block_size: int = 4,
    name: SeqId = "a",
    caption: str | None = None,
) -> SequenceView:
    """Draw a reader's own table; `text` or `length` says how many tokens it holds, whole blocks if neither.

    Raises: ValueError if the table has too few blocks for them.
    """
    blocks = tuple(int(b) for b in table)
    if length is None:
        length = len(text) or len(blocks) * block_size
    if length > len(blocks) * block_size:
        raise ValueError(f"{length} tokens do not fit in {len(blocks)} blocks of {block_size}")
    return SequenceView(name, blocks, length, block_size, text, caption)


# ---- history -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """One event of a pool and the strip after it (None: the state before the first event)."""

    event: Event | None
    strip: Strip

    @property
    def what(self) -> str:
        """The event in words, such as "extend a, b (2 tokens)"."""
        if self.event is None:
            return "start"
        event, who = self.event, ", ".join(map(str, self.event.seq_ids))
        if event.kind == "refuse":
            wanted = f"needs {event.counts['requested']} blocks, has {event.counts['available']}"
            return f"refuse {who}: {wanted}"
        if event.kind == "fork":
            parent, *children = map(str, event.seq_ids)
            return f"fork {parent} to {', '.join(children)}"
        tokens = event.counts.get("tokens")
        if event.kind in ("extend", "truncate") and tokens is not None:
            return f"{event.kind} {who} ({_several(tokens, 'token')})"
        return f"{event.kind} {who}".strip()

    @property
    def notes(self) -> dict[int, str]:
        """What the event did to which block."""
        notes: dict[int, str] = {}
        for role, word in (
            ("shared", "shared"),
            ("hits", "hit"),
            ("new", "new"),
            ("evicted", "evicted"),  # its old text was given up for a new one
            ("freed", "freed"),
        ):
            notes |= dict.fromkeys(self._ids(role), word)
        return notes | {new: f"copy of {old}" for old, new in self.copies}

    @property
    def copies(self) -> list[tuple[int, int]]:
        """Source and destination of every copied block."""
        copies = self.event.blocks.get("copies", ()) if self.event else ()
        return [(int(c[0]), int(c[1])) for c in copies]

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """What, new, copied, freed, free: a row of the history."""
        copied = " ".join(f"{old}→{new}" for old, new in self.copies)
        new, freed = (" ".join(map(str, self._ids(role))) for role in ("new", "freed"))
        return self.what, new, copied, freed, str(self.strip.num_free)

    def _ids(self, role: str) -> list[int]:
        return [int(b) for b in self.event.blocks.get(role, ())] if self.event else []


@dataclass
class History:
    """An observer that keeps one frame per event; append it to `manager.observers`.

    Letters that are written after one event and before the next belong to the first event's frame, so a
    frame shows the pool as it was just before the next call. Meant for pools of the size of a drawing.

    Args: source: as in `strip`; letters: what the slots hold.
    """

    source: object
    letters: Letters | None = None
    caption: str | None = None
    _kept: list[Frame] = field(default_factory=list, repr=False)

    def __post_init__(self):
        self._kept.append(Frame(None, self._strip()))

    def __call__(self, event: Event) -> None:
        """Take note of an event: what observers are called with."""
        self._kept[-1] = self._with_letters(self._kept[-1])
        self._kept.append(Frame(event, self._strip()))

    @property
    def frames(self) -> list[Frame]:
        """The start and one frame per event, oldest first."""
        return [*self._kept[:-1], self._with_letters(self._kept[-1])]

    def _strip(self) -> Strip:
        return strip(self.source, self.letters)

    def _with_letters(self, frame: Frame) -> Frame:
        """The frame's owners and lengths with what the slots hold now."""
        _, letters, poisoned = _parts(self.source, self.letters)
        boxes = tuple(
            _box(b.block, list(b.owners), b.filled, frame.strip.block_size, letters, b.free, poisoned)
            for b in frame.strip.boxes
        )
        return replace(frame, strip=replace(frame.strip, boxes=boxes))

    def __repr__(self) -> str:
        names = ("", "what", "new", "copied", "freed", "free")
        cells = [names, *((str(i), *frame.cells) for i, frame in enumerate(self.frames))]
        widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
        lines = [self.caption] if self.caption else []
        for row in cells:
            *left, last = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
            lines.append("  ".join([*left, last.strip().rjust(widths[-1])]))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head = ("step", "what", "new blocks", "copied", "freed", "free now")
        rows = [_row([_head(name, "col", _TEXT if name == "what" else None) for name in head])]
        for i, frame in enumerate(self.frames):
            what, *others = frame.cells
            cells = [_head(str(i), "row"), _cell(html.escape(what), _TEXT)]
            rows.append(_row(cells + [_cell(other or "–", _NUMBER) for other in others]))
        return _table(self.caption or "What happened, one row per call", *rows)


# ---- HTML --------------------------------------------------------------------------------------------------

# Each filled cell has its own background and foreground; everything else takes the theme's text colour.
_MONO = "font-family:monospace;"
_BASE = "padding:2px 6px;text-align:center;vertical-align:middle;white-space:nowrap;line-height:20px;"
_PLAIN = _BASE + "border:none;"
_ID = _PLAIN + "font-weight:bold;"
_NUMBER = _PLAIN + "text-align:right;"
_TEXT = _PLAIN + "text-align:left;" + _MONO
_SMALL = _PLAIN + "font-size:12px;padding:0px 6px;"
_OWNERS = _PLAIN + "font-size:12px;padding:0px;"
_NOTE = _PLAIN + "font-size:12px;font-style:italic;"
_UNDER = _SMALL + "border-top:2px solid;font-weight:bold;"
_ROW_NAME = _PLAIN + "text-align:right;font-weight:normal;font-size:12px;opacity:0.75;"
_LETTERS = _BASE + _MONO + "font-size:15px;min-width:76px;"
_QUIET = "font-weight:normal;opacity:0.75;margin-left:12px;"
_SHARED = "background-color:#e4e4e4;color:#000;border:2px solid #444444;"
_LOST = "background-color:transparent;border:3px double #d55e00;"
_FREE = "background-color:transparent;border:2px dashed #888888;"


def _coloured(name: SeqId) -> str:
    background, foreground = colours(name)
    return _BASE + _MONO + f"background-color:{background};color:{foreground};border:1px solid #444444;"


def _letters_cell(box: Box) -> str:
    if len(box.owners) == 1 and not box.free:
        background, foreground = colours(box.owners[0])
        style = f"background-color:{background};color:{foreground};border:2px solid #444444;"
    else:
        style = _FREE if box.free else _SHARED if box.count else _LOST
    lines = box.lines or _rows(box.slots, WIDEST_BLOCK)
    content = "<br>".join(html.escape(line) for line in lines)
    if box.free and box.poisoned:
        content = "NaN"
    elif box.free and box.slots.strip(UNFILLED):  # memory is not erased
        content = f"<s>{content}</s>"
    return _cell(content, _LETTERS + style)


def _owners_cell(box: Box) -> str:
    if box.slots and not box.owners:
        return _cell("free" if box.free else "? lost", _SMALL)
    if not box.owners:  # an allocator's: neither letters nor names
        return _cell("free" if box.free else box.owner_text, _LETTERS + (_FREE if box.free else _SHARED))
    chips = "".join(_chip(name) for name in box.owners[:MOST_OWNERS])
    many = f"{'…' * (len(box.owners) > MOST_OWNERS)} ×{box.count}" if box.count > 1 else ""
    return _cell(chips + many + " and free!" * box.free, _OWNERS)


def _chip(name: SeqId) -> str:
    background, foreground = colours(name)
    style = f"background-color:{background};color:{foreground};padding:0px 4px;font-weight:bold;"
    return f'<span style="{style}">{html.escape(str(name))}</span>'


def _head(content: str, scope: str, style: str | None = None, *, escaped: bool = False) -> str:
    style = style or (_ROW_NAME if scope == "row" else _PLAIN)
    return f'<th scope="{scope}" style="{style}">{content if escaped else html.escape(content)}</th>'


def _cell(content: str, style: str, colspan: int = 1) -> str:
    span = f' colspan="{colspan}"' if colspan > 1 else ""
    return f'<td{span} style="{style}">{content}</td>'


def _row(cells: Iterable[str]) -> str:
    return f'<tr style="background:none;">{"".join(cells)}</tr>'


def _table(caption: str, *rows: str, escaped: bool = False) -> str:
    style = "border-collapse:separate;border-spacing:4px 1px;border:none;margin:4px 0px;font-size:13px;"
    head = (
        "caption-side:top;text-align:left;white-space:nowrap;font-weight:bold;padding:2px 6px;color:inherit;"
    )
    caption = caption if escaped else html.escape(caption)
    return f'<table style="{style}"><caption style="{head}">{caption}</caption>{"".join(rows)}</table>'


def _rows(items: Sequence, length: int):
    return (items[i : i + length] for i in range(0, len(items), length))


def _several(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
