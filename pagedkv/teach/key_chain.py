"""Which blocks of a prompt are found: change one letter, and watch the chain of keys break."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

import ipywidgets

from ..allocator import whole_number
from ..prefix_cache import block_digest, root_link, token_bytes
from . import pages
from .pages import _FREE, _LETTERS, _PLAIN, _SMALL, _cell, _coloured, _head, _row, _table
from .widgets import _LABEL, PredictFirst, Storyboard

MOST_LETTERS = 48
SHOWN_DIGITS = 6  # of a key
OTHER_SALT = "another tenant"
_FOUND, _MISS, _OPEN, _LAST = "found", "not found", "not full", "must run"


@dataclass(frozen=True)
class Looked:
    """One block of a prompt, and what the cache says to it."""

    letters: str
    parent: bytes  # key of the block before it, or of the root
    key: bytes | None  # None: it is not full
    elsewhere: tuple[int, ...]  # blocks of the cached text with the same letters
    verdict: str  # one of _FOUND, _MISS, _OPEN, _LAST


def keys(text: str, block_size: int, salt: str | None = None) -> list[bytes]:
    """The root's key, then one per full block of a text whose letters are its tokens."""
    chain = [root_link(block_size, cache_salt=salt).digest]
    for block in _blocks(text, block_size):
        if len(block) == block_size:
            chain.append(block_digest(chain[-1], token_bytes("tokens", [ord(c) for c in block])))
    return chain


def look_up(prompt: str, cached: str, block_size: int, salt: str | None = None) -> list[Looked]:
    """What is found of a prompt where `cached` was computed before (without a salt), block by block."""
    known, chain = set(keys(cached, block_size)[1:]), keys(prompt, block_size, salt)
    old = _blocks(cached, block_size)
    looked = []
    for i, letters in enumerate(_blocks(prompt, block_size)):
        full = len(letters) == block_size
        key = chain[i + 1] if full else None
        verdict = _OPEN if not full else _FOUND if key in known else _MISS  # behind a miss no key is known
        if verdict == _FOUND and (i + 1) * block_size == len(prompt):
            verdict = _LAST  # its last token's output is what the model goes on from
        parent = chain[min(i, len(chain) - 1)]
        elsewhere = tuple(j for j, other in enumerate(old) if full and other == letters)
        looked.append(Looked(letters, parent, key, elsewhere, verdict))
    return looked


