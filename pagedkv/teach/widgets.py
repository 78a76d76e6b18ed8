"""Things to play with: predict first, then move the controls.

A widget keeps its answer covered until a prediction is entered; "show me" uncovers it too, but then the
question counts as not predicted. Under each stands a plain function, `frame`, that makes the HTML. Stored in a
notebook, a widget is its `storyboard`: a few frames with the question between the first and the rest. That is what
a reader without a kernel sees, and what the tests compare.
"""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ..allocator import whole_number, whole_numbers
from . import pages

try:
    import ipywidgets
except ImportError as error:
    raise ImportError('ipywidgets is missing: pip install "pagedkv[course]"') from error

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PLAY_INTERVAL = 1200  # milliseconds a frame
_LABEL = {"description_width": "initial"}


# ---- who predicted what ------------------------------------------------------------------------------------


@dataclass
class Score:
    """How many of the questions so far were predicted, and how many of these rightly."""

    asked: int
    predicted: int
    right: int

    def __repr__(self) -> str:
        return f"{self.predicted} of {self.asked} predicted" + (
            f", {self.right} right" * bool(self.predicted)
        )


_answers: dict[str, str] = {}  # question -> "asked", then once and for all "shown", "right" or "wrong"


def score() -> Score:
    """The score since the kernel started. A question that is asked again keeps its first answer."""
    answers = list(_answers.values())
    right = answers.count("right")
    return Score(len(answers), right + answers.count("wrong"), right)


def reset_score() -> None:
    """Forget all questions and predictions."""
    _answers.clear()


# ---- without a kernel --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Storyboard:
    """A widget as a story to read: the first frame, the question, and the other frames behind a fold."""

    question: str
    choices: tuple[str, ...]
    frames: tuple[tuple[str, str], ...]  # text and HTML of each
    lesson: str = ""  # what the frames show, said last

    @property
    def asked(self) -> str:
        """The question with its choices."""
        return f"{self.question} ({' / '.join(self.choices)})" if self.choices else self.question

    def __repr__(self) -> str:
        first, *rest = (text for text, _ in self.frames)
        parts = [first, f"Predict: {self.asked}", *rest]
        return "\n\n".join(parts + [self.lesson] * bool(self.lesson))

    def _repr_html_(self) -> str:
        first, *rest = (drawing for _, drawing in self.frames)
        fold = "".join(rest) + (f"<p>{html.escape(self.lesson)}</p>" * bool(self.lesson))
        return (
            f"{first}<p><b>Predict:</b> {html.escape(self.asked)}</p>"
            f"<details><summary>Open when you have an answer. (In JupyterLab, run this cell to play.)</summary>"
            f"{fold}</details>"
        )


# ---- predict first -----------------------------------------------------------------------------------------


