"""One bit of one page turns over: what the texts say then, and who keeps how many tokens.

`DamageBoard` lets one choose the page, the letter and the bit. It shows both ends: a load that checks nothing and
hands out a text nobody wrote, and a load that checks each page and cuts the sequences before it.
"""

import html
from dataclasses import dataclass

import ipywidgets

from ..allocator import whole_number
from ..block_table import SeqId
from . import pages, story
from .pages import _LETTERS, _LOST, _PLAIN, _SMALL, _cell, _coloured, _head, _row, _table
from .widgets import _LABEL, PredictFirst, Storyboard

BITS = 8
CUT = "╳"  # in the place of a token that is lost


@dataclass(frozen=True)
class Damage:
    """What one flipped bit costs.

    Args: block, byte, bit: where; was, reads: the page's letters before and after; unchecked: sequence -> the text
        that a load without checksums hands out; kept: sequence -> tokens that a load with checksums keeps.
    """

    block: int
    byte: int
    bit: int
    was: str
    reads: str
    unchecked: dict[SeqId, str]
    kept: dict[SeqId, int]


def flip(pool: story.TextPool, block: int, byte: int, bit: int) -> Damage:
    """Turn over one bit of one letter in a copy of a page.

    Args: pool: one letter a byte; block, byte (the slot in the block), bit: 0 is the lowest.
    Raises: ValueError for a place that is not there.
    """
    manager = pool.manager
    ends = {"block": manager.num_blocks, "byte": manager.block_size, "bit": BITS}
    for (name, end), value in zip(ends.items(), (block, byte, bit), strict=True):
        if whole_number(name, value) >= end:
            raise ValueError(f"{name} must be 0 … {end - 1}, got {value}")
    size, letters = manager.block_size, pool.letters.block(block)
    starts = {
        name: pool.table(name).index(block) * size for name in manager.seq_ids if block in pool.table(name)
    }
    filled = max([min(manager.length(name) - start, size) for name, start in starts.items()], default=0)
    was = letters[:filled].ljust(size, pages.UNFILLED)  # what freed blocks hold is nobody's
    reads = was
    if byte < filled:
        reads = was[:byte] + chr(ord(was[byte]) ^ 1 << bit) + was[byte + 1 :]
    unchecked = {name: pool.read(name) for name in manager.seq_ids}
    for name, start in starts.items():
        text = unchecked[name]
        unchecked[name] = (text[:start] + reads + text[start + size :])[: len(text)]
    return Damage(block, byte, bit, was, reads, unchecked, story.tokens_left(pool, block))