class KeyChain(PredictFirst):
    """A text is cached, and a prompt comes that differs in one letter: which of its blocks are found?

    The changed prompt is covered until a prediction; then position, letter and salt may be changed.

    Args: text: what is cached, one token a letter; position, letter: where the prompt of the question differs, and
        by what; block_size: tokens per block; name: whose colour it has; because: a sentence that says why, shown
        with the verdict.
    Raises: ValueError for a text too short or too long, a position outside it, or a letter that changes nothing.
    """

    def __init__(
        self,
        text: str,
        *,
        position: int,
        letter: str,
        block_size: int = 4,
        name: str = "night",
        because: str = "",
    ):
        self.text, self.name, self.because = text, name, because
        self.block_size = whole_number("block_size", block_size, minimum=1)
        if not self.block_size < len(text) <= MOST_LETTERS:
            raise ValueError(
                f"the text must have more than {block_size} and at most {MOST_LETTERS} letters, got {len(text)}"
            )
        if whole_number("position", position) >= len(text):
            raise ValueError(f"position must be 0 … {len(text) - 1}, got {position}")
        if not isinstance(letter, str) or len(letter) != 1 or letter == text[position]:
            raise ValueError(f"letter must be another one than {text[position]!r}, got {letter!r}")
        self.position, self.letter = int(position), letter
        self.answer = self._named(self._found(position, letter))
        others = [b for b in self._found() if b != position // self.block_size]
        choices = dict.fromkeys([self._named(others), self.answer, "none", self._named(self._found())])
        question = f"Position {position} becomes {pages.shown(letter)!r}. Which blocks of the prompt are still found?"

        self.place = ipywidgets.IntSlider(
            min=0,
            max=len(text) - 1,
            value=self.position,
            description="Position",
            style=_LABEL,
            disabled=True,
            layout={"width": "320px"},
        )
        self.typed = ipywidgets.Text(
            value=letter,
            description="Letter",
            style=_LABEL,
            disabled=True,
            layout={"width": "110px"},
        )
        self.salt = ipywidgets.Checkbox(
            value=False,
            description="another salt",
            indent=False,
            disabled=True,
            layout={"width": "130px"},
        )
        self.picture = ipywidgets.HTML()
        self.picture.add_class("pagedkv-picture")
        controls = ipywidgets.HBox([self.place, self.typed, self.salt])
        controls.layout.flex_flow = "row wrap"
        super().__init__(
            question, list(choices), lambda guess: guess == self.answer, "", [controls, self.picture]
        )
        for control in (self.place, self.typed, self.salt):
            control.observe(self._draw, names="value")
        self._draw()

    def frame(
        self, position: int | None = None, letter: str | None = None, *, other_salt: bool = False
    ) -> str:
        """The cached text and the prompt as HTML; None: nothing is changed."""
        looked = self._looked(position, letter, other_salt)
        rows = [_row([_head("block", "row"), *(_head(str(i), "col") for i in range(len(looked)))])]
        for name, cells in self._rows(looked).items():
            inside = [html.escape(cell) for cell in cells]
            if name == "prompt" and position is not None:
                block, place = divmod(position, self.block_size)
                before, changed, after = cells[block][:place], cells[block][place], cells[block][place + 1 :]
                marked = f"<u><b>{html.escape(changed)}</b></u>"
                inside[block] = html.escape(before) + marked + html.escape(after)
            styles = [self._style(name, block) for block in looked]
            rows.append(_row([_head(name, "row"), *map(_cell, inside, styles)]))
        return _table(self._caption(position, letter, other_salt), *rows)

    def text_frame(
        self, position: int | None = None, letter: str | None = None, *, other_salt: bool = False
    ) -> str:
        """The same as text."""
        looked = self._looked(position, letter, other_salt)
        rows = {"block": [str(i) for i in range(len(looked))], **self._rows(looked)}
        if position is not None:
            rows["prompt"][position // self.block_size] += " *"
        width = max(len(cell) for cells in rows.values() for cell in cells) + 2
        first = max(map(len, rows)) + 1
        lines = [
            f"{name:<{first}}" + "".join(f"{cell:>{width}}" for cell in cells) for name, cells in rows.items()
        ]
        return "\n".join([self._caption(position, letter, other_salt), *lines])

    def storyboard(self) -> Storyboard:
        """The same text again, the question, the letter of the question, a letter in the last full block, a salt."""
        late = self.block_size * (len(self.text) // self.block_size) - 1
        changes = [(None, None, False), (self.position, self.letter, False), (late, "?", False)]
        changes.append((None, None, True))
        frames = tuple(
            (self.text_frame(p, c, other_salt=salt), self.frame(p, c, other_salt=salt))
            for p, c, salt in changes
        )
        return Storyboard(self.question, self.choices, frames, self._truth())

    def opened(self) -> None:
        self.place.disabled = self.typed.disabled = self.salt.disabled = False
        self._draw()

    def _draw(self, _=None) -> None:
        if not self.is_open:
            self.picture.value = self.frame()
            self.say("The same text comes again. The changed one is covered until you predict.")
            return
        position, letter = self.place.value, self.typed.value[-1:] or None  # what was typed last
        if letter is None or letter == self.text[position]:
            position = letter = None
        self.picture.value = self.frame(position, letter, other_salt=self.salt.value)
        if (position, letter, self.salt.value) == (self.position, self.letter, False):
            self.say(self._judged(self._truth()))
        else:
            found = self._found(position, letter, self.salt.value)
            self.say(
                f"Found: {self._named(found)}; {len(found) * self.block_size} tokens need not be computed."
            )

    def _truth(self) -> str:
        return f"It is {self.answer}. {self.because}".strip()

    def _looked(self, position: int | None, letter: str | None, other_salt: bool) -> list[Looked]:
        prompt = self.text
        if position is not None:
            if whole_number("position", position) >= len(self.text):
                raise ValueError(f"position must be 0 … {len(self.text) - 1}, got {position}")
            if not isinstance(letter, str) or len(letter) != 1:
                raise ValueError(f"letter must be one character, got {letter!r}")
            prompt = self.text[:position] + letter + self.text[position + 1 :]
        return look_up(prompt, self.text, self.block_size, OTHER_SALT if other_salt else None)

    def _found(self, position=None, letter=None, other_salt: bool = False) -> list[int]:
        looked = self._looked(position, letter, other_salt)
        return [i for i, block in enumerate(looked) if block.verdict == _FOUND]

    @staticmethod
    def _named(blocks: Sequence[int]) -> str:
        return ", ".join(map(str, blocks)) or "none"

    def _rows(self, looked: list[Looked]) -> dict[str, list[str]]:
        """Name of the row -> one cell per block."""
        size = self.block_size
        return {
            "cached text": [pages.shown(old).ljust(size, pages.UNFILLED) for old in _blocks(self.text, size)],
            "prompt": [pages.shown(block.letters).ljust(size, pages.UNFILLED) for block in looked],
            "same letters": [
                "in " * bool(block.elsewhere) + (", ".join(map(str, block.elsewhere)) or "–")
                for block in looked
            ],
            "key before": [_digits(block.parent) for block in looked],
            "key": ["–" if block.key is None else _digits(block.key) for block in looked],
            "in the cache": [block.verdict for block in looked],
        }

    def _style(self, row: str, block: Looked) -> str:
        if row == "cached text":
            return _LETTERS + _coloured(self.name)
        if row == "prompt":
            found = block.verdict == _FOUND
            return _LETTERS + (_coloured(self.name) if found else _FREE)
        if row == "in the cache":
            return _PLAIN + "font-weight:bold;" * (block.verdict == _FOUND)
        return _SMALL + "font-family:monospace;" * row.startswith("key")

    def _caption(self, position: int | None, letter: str | None, other_salt: bool) -> str:
        if position is None:
            what = "the same text comes again"
        else:
            old, new = (pages.shown(c) for c in (self.text[position], letter))
            what = f"position {position} is {new!r} instead of {old!r}"
        return what + ", with another salt" * other_salt


def _blocks(text: str, block_size: int) -> list[str]:
    """The blocks of a text, the last one perhaps not full."""
    return [text[i : i + block_size] for i in range(0, len(text), block_size)]


def _digits(key: bytes) -> str:
    return key.hex()[:SHOWN_DIGITS]
