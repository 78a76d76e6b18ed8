"""One decode step in slow motion: which page feeds which part of the product, and what runs along."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

import ipywidgets
import numpy as np
from numpy.typing import ArrayLike

from ..allocator import whole_number, whole_numbers
from . import pages
from .pages import _PLAIN, _SMALL, _UNDER, _cell, _coloured, _head, _row, _table
from .widgets import _LABEL, PredictFirst, Storyboard, _number

LOWEST, HIGHEST = -6, 12  # what the last token's score may be set to
MOST_TOKENS = 32
_WIDE = "min-width:32px;"  # so that nothing jumps when a block is read
_UNREAD = _WIDE + _SMALL + "border:1px dashed #888888;opacity:0.75;"


@dataclass(frozen=True)
class Running:
    """What runs along from block to block, after one of them (online softmax)."""

    own: float  # the block's result, as if it were alone
    peak: float  # the largest score so far
    earlier: float  # by what everything before was multiplied: exp(old peak − new peak)
    total: float  # sum of exp(score − peak) over all keys so far
    out: float  # the result so far
    shares: tuple[float, ...]  # the weight of each key so far; they sum to 1

    @property
    def lse(self) -> float:
        """Log-sum-exp of all scores so far."""
        return self.peak + math.log(self.total)


def running(scores: ArrayLike, values: ArrayLike, block_size: int) -> list[Running]:
    """The state after each block of a decode over one head with one number per value.

    Args: scores, values: float [length], length at least 1; block_size: tokens per block, the last may be part full.
    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
    """
    scores, values = np.asarray(scores, np.float64), np.asarray(values, np.float64)
    states: list[Running] = []
    peak, total, weighted = -np.inf, 0.0, 0.0
    for start in range(0, len(scores), block_size):
        s, v = scores[start : start + block_size], values[start : start + block_size]  # [filled]
        before, peak = peak, max(peak, s.max())
        earlier = float(np.exp(before - peak))
        new, alone = np.exp(s - peak), np.exp(s - s.max())  # [filled]
        total, weighted = total * earlier + new.sum(), weighted * earlier + new @ v
        shares = np.exp(scores[: start + len(s)] - peak) / total
        own = alone @ v / alone.sum()
        states.append(Running(own, peak, earlier, total, weighted / total, tuple(shares)))
    return states


class DecodeStepper(PredictFirst):
    """Steps over the blocks of one sequence: its scores, values and weights, and the running result.

    Everything after the question's block is covered until a prediction; then the last token's score may be changed,
    and one sees that a late large score makes everything before it small.

    Args:
        table: block ids in reading order; values, scores: one number per token [length] (scores 0 if None).
        text, name: what the sequence says, and whose colour it has; block_size: tokens per block.
        question, answer, choices: what to predict of the result after the last block; answer: computed if None.
        late: the last token's score in the storyboard's last frame.
        because: a sentence that says why, shown with the verdict.
    Raises: ValueError for a table that does not fit, fewer than two blocks, or an answer that is no choice.
    """

    def __init__(
        self,
        table: Sequence[int],
        values: ArrayLike,
        scores: ArrayLike | None = None,
        *,
        question: str,
        choices: Sequence | None = None,
        answer: float | None = None,
        text: str = "",
        name: str = "night",
        block_size: int = 4,
        late: float = 6,
        because: str = "",
    ):
        self.table = whole_numbers("block ids", table).tolist()
        self.values = np.asarray(values, np.float64).ravel()
        self.scores = np.zeros(len(self.values)) if scores is None else np.asarray(scores, np.float64).ravel()
        self.block_size = whole_number("block_size", block_size, minimum=1)
        self.name, self.text, self.because, self.late = name, text, because, late
        self.last = -(-len(self.values) // self.block_size)  # blocks, and the number of the last step
        if not 2 <= self.last == len(self.table):
            raise ValueError(
                f"{len(self.values)} values in blocks of {block_size} need {self.last} table entries, "
                f"at least 2: got {len(self.table)}"
            )
        if len(self.values) > MOST_TOKENS or len(self.scores) != len(self.values):
            raise ValueError(
                f"values and scores must be equally many, at most {MOST_TOKENS}: "
                f"got {len(self.values)} and {len(self.scores)}"
            )
        if not (np.isfinite(self.values).all() and np.isfinite(self.scores).all()):
            raise ValueError("values and scores must be finite")
        self.truth = round(self._states()[-1].out, 2)
        self.answer = self.truth if answer is None else answer
        if choices is not None and f"{self.answer:g}" not in [f"{choice:g}" for choice in choices]:
            raise ValueError(f"the answer {self.answer!r} is none of the choices {list(choices)}")
        self.ask_at = self.last - 1

        self.slider = ipywidgets.IntSlider(
            min=0,
            max=self.last,
            value=self.ask_at,
            description="Blocks read",
            style=_LABEL,
            layout={"width": "280px"},
        )
        self.back = ipywidgets.Button(description="Back", icon="step-backward", layout={"width": "90px"})
        self.forward = ipywidgets.Button(
            description="Forward", icon="step-forward", layout={"width": "100px"}
        )
        self.score = ipywidgets.IntSlider(
            min=LOWEST,
            max=HIGHEST,
            value=int(np.clip(round(self.scores[-1]), LOWEST, HIGHEST)),
            description="Score of the last token",
            style=_LABEL,
            disabled=True,
            layout={"width": "340px"},
        )
        self.picture = ipywidgets.HTML()
        self.picture.add_class("pagedkv-picture")
        controls = ipywidgets.HBox([self.back, self.forward, self.slider, self.score])
        controls.layout.flex_flow = "row wrap"
        super().__init__(question, choices, self._matches, "a number", [controls, self.picture])
        self.back.on_click(lambda _: self._go(self.slider.value - 1))
        self.forward.on_click(lambda _: self._go(self.slider.value + 1))
        self.slider.observe(lambda change: self._go(change["new"]), names="value")
        self.score.observe(lambda _: self._go(self.slider.value), names="value")
        self._go(self.ask_at)

    def frame(self, i: int, last_score: float | None = None) -> str:
        """The state after i blocks as HTML; last_score: of the last token, instead of its own."""
        states = self._checked(i, last_score)
        caption = self._caption(i, last_score)
        return self._keys_html(i, last_score, states, caption) + self._running_html(states[:i])

    def text_frame(self, i: int, last_score: float | None = None) -> str:
        """The same as text."""
        states = self._checked(i, last_score)
        lines = [self._caption(i, last_score)]
        for name, cells in self._rows(i, last_score, states).items():
            groups = [cells[s : s + self.block_size] for s in range(0, len(cells), self.block_size)]
            lines.append(
                (f"{name:<9}" + " | ".join("".join(f"{c:>6}" for c in group) for group in groups)).rstrip()
            )
        lines.append("".join(f"{name:>{width}}" for name, width in _COLUMNS.items()))
        for number, state in enumerate(states[:i]):
            cells = self._running_cells(number, state)
            lines.append("".join(f"{c:>{w}}" for c, w in zip(cells, _COLUMNS.values(), strict=True)))
        return "\n".join(lines)

    def storyboard(self) -> Storyboard:
        """The last full blocks, the question, the tail, and the tail with a late large score."""
        shown = [(self.ask_at, None), (self.last, None), (self.last, self.late)]
        frames = tuple((self.text_frame(*which), self.frame(*which)) for which in shown)
        lesson = f"{self._truth()} {self._surprise(self.late)}"
        return Storyboard(self.question, self.choices, frames, lesson)

    def opened(self) -> None:
        self.score.disabled = False
        self._go(self.last)

    def _go(self, i: int) -> None:
        """Show the state after i blocks, or the nearest one that may be seen."""
        end = self.last if self.is_open else self.ask_at
        i = max(0, min(i, end))
        self.slider.value = i
        changed = self.score.value if self.is_open and self.score.value != self.scores[-1] else None
        self.picture.value = self.frame(i, changed)
        self.back.disabled, self.forward.disabled = i == 0, i == end
        if not self.is_open:
            self.say("The last block is covered until you predict.")
        elif changed is not None and i == self.last:
            self.say(html.escape(self._surprise(changed)))
        else:
            self.say(self._judged(self._truth()))

    def _matches(self, guess: str) -> bool:
        return abs(_number(guess) - self.answer) < 0.005

    def _truth(self) -> str:
        return f"It is {self.answer:g}. {self.because}".strip()

    def _surprise(self, last_score: float) -> str:
        state = self._states(last_score)[-1]
        return (
            f"With score {last_score:g} for the last token, what came before its block was multiplied by "
            f"{_factor(state.earlier)}; that token alone has {100 * state.shares[-1]:.1f} % of the weight, "
            f"and the result is {state.out:.2f}."
        )

    def _states(self, last_score: float | None = None) -> list[Running]:
        return running(self._scores(last_score), self.values, self.block_size)

    def _scores(self, last_score: float | None) -> np.ndarray:
        return self.scores if last_score is None else np.append(self.scores[:-1], last_score)

    def _checked(self, i: int, last_score: float | None) -> list[Running]:
        if whole_number("frame", i) > self.last:
            raise ValueError(f"frame must be 0 … {self.last}, got {i}")
        return self._states(last_score)

    def _caption(self, i: int, last_score: float | None) -> str:
        where = f"block {self.table[i - 1]} was read" if i else "nothing is read yet"
        late = "" if last_score is None else f"; the last token has score {last_score:g}"
        return f"{self.name}, step {i} of {self.last}: {where}{late}"

    def _rows(self, i: int, last_score: float | None, states: list[Running]) -> dict[str, list[str]]:
        """Name of the row -> one cell per token."""
        size, n = self.block_size, len(self.values)
        shares = [f"{100 * share:.1f}" for share in states[i - 1].shares] if i else []
        letters = pages.shown(self.text).ljust(n, pages.FILLED)[:n]
        firsts = {p: ("▶" * (p // size == i - 1)) + str(self.table[p // size]) for p in range(0, n, size)}
        return {
            "block": [firsts.get(p, "") for p in range(n)],
            "position": [str(p) for p in range(n)],
            "letter": list(letters),
            "score": [f"{score:g}" for score in self._scores(last_score)],
            "V": [f"{value:g}" for value in self.values],
            "weight %": shares + [pages.UNFILLED] * (n - len(shares)),
        }

    def _running_cells(self, number: int, state: Running) -> list[str]:
        return [
            str(number + 1),
            str(self.table[number]),
            f"{state.own:.2f}",
            f"{state.peak:g}",
            _factor(state.earlier) if number else "–",
            f"{state.total:.3f}",
            f"{state.lse:.3f}",
            f"{state.out:.2f}",
        ]

    def _keys_html(self, i: int, last_score: float | None, states: list[Running], caption: str) -> str:
        size, rows = self.block_size, []
        for name, cells in self._rows(i, last_score, states).items():
            line = [_head(name, "row")]
            if name == "block":
                for p in range(0, len(cells), size):
                    line.append(_cell(cells[p], _UNDER, colspan=len(cells[p : p + size])))
            else:
                for p, cell in enumerate(cells):
                    line.append(_cell(html.escape(cell), self._style(name, p // size, i)))
            rows.append(_row(line))
        return _table(caption, *rows)

    def _style(self, row: str, block: int, i: int) -> str:
        if block >= i:
            return _UNREAD
        coloured = block == i - 1 and row in ("letter", "V", "weight %")
        return _WIDE + (_coloured(self.name) + "font-size:12px;" if coloured else _SMALL)

    def _running_html(self, states: list[Running]) -> str:
        head = _row([_head(name, "col", _PLAIN + "font-size:12px;") for name in _COLUMNS])
        rows = [
            _row([_cell(cell, _PLAIN + "text-align:right;") for cell in self._running_cells(number, state)])
            for number, state in enumerate(states)
        ]
        return _table("What runs along, one row per block", head, *rows)


# Name of a column of the running state -> its width in text
_COLUMNS = {
    "step": 4,
    "block": 7,
    "alone": 8,
    "largest score": 15,
    "earlier ×": 11,
    "sum of exp": 12,
    "log-sum-exp": 13,
    "result": 8,
}


def _factor(number: float) -> str:
    return "1" if number == 1 else f"{number:.4f}" if number >= 0.0001 else f"{number:.6f}"