class PredictFirst(ipywidgets.VBox):
    """A question above something that stays covered until it is answered, or given up with "show me".

    Subclasses put their covered controls under it and uncover them in `opened`.

    Args: question: one sentence; choices: what may be answered, None for free entry; is_right: tells whether
        an answer (a str) is right; hint: what the entry box says while it is empty.
    """

    def __init__(
        self,
        question: str,
        choices: Sequence | None,
        is_right: Callable[[str], bool],
        hint: str,
        below: Sequence[ipywidgets.Widget],
    ):
        self.question, self.choices = question, tuple(map(str, choices or ()))
        self._is_right = is_right
        self.prediction: str | None = None
        self.right: bool | None = None  # None: not predicted
        self.is_open = False
        _answers.setdefault(question, "asked")
        asked = ipywidgets.HTML(f"<b>Predict:</b> {html.escape(question)}")
        if self.choices:
            self.entry = ipywidgets.ToggleButtons(
                options=self.choices,
                value=None,
                description="Your guess",
                style={"button_width": "auto"},
                layout={"width": "max-content", "max_width": "100%"},
            )
        else:
            self.entry = ipywidgets.Text(
                placeholder=hint, description="Your guess", layout={"width": "230px"}, style=_LABEL
            )
        self.predict_button = ipywidgets.Button(
            description="Predict", button_style="primary", disabled=True, tooltip="enter your guess"
        )
        self.show_button = ipywidgets.Button(
            description="Show me", tooltip="see it without a guess; counts as not predicted"
        )
        self.verdict = ipywidgets.HTML()
        self.entry.observe(self._entered, names="value")
        self.predict_button.on_click(self._predict)
        self.show_button.on_click(self._show)
        gate = ipywidgets.HBox([self.entry, self.predict_button, self.show_button])
        gate.layout.flex_flow, gate.layout.align_items = "row wrap", "flex-end"  # buttons beside the choices
        super().__init__([asked, gate, *below, self.verdict])
        for part, name in ((self, "widget"), (self.verdict, "verdict"), (asked, "question")):
            part.add_class(f"pagedkv-{name}")

    def opened(self) -> None:
        """Uncover what was covered; called once."""

    def storyboard(self) -> Storyboard:
        """What a reader without a kernel sees."""
        raise NotImplementedError

    def say(self, sentence: str) -> None:
        """Put a sentence under the widget; screen readers read it out."""
        self.verdict.value = f'<div role="status" aria-live="polite">{sentence}</div>' if sentence else ""

    def __repr__(self) -> str:
        return repr(self.storyboard())

    def _repr_mimebundle_(self, **options) -> dict:
        board = self.storyboard()
        return {
            **(super()._repr_mimebundle_(**options) or {}),
            "text/plain": repr(board),
            "text/html": board._repr_html_(),
        }

    def _entered(self, change) -> None:
        self.predict_button.disabled = self.is_open or not str(change["new"] or "").strip()

    def _predict(self, _=None) -> None:
        if self.is_open or not str(self.entry.value or "").strip():
            return
        guess = str(self.entry.value).strip()
        try:
            right = bool(self._is_right(guess))
        except ValueError as error:
            self.say(html.escape(str(error)))
            return
        self.prediction = guess
        self._open(right)

    def _show(self, _=None) -> None:
        if not self.is_open:
            self._open(None)

    def _open(self, right: bool | None) -> None:
        self.is_open, self.right = True, right
        if _answers.get(self.question) == "asked":
            _answers[self.question] = {True: "right", False: "wrong", None: "shown"}[right]
        for control in (self.entry, self.predict_button, self.show_button):
            control.disabled = True
        self.opened()

    def _judged(self, truth: str) -> str:
        """The verdict: what was guessed, and what is so."""
        if self.right is None:
            start = "Not predicted."
        elif self.right:
            start = f"<b>Right:</b> you said {html.escape(self.prediction)}."
        else:
            start = f"<b>Not so:</b> you said {html.escape(self.prediction)}."
        return f"{start} {html.escape(truth)}".strip()


def _number(text: str) -> float:
    """A number that a person typed, "12,5 %" included; ValueError says what was expected."""
    try:
        number = float(text.strip().rstrip("%").strip().replace(",", "."))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"Your guess must be a number, such as 12; this is {text!r}.")
    return number


# ---- the page player ---------------------------------------------------------------------------------------


