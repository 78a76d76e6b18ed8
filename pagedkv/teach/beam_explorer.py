"""A beam search to step through: what the beams say, as a tree, above the blocks that hold it.

Both stand over the same positions, so one looks from a letter down to its block: letters that beams have in common
are one cell of the tree, and a block that they share is one cell below. Small blocks follow the tree, large ones
cannot.
"""

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ipywidgets

from ..allocator import whole_number
from ..manager import BlockManager
from .pages import shown
from .widgets import _CAPTION, _LABEL, PredictFirst, Storyboard

NAMES = "abcdefgh"  # a is the likeliest beam of a step
SHARED, ALONE = "background-color:#56B4E9;color:#000;", "background-color:#F0E442;color:#000;"
PLAIN = "background:none;"
_BOX = (
    "padding:1px 2px;border:1px solid #888;text-align:center;vertical-align:middle;white-space:nowrap;"
    "font-family:monospace;font-size:12px;line-height:16px;min-width:13px;"
)
_HEAD = _BOX.replace("border:1px solid #888;", "border:none;") + "font-weight:normal;" + PLAIN


@dataclass(frozen=True)
class BeamPages:
    """One step of a beam search over pages; the beams' rows are in order of likelihood."""

    texts: tuple[str, ...]  # the prompt and what was written
    tables: tuple[tuple[int, ...], ...]  # block ids per beam
    used: int  # blocks in use
    shared: int  # of these, with several owners
    unshared: int  # blocks that the beams would need if each had its own
    copies: int  # blocks copied so far
    copied_slots: int  # tokens in them

    @property
    def order(self) -> list[int]:
        """The beams in the order of the tree: those that begin alike stand side by side, the best first."""

        def place(beam: int) -> list[int]:
            text = self.texts[beam]
            return [self._first(text[:n]) for n in range(1, len(text) + 1)]

        return sorted(range(len(self.texts)), key=place)

    def _first(self, beginning: str) -> int:
        return next(i for i, text in enumerate(self.texts) if text.startswith(beginning))