class DamageBoard(PredictFirst):
    """A bit flips in one page: who keeps how many tokens? Then page, letter and bit may be chosen.

    Args: pool: what was saved, of letters that are one byte each; block, byte, bit: where the damage of the question
        is; because: a sentence that says why, shown with the verdict.
    Raises: ValueError for a pool without sequences, a letter that is no single byte, or a place that is not there.
    """

    def __init__(
        self, pool: story.TextPool, *, block: int = 1, byte: int = 1, bit: int = 1, because: str = ""
    ):
        self.pool, self.because = pool, because
        manager = pool.manager
        if not manager.seq_ids:
            raise ValueError("the pool holds no sequence that could lose anything")
        if wide := [c for name in manager.seq_ids for c in pool.read(name) if ord(c) > 255]:
            raise ValueError(f"every letter must be one byte, got {wide[0]!r}")
        self.asked_about = flip(pool, block, byte, bit)
        self.answer = self._named(self.asked_about.kept)
        question = (
            f"A bit flips in block {block}. A load that checks every page finds it: what does each keep?"
        )

        whole = {name: manager.length(name) for name in manager.seq_ids}
        owners = self._owners(block)
        one_pays = whole | {name: self.asked_about.kept[name] for name in owners[:1]}
        page_alone = whole | {name: whole[name] - manager.block_size for name in owners}
        choices = dict.fromkeys(map(self._named, (one_pays, page_alone, self.asked_about.kept, whole)))
        self.block = ipywidgets.ToggleButtons(
            options=[(self._label(b), b) for b in range(manager.num_blocks)],
            value=block,
            description="Page",
            disabled=True,
            style={"button_width": "auto", **_LABEL},
        )
        self.byte = ipywidgets.IntSlider(
            min=0,
            max=manager.block_size - 1,
            value=byte,
            description="Byte",
            disabled=True,
            style=_LABEL,
            layout={"width": "220px"},
        )
        self.bit = ipywidgets.IntSlider(
            min=0,
            max=BITS - 1,
            value=bit,
            description="Bit",
            disabled=True,
            style=_LABEL,
            layout={"width": "220px"},
        )
        self.picture = ipywidgets.HTML()
        self.picture.add_class("pagedkv-picture")
        place = ipywidgets.HBox([self.byte, self.bit])
        place.layout.flex_flow = "row wrap"
        super().__init__(
            question, list(choices), lambda guess: guess == self.answer, "", [self.block, place, self.picture]
        )
        for control in (self.block, self.byte, self.bit):
            control.observe(self._draw, names="value")
        self._draw()

    def frame(self, block: int | None = None, byte: int = 0, bit: int = 0) -> str:
        """What is saved, and what a flipped bit costs whom, as HTML; None: nothing is damaged."""
        if block is None:
            return self.pool.strip(self._caption())._repr_html_()
        damage = flip(self.pool, block, byte, bit)
        heads = (
            "sequence",
            "block table",
            "a load without checksums reads",
            "with checksums it keeps",
            "tokens",
        )
        rows = [_row([_head(name, "col") for name in heads])]
        for name, text in damage.unchecked.items():
            kept = damage.kept[name]
            style = _LETTERS + _coloured(name)
            changed = _LETTERS + (_LOST if text != self.pool.read(name) else _PLAIN)
            rows.append(
                _row(
                    [
                        _head(str(name), "row"),
                        _cell(html.escape(self._table(name, block)), _SMALL),
                        _cell(html.escape(pages.shown(text)), changed),
                        _cell(html.escape(self._kept_text(name, kept)), style),
                        _cell(f"{kept} of {self.pool.manager.length(name)}", _PLAIN),
                    ]
                )
            )
        return self._strip(damage)._repr_html_() + _table("", *rows)

    def text_frame(self, block: int | None = None, byte: int = 0, bit: int = 0) -> str:
        """The same as text."""
        if block is None:
            return repr(self.pool.strip(self._caption()))
        damage = flip(self.pool, block, byte, bit)
        lines = [repr(self._strip(damage))]
        tables = {name: self._table(name, block) for name in damage.kept}
        widths = [max(len(str(name)) for name in tables), max(map(len, tables.values()))]
        longest = max(len(text) for text in damage.unchecked.values())
        for name, text in damage.unchecked.items():
            kept = damage.kept[name]
            lines.append(
                f"{name!s:<{widths[0]}}  {tables[name]:<{widths[1]}}  unchecked: {pages.shown(text):<{longest}}  "
                f"checked: {self._kept_text(name, kept):<{longest}}  {kept} of {self.pool.manager.length(name)}"
            )
        return "\n".join(lines)

    def storyboard(self) -> Storyboard:
        """What is saved, the question, the damage of the question, and one in a page that a single sequence has."""
        asked = self.asked_about
        places: list[tuple] = [(), (asked.block, asked.byte, asked.bit)]
        for number in (1, 0):  # a page that one sequence has, and one that nobody has
            others = [b for b in range(self.pool.manager.num_blocks) if len(self._owners(b)) == number]
            places += [(b, 0, 0) for b in others if b != asked.block][:1]
        frames = tuple((self.text_frame(*place), self.frame(*place)) for place in places)
        return Storyboard(self.question, self.choices, frames, self._truth())

    def opened(self) -> None:
        self.block.disabled = self.byte.disabled = self.bit.disabled = False
        self._draw()

    def _draw(self, _=None) -> None:
        if not self.is_open:
            self.picture.value = self.frame()
            self.say("The damage is covered until you predict.")
            return
        place = self.block.value, self.byte.value, self.bit.value
        self.picture.value = self.frame(*place)
        if place == (self.asked_about.block, self.asked_about.byte, self.asked_about.bit):
            self.say(self._judged(self._truth()))
            return
        kept = flip(self.pool, *place).kept
        lost = sum(map(self.pool.manager.length, kept)) - sum(kept.values())
        self.say(f"They keep {html.escape(self._named(kept))}; {lost} tokens are lost.")

    def _truth(self) -> str:
        return f"It is {self.answer}. {self.because}".strip()

    def _owners(self, block: int) -> list[SeqId]:
        return [name for name in self.pool.manager.seq_ids if block in self.pool.table(name)]

    def _label(self, block: int) -> str:
        return f"{block} {pages.shown(self.pool.letters.block(block))}"

    def _strip(self, damage: Damage) -> pages.Strip:
        return self.pool.strip(self._caption(damage)).noted({damage.block: "damaged"})

    def _caption(self, damage: Damage | None = None) -> str:
        if damage is None:
            return "What is saved"
        if not self._owners(damage.block):
            return f"Block {damage.block} is free: no table names it, so it is not in the file"
        was, reads = pages.shown(damage.was), pages.shown(damage.reads)
        return f"Bit {damage.bit} of byte {damage.byte} in block {damage.block}: {was} becomes {reads}"

    def _table(self, name: SeqId, damaged: int) -> str:
        """A block table, the damaged page in brackets of its own."""
        return " ".join(f"({b})" if b == damaged else str(b) for b in self.pool.table(name))

    def _kept_text(self, name: SeqId, kept: int) -> str:
        return pages.shown(self.pool.read(name)[:kept]) + CUT * (self.pool.manager.length(name) - kept)

    @staticmethod
    def _named(kept: dict[SeqId, int]) -> str:
        """Tokens by sequence in few words: "all 4", or "a 8, b 12"."""
        numbers = set(kept.values())
        if len(numbers) == 1 and len(kept) > 1:
            return f"all {numbers.pop()}"
        return ", ".join(f"{name} {n}" for name, n in kept.items())