class PagePlayer(PredictFirst):
    """Steps or plays through the history of a pool, back and forward.

    Up to the frame of the question the reader may look around; what comes after it is covered at first.

    Args:
        frames: a `pages.History`, its frames, or any drawings; at least two.
        question: what to predict.
        answer: what is right: one of the choices, or a number or word to be typed.
        choices: what may be answered; None lets the reader type.
        ask_at: the frame that shows the question's situation (default: the first).
        reveal_at: the frame that shows the answer (default: the one after); the verdict waits for it.
        because: one sentence that says why, shown with the verdict.
        storyboard: which frames a reader without a kernel sees (default: up to four, from the question on).
    Raises: ValueError for fewer than two frames, an answer that is none of the choices, or frames that do not exist.
    """

    def __init__(
        self,
        frames: "pages.History | Sequence",
        *,
        question: str,
        answer: str | int | float,
        choices: Sequence | None = None,
        ask_at: int = 0,
        reveal_at: int | None = None,
        because: str = "",
        storyboard: Sequence[int] | None = None,
    ):
        self.frames = list(frames.frames if isinstance(frames, pages.History) else frames)
        last = len(self.frames) - 1
        if last < 1:
            raise ValueError(f"a player needs at least 2 frames, got {len(self.frames)}")
        self.ask_at = self._existing("ask_at", ask_at, last - 1)
        self.reveal_at = self._existing(
            "reveal_at", self.ask_at + 1 if reveal_at is None else reveal_at, last
        )
        if self.reveal_at <= self.ask_at:
            raise ValueError(f"reveal_at must come after ask_at {self.ask_at}, got {self.reveal_at}")
        if choices is not None and str(answer) not in map(str, choices):
            raise ValueError(f"the answer {answer!r} is none of the choices {list(choices)}")
        self.answer, self.because = answer, because
        picked = self._picked() if storyboard is None else storyboard
        self._storyboard = [self._existing("storyboard", i, last) for i in picked]
        if len(self._storyboard) < 2:
            raise ValueError(f"a storyboard needs at least 2 frames, got {self._storyboard}")

        self.slider = ipywidgets.IntSlider(
            min=0,
            max=last,
            value=self.ask_at,
            description="Step",
            style=_LABEL,
            disabled=self.ask_at == 0,
            layout={"width": "300px", "margin": "2px 2px 2px 16px"},
        )
        self.back = ipywidgets.Button(description="Back", icon="step-backward", layout={"width": "90px"})
        self.forward = ipywidgets.Button(
            description="Forward", icon="step-forward", layout={"width": "100px"}
        )
        self.play = ipywidgets.Play(
            min=0,
            max=last,
            value=self.ask_at,
            interval=PLAY_INTERVAL,
            description="Play",
            disabled=True,
            show_repeat=False,
        )
        self.picture = ipywidgets.HTML()
        self.picture.add_class("pagedkv-picture")
        controls = ipywidgets.HBox([self.play, self.back, self.forward, self.slider])
        controls.layout.flex_flow = "row wrap"
        hint = "a number" if isinstance(answer, int | float) else "type it here"
        super().__init__(question, choices, self._matches, hint, [controls, self.picture])
        self.back.on_click(lambda _: self._go(self.slider.value - 1))
        self.forward.on_click(lambda _: self._go(self.slider.value + 1))
        self.slider.observe(lambda change: self._go(change["new"]), names="value")
        self.play.observe(lambda change: self._go(change["new"]), names="value")
        self._go(self.ask_at)

    def frame(self, i: int) -> str:
        """Frame i as HTML."""
        return self._drawing(self._existing("frame", i, len(self.frames) - 1))._repr_html_()

    def storyboard(self) -> Storyboard:
        """The frame of the question, the question, and up to three frames that answer it."""
        drawings = [self._drawing(i) for i in self._storyboard]
        frames = tuple((repr(drawing), drawing._repr_html_()) for drawing in drawings)
        return Storyboard(self.question, self.choices, frames, f"It is {self.answer}. {self.because}".strip())

    def opened(self) -> None:
        self.slider.disabled = self.play.disabled = False
        self._go(self.ask_at)

    def _go(self, i: int) -> None:
        """Show frame i, or the nearest one that may be seen."""
        i = max(0, min(i, len(self.frames) - 1 if self.is_open else self.ask_at))
        self.slider.value = self.play.value = i
        self.picture.value = self.frame(i)
        self.back.disabled = i == 0
        self.forward.disabled = i == (len(self.frames) - 1 if self.is_open else self.ask_at)
        if not self.is_open:
            self.say("The rest is covered until you predict.")
        elif i >= self.reveal_at:
            self.say(self._judged(f"It is {self.answer}. {self.because}".strip()))
        else:
            self.say("Now step forward and watch.")

    def _drawing(self, i: int):
        frame = self.frames[i]
        if not isinstance(frame, pages.Frame):
            return frame
        return frame.strip.noted(frame.notes, f"Step {i} of {len(self.frames) - 1}: {frame.what}")

    def _matches(self, guess: str) -> bool:
        if isinstance(self.answer, int | float):
            return _number(guess) == self.answer
        return guess.casefold() == str(self.answer).casefold()

    def _picked(self) -> list[int]:
        """The question's frame, the one that answers it, and the last, with what lies between them if it fits."""
        last = len(self.frames) - 1
        after = [self.ask_at + 1, self.reveal_at, last]
        return [self.ask_at, *sorted(set(after))]

    @staticmethod
    def _existing(name: str, i: int, last: int) -> int:
        if whole_number(name, i) > last:
            raise ValueError(f"{name} must be 0 … {last}, got {i}")
        return int(i)