def replay(
    prompt: str, steps: Sequence[tuple[Sequence[str], Sequence[int]]], block_size: int
) -> list[BeamPages]:
    """The pages of a beam search whose choices are known; frame 0 is the prompt alone.

    Args: steps: per step the texts written so far, best first, and per beam its parent, a row of the step before.
    Raises: ValueError for a text that does not continue its parent's by one letter.
    """
    width, last = _checked(prompt, steps), len(prompt) + len(steps)
    size = whole_number("block_size", block_size, minimum=1)
    manager = BlockManager(width * (-(-last // size) + 1), size)
    manager.add("a")
    manager.extend("a", len(prompt))
    frames, copies, slots = [_now(manager, [prompt], 0, 0)], 0, 0
    for step, (texts, parents) in enumerate(steps):
        names = list(NAMES[: len(texts)])
        if step:
            manager.reorder(names, parents)
        elif width > 1:
            manager.fork("a", names[1:])
        reservation = manager.extend(names)
        copies += len(reservation.copies)
        slots += int(reservation.copies[:, 2].sum())
        frames.append(_now(manager, [prompt + text for text in texts], copies, slots))
    return frames


def _now(manager: BlockManager, texts: Sequence[str], copies: int, slots: int) -> BeamPages:
    owners = manager.allocator.ref_counts  # [num_blocks]
    tables = tuple(map(tuple, manager.block_tables(list(NAMES[: len(texts)])).tolist()))
    used, shared, unshared = int((owners > 0).sum()), int((owners > 1).sum()), int(owners.sum())
    return BeamPages(tuple(texts), tables, used, shared, unshared, copies, slots)


def _checked(prompt: str, steps: Sequence[tuple[Sequence[str], Sequence[int]]]) -> int:
    """The width of a search, or a ValueError for what is none."""
    if not prompt or not steps:
        raise ValueError(
            f"a search needs a prompt and at least one step, got {prompt!r} and {len(steps)} steps"
        )
    before, width = [""], len(steps[0][0])
    if not 1 <= width <= len(NAMES):
        raise ValueError(f"a search has 1 to {len(NAMES)} beams, got {width}")
    for number, (texts, parents) in enumerate(steps, start=1):
        if len(texts) != width or len(parents) != width:
            raise ValueError(f"step {number} has {len(texts)} texts and {len(parents)} parents, not {width}")
        for text, parent in zip(texts, parents, strict=True):
            if parent not in range(len(before)) or text[:-1] != before[parent] or len(text) != number:
                raise ValueError(f"step {number}: {text!r} does not continue beam {parent} of {before}")
        before = list(texts)
    return width


class BeamExplorer(PredictFirst):
    """Width, step and block size of a beam search → its tree and the pages under it.

    Args:
        prompt: what all beams continue.
        searches: per width its steps; a step is (texts written so far, parents), the best beam first.
        width: the one of the question (default: the widest); block_sizes: what the reader may choose; ask: those
            that the question asks for.
    Raises: ValueError for searches of different lengths, or steps that do not continue one another.
    """

    def __init__(
        self,
        prompt: str,
        searches: Mapping[int, Sequence[tuple[Sequence[str], Sequence[int]]]],
        *,
        width: int | None = None,
        block_sizes: Sequence[int] = (1, 2, 4, 8, 16),
        ask: Sequence[int] = (1, 4, 16),
    ):
        if not searches or len({len(steps) for steps in searches.values()}) != 1:
            raise ValueError("searches must be of one length, and at least one")
        for number, steps in searches.items():
            if _checked(prompt, steps) != number:
                raise ValueError(f"the search of width {number} has {len(steps[0][0])} beams")
        if not ask or not set(ask) <= set(block_sizes):
            raise ValueError(f"ask must be some of the block sizes {tuple(block_sizes)}, got {tuple(ask)}")
        self.prompt, self.block_sizes, self.ask = prompt, tuple(block_sizes), tuple(ask)
        self.first = max(searches) if width is None else width
        if self.first not in searches:
            raise ValueError(f"width must be one of {sorted(searches)}, got {width!r}")
        self.pages = {
            (number, size): replay(prompt, steps, size)
            for number, steps in searches.items()
            for size in self.block_sizes
        }
        self.last = len(next(iter(searches.values())))
        self.width = ipywidgets.Dropdown(
            options=sorted(searches), value=self.first, description="Beams", disabled=True, style=_LABEL
        )
        self.step = ipywidgets.IntSlider(
            min=0, max=self.last, value=0, description="Step", disabled=True, style=_LABEL
        )
        self.size = ipywidgets.SelectionSlider(
            options=self.block_sizes,
            value=self.ask[len(self.ask) // 2],
            description="Block size",
            disabled=True,
            style=_LABEL,
        )
        self.width.layout.width, self.step.layout.width, self.size.layout.width = "140px", "280px", "260px"
        self.picture = ipywidgets.HTML(self._covered())
        self.picture.add_class("pagedkv-picture")
        controls = ipywidgets.HBox([self.width, self.step, self.size])
        controls.layout.flex_flow = "row wrap"
        question = (
            f"{_several(self.first, 'beam')} continue the {len(prompt)} tokens of {prompt!r}, and each has written "
            f"its first letter. How many blocks are in use in blocks of {_listed(self.ask)}?"
        )
        super().__init__(question, None, self._matches, "a number for each", [controls, self.picture])
        for control in (self.width, self.step, self.size):
            control.observe(self._draw, names="value")

    def frame(self, width: int, step: int, block_size: int) -> str:
        """Tree and pages as HTML. Step 0 is the prompt alone."""
        return _drawn(
            self._page(width, step, block_size), len(self.prompt), block_size, self._title(width, step)
        )

    def text(self, width: int, step: int, block_size: int) -> str:
        """The same as text; a letter that a beam shares with the one above it is left out."""
        page = self._page(width, step, block_size)
        lines = [f"{self._title(width, step)}, {_said(page, block_size)}"]
        above = ""
        for beam in page.order:
            text = page.texts[beam]
            common = next(
                (i for i, (a, b) in enumerate(zip(text, above, strict=False)) if a != b), len(above)
            )
            lines.append(
                f"{NAMES[beam]}  {' ' * common}{shown(text[common:])}  blocks {list(page.tables[beam])}"
            )
            above = text
        return "\n".join(lines)

    def storyboard(self) -> Storyboard:
        """The prompt, the question, the first letters in two block sizes, and the last step."""
        small, large = self.ask[len(self.ask) // 2], self.ask[-1]
        places = [(1, small), (1, large), (self.last, small)]
        frames = [(self._plain(), self._covered())]
        frames += [(self.text(self.first, *place), self.frame(self.first, *place)) for place in places]
        return Storyboard(self.question, (), tuple(frames), self._truth())

    def opened(self) -> None:
        for control in (self.width, self.step, self.size):
            control.disabled = False
        self.step.value = 1
        self.say(self._judged(self._truth()))
        self._draw()

    def _draw(self, _=None) -> None:
        if self.is_open:
            self.picture.value = self.frame(self.width.value, self.step.value, self.size.value)

    def _page(self, width: int, step: int, block_size: int) -> BeamPages:
        if (width, block_size) not in self.pages:
            raise ValueError(f"there is no search of width {width!r} in blocks of {block_size!r}")
        if whole_number("step", step) > self.last:
            raise ValueError(f"step must be 0 … {self.last}, got {step}")
        return self.pages[width, block_size][step]

    def _asked(self) -> list[BeamPages]:
        return [self._page(self.first, 1, size) for size in self.ask]

    def _matches(self, guess: str) -> bool:
        numbers = [int(n) for n in re.findall(r"\d+", guess)]
        if len(numbers) != len(self.ask):
            raise ValueError(f"Your guess must be {_several(len(self.ask), 'number')}; this is {guess!r}.")
        return numbers == [page.used for page in self._asked()]

    def _truth(self) -> str:
        pages = self._asked()
        said = [
            f"{page.shared} of {page.used} shared in blocks of {size}"
            for size, page in zip(self.ask, pages, strict=True)
        ]
        copied = f"{_several(pages[-1].copies, 'copy')} of {pages[-1].copied_slots} slots in all"
        return (
            f"It is {_listed([page.used for page in pages])}: {', '.join(said)}. Only whole blocks stay shared; "
            f"blocks of {self.ask[-1]} cost {copied}."
        )

    def _title(self, width: int, step: int) -> str:
        return f"{_several(width, 'beam')}, step {step} of {self.last}"

    def _plain(self) -> str:
        return (
            f"{shown(self.prompt)}: {len(self.prompt)} tokens, {_several(self.first, 'beam')} about to go on"
        )

    def _covered(self) -> str:
        return f"<p><b>{html.escape(self._plain())}</b></p>"


# ---- drawing -----------------------------------------------------------------------------------------------


def _drawn(page: BeamPages, prompt: int, block_size: int, title: str) -> str:
    order, length = page.order, len(page.texts[0])
    positions = "".join(f'<td style="{_HEAD}font-size:9px;">{p}</td>' for p in range(length))
    rows = [_row("position", positions)]
    rows += _merged(order, [[_Cell(t[: i + 1], shown(t[i]), 1) for i in range(length)] for t in page.texts])
    rows.append(
        _row("", f'<td style="{_HEAD}text-align:left;" colspan="{length}">in blocks of {block_size}:</td>')
    )
    blocks = [
        [
            _Cell(block, str(block), min(block_size, length - i * block_size), True)
            for i, block in enumerate(table)
        ]
        for table in page.tables
    ]
    rows += _merged(order, blocks)
    caption = f'<caption style="{_CAPTION}">{html.escape(title)}</caption>'
    style = "border-collapse:collapse;border:none;margin:4px 0px;width:auto;"
    return (
        f'<div style="overflow-x:auto;"><table style="{style}">{caption}{"".join(rows)}</table></div>'
        f"<p>{html.escape(_said(page, block_size))}</p>"
    )


@dataclass(frozen=True)
class _Cell:
    """What stands over some positions of one beam; equal keys in neighbouring beams are one cell."""

    key: object
    text: str
    positions: int
    counted: bool = False  # says how many beams it serves


def _merged(order: list[int], cells: list[list[_Cell]]) -> list[str]:
    """A row per beam, in which a cell that the beams below have too reaches down over them."""
    rows = []
    for place, beam in enumerate(order):
        parts = []
        for i, cell in enumerate(cells[beam]):
            if place and cells[order[place - 1]][i].key == cell.key:
                continue  # the cell above reaches down here
            owners = 1
            while place + owners < len(order) and cells[order[place + owners]][i].key == cell.key:
                owners += 1
            times = f"&nbsp;×{owners}" if cell.counted and owners > 1 and cell.positions > 1 else ""
            colour = SHARED if owners > 1 else ALONE
            parts.append(
                f'<td style="{_BOX}{colour}" rowspan="{owners}" colspan="{cell.positions}">'
                f"{html.escape(cell.text)}{times}</td>"
            )
        rows.append(_row(NAMES[beam], "".join(parts)))
    return rows


def _row(name: str, cells: str) -> str:
    head = (
        f'<th scope="row" style="{_HEAD}text-align:right;">{name}</th>'
        if name
        else f'<td style="{_HEAD}"></td>'
    )
    return f'<tr style="{PLAIN}">{head}{cells}</tr>'


def _said(page: BeamPages, block_size: int) -> str:
    copied = f"; {_several(page.copies, 'copy')} of {page.copied_slots} slots so far" if page.copies else ""
    return (
        f"blocks of {block_size}: {page.used} in use, {page.shared} shared; "
        f"{page.unshared} if nothing were shared{copied}"
    )


def _several(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun[:-1]}ies" if noun.endswith("y") else f"{n} {noun}s"


def _listed(numbers: Sequence[int]) -> str:
    *front, last = map(str, numbers)
    return f"{', '.join(front)} and {last}" if front else last