# ---- waste by block size -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Waste:
    """What blocks of one size cost for some requests."""

    block_size: int
    idle: float  # slots without a token, per request
    share: float  # of all slots taken
    entries: float  # of a block table, per request


def waste(lengths: ArrayLike, block_size: int) -> Waste:
    """Idle slots and table entries when requests of these lengths lie in blocks.

    Args: lengths: tokens per request [n], n at least 1, each at least 1; block_size: tokens per block.
    """
    lengths = _checked_lengths(lengths)
    blocks = -(-lengths // whole_number("block_size", block_size, minimum=1))  # [n]
    idle = blocks * block_size - lengths
    return Waste(
        block_size, float(idle.mean()), float(idle.sum() / (blocks.sum() * block_size)), float(blocks.mean())
    )


class FragmentationExplorer(PredictFirst):
    """Block size and mix of lengths against waste: half a block per request, whatever its length.

    Args: lengths: tokens per request [n], or several mixes by name; of a single one two more are made,
        longer and shorter; ask: the block size of the question; tolerance: how near a guess must be, in
        points of percent.
    Raises: ValueError for an empty mix or lengths below 1.
    """

    def __init__(
        self, lengths: ArrayLike | Mapping[str, ArrayLike], *, ask: int = 16, tolerance: float | None = None
    ):
        if not isinstance(lengths, Mapping):
            lengths = _checked_lengths(lengths)
            lengths = {  # an odd factor keeps the remainders mixed
                "as given": lengths,
                "all 11 times as long": 11 * lengths,
                "all a tenth as long": -(-lengths // 10),
            }
        self.mixes = {str(name): _checked_lengths(mix) for name, mix in lengths.items()}
        if not self.mixes:
            raise ValueError("at least one mix of lengths is needed")
        if ask not in BLOCK_SIZES:
            raise ValueError(f"ask must be one of {BLOCK_SIZES}, got {ask!r}")
        self.ask, self.first = ask, next(iter(self.mixes))
        self.truth = 100 * waste(self.mixes[self.first], ask).share
        self.tolerance = max(1.0, self.truth / 2) if tolerance is None else tolerance
        self.size = ipywidgets.SelectionSlider(
            options=BLOCK_SIZES,
            value=ask,
            description="Block size",
            disabled=True,
            layout={"width": "340px"},
            style=_LABEL,
        )
        self.mix = ipywidgets.Dropdown(
            options=list(self.mixes), value=self.first, description="Lengths", disabled=True, style=_LABEL
        )
        self.picture = ipywidgets.HTML(self._covered())
        self.picture.add_class("pagedkv-picture")
        controls = ipywidgets.HBox([self.size, self.mix])
        controls.layout.flex_flow = "row wrap"
        question = f"In blocks of {ask}, how many percent of the slots taken hold no token?"
        super().__init__(question, None, self._near, "percent, a number", [controls, self.picture])
        self.size.observe(self._draw, names="value")
        self.mix.observe(self._draw, names="value")

    def frame(self, block_size: int, mix: str | None = None) -> str:
        """The chart as HTML: one row per block size, the chosen one marked."""
        return _waste_table(self._rows(mix), block_size, self._title(mix))

    def storyboard(self) -> Storyboard:
        """The lengths, the question, and the chart: at the question's block size, and for every other mix."""
        frames = [(self._title(), self._covered())]
        for mix in self.mixes:
            frames.append((self._text(mix), self.frame(self.ask, mix)))
        return Storyboard(self.question, (), tuple(frames), self._truth())

    def opened(self) -> None:
        self.size.disabled = self.mix.disabled = False
        self.say(self._judged(self._truth()))
        self._draw()

    def _draw(self, _=None) -> None:
        self.picture.value = self.frame(self.size.value, self.mix.value)

    def _near(self, guess: str) -> bool:
        return abs(_number(guess) - self.truth) <= self.tolerance

    def _rows(self, mix: str | None) -> list[Waste]:
        return [waste(self.mixes[self.first if mix is None else mix], size) for size in BLOCK_SIZES]

    def _title(self, mix: str | None = None) -> str:
        name = self.first if mix is None else mix
        lengths = self.mixes[name]
        return f"{len(lengths):,} requests, {name}: {lengths.mean():,.0f} tokens on average"

    def _truth(self) -> str:
        mix = self.mixes[self.first]
        asked, smallest = waste(mix, self.ask), waste(mix, 1)
        return (
            f"{100 * asked.share:.1f} %: {asked.idle:.1f} slots per request; "
            f"half a block is {(self.ask - 1) / 2:.1f}. "
            "What lies idle depends on the number of requests, not on their length. Smaller blocks leave less idle "
            f"but need longer tables: {smallest.entries:,.0f} entries per request in blocks of 1."
        )

    def _covered(self) -> str:
        return f"<p><b>{html.escape(self._title())}</b></p>"

    def _text(self, mix: str) -> str:
        lines = [
            self._title(mix),
            "block size  idle slots per request  idle share  table entries per request",
        ]
        for row in self._rows(mix):
            mark = "  <" * (row.block_size == self.ask)
            lines.append(
                f"{row.block_size:>10}  {row.idle:>22,.1f}  {100 * row.share:>8.1f} %  {row.entries:>25,.1f}{mark}"
            )
        return "\n".join(lines)


def _waste_table(rows: Sequence[Waste], chosen: int, title: str) -> str:
    if chosen not in BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {chosen!r}")
    most_idle, most_entries = max(r.idle for r in rows), max(r.entries for r in rows)
    heads = ("", "block size", "idle slots per request", "idle share", "table entries per request")
    head = "".join(f'<th scope="col" style="{_CELL}text-align:left;">{name}</th>' for name in heads)
    lines = []
    for row in rows:
        weight = "font-weight:bold;" if row.block_size == chosen else ""
        cells = [
            f'<td style="{_CELL}">{"▶" if row.block_size == chosen else ""}</td>',
            f'<th scope="row" style="{_CELL}text-align:right;{weight}">{row.block_size}</th>',
            _bar(row.idle, most_idle, "#E69F00", weight),
            f'<td style="{_CELL}text-align:right;{weight}">{100 * row.share:.1f} %</td>',
            _bar(row.entries, most_entries, "#56B4E9", weight),
        ]
        lines.append(f'<tr style="background:none;">{"".join(cells)}</tr>')
    caption = f'<caption style="{_CAPTION}">{html.escape(title)}</caption>'
    style = "border-collapse:collapse;border:none;margin:4px 0px;font-size:13px;"
    return f'<table style="{style}">{caption}<tr style="background:none;">{head}</tr>{"".join(lines)}</table>'


_CELL = "padding:2px 8px;border:none;white-space:nowrap;line-height:18px;vertical-align:middle;"
_CAPTION = (
    "caption-side:top;text-align:left;font-weight:bold;white-space:nowrap;padding:2px 8px;color:inherit;"
)


def _bar(value: float, most: float, colour: str, weight: str) -> str:
    """A cell with a bar whose length shows the value, and the number beside it."""
    width = round(150 * value / most) if most else 0
    box = "display:inline-block;height:12px;vertical-align:middle;margin-right:6px;"
    return (
        f'<td style="{_CELL}text-align:left;{weight}">'
        f'<span style="{box}width:{width}px;background-color:{colour};"></span>{value:,.1f}</td>'
    )


def _checked_lengths(lengths: ArrayLike) -> np.ndarray:
    lengths = whole_numbers("lengths", lengths).ravel()
    if not lengths.size or lengths.min() < 1:
        raise ValueError(
            f"lengths must be one or more whole numbers of at least 1, got {lengths.tolist()[:5]}"
        )
    return lengths
