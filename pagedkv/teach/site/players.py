"""A lesson's widgets without a kernel: every frame that their controls can reach, made when the site is built.

The lesson's own cells make the widget, and the widget is driven as a reader would drive it: to each position of each
control, first with the answer covered, then uncovered. It shows what its frame function gives, and its verdict.
Frames of one widget differ in a few cells, so they are stored as numbers of shared pieces.
"""

import ast
import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ipywidgets

from .. import student
from ..widgets import PredictFirst

MOST_FRAMES = 3000  # of one player; more would not be a page any more
LETTERS = 5  # that may be typed into a text box
NOT_PREDICTED = "Not predicted."
STEPS = ("Step", "Second", "Blocks read")  # names of what goes on by itself, if there are several sliders

# ---- the widgets of a lesson -------------------------------------------------------------------------------


def is_widget(cell: Any) -> bool:
    """Whether a cell's stored output is a widget's storyboard."""
    return cell.cell_type == "code" and any(
        "Predict: " in output.get("data", {}).get("text/plain", "")
        and "(In JupyterLab, run this cell" in output["data"].get("text/html", "")
        for output in cell.outputs
    )


def widgets_of(lesson: Any, name: str) -> dict[str, PredictFirst]:
    """Run a lesson's cells up to its last widget.

    Args:
        lesson: the notebook, as `notebooks.read` gives it; it stays as it is.
        name: the lesson's, for messages.

    Returns: cell id -> widget.

    Raises:
        ValueError: a cell fails that should not, or a widget's storyboard is another than the stored one.
    """
    cells = [cell for cell in lesson.cells if cell.cell_type == "code"]
    ahead = [number for number, cell in enumerate(cells) if is_widget(cell)]
    if not ahead:
        return {}
    found: dict[str, PredictFirst] = {}
    names: dict[str, Any] = {"__name__": "__main__"}
    with _a_quiet_place():
        for number, cell in enumerate(cells[: ahead[-1] + 1]):
            if any(student.mark(cell, kind) for kind in ("exercise", "check", "solution")):
                continue  # nothing later may depend on such a cell
            try:
                shown = _run(cell, names)
            except Exception as error:
                if "raises-exception" in cell.metadata.get("tags", []):
                    continue
                raise ValueError(f"{name}, cell {cell.id!r}: {type(error).__name__}: {error}") from error
            if number in ahead:
                stored = next(output.data["text/plain"] for output in cell.outputs if "data" in output)
                if not isinstance(shown, PredictFirst) or repr(shown) != stored:
                    raise ValueError(
                        f"{name}, cell {cell.id!r} does not give what is stored: run `make notebooks`"
                    )
                found[cell.id] = shown
    return found


@contextlib.contextmanager
def _a_quiet_place() -> Iterator[None]:
    """Where a lesson may print, draw and write files, and nothing of it stays."""
    import matplotlib.pyplot
    import threadpoolctl

    matplotlib.use("Agg")
    here = os.getcwd()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        threadpoolctl.threadpool_limits(1),  # a small model is slower with threads
    ):
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)
            matplotlib.pyplot.close("all")


def _run(cell: Any, names: dict[str, Any]) -> Any:
    """Run one cell, and return what its last line gives."""
    tree = ast.parse(re.sub(r"^%.*$", "", cell.source, flags=re.M))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, cell.id, "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), cell.id, "eval"), names)


# ---- all positions of the controls -------------------------------------------------------------------------


@dataclass(frozen=True)
class Control:
    """What a reader moves: its kind ("slider", "choice", "check"), its name, and a label per position."""

    kind: str
    name: str
    labels: tuple[str, ...]


@dataclass
class Player:
    """Every frame of a widget.

    `covered` and `opened` have a number per position of the controls, in row-major order: the frame that is shown
    there, or -1 where that position cannot be reached. The two `says` number the sentences below in the same way.
    """

    question: str
    choices: list[str]
    right: list[bool]  # per choice
    controls: list[Control]
    main: int  # the control that "Forward" moves and "Play" plays
    start: list[int]  # position of each control when it opens
    covered_start: list[int]
    covered: list[int]
    opened: list[int]
    covered_says: list[int]
    opened_says: list[int]
    pieces: list[str] = field(default_factory=list)
    frames: list[list[int]] = field(default_factory=list)  # of pieces
    sentences: list[str] = field(default_factory=list)
    judged: list[bool] = field(default_factory=list)  # per sentence: it belongs behind "Right: you said …"

    def frame(self, number: int) -> str:
        """A frame's HTML."""
        return "".join(self.pieces[piece] for piece in self.frames[number])

    @property
    def first(self) -> str:
        """The frame with all controls at their first position."""
        return self.frame(next(number for number in self.opened if number >= 0))

    @property
    def last(self) -> str:
        """The frame with all controls at their last position."""
        return self.frame(next(number for number in reversed(self.opened) if number >= 0))

    def dumps(self) -> str:
        """JSON that may stand inside a page."""
        facts = {**vars(self), "controls": [vars(control) for control in self.controls]}
        return json.dumps(facts, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")


def record(widget: PredictFirst) -> Player:
    """Drive a fresh widget through all positions of its controls, covered and then opened.

    Raises: ValueError for more than `MOST_FRAMES` positions.
    """
    moved = list(_controls(widget.children[2:-1]))
    values = _ranges(moved)
    labels = [_labels(control, values_) for control, values_ in zip(moved, values, strict=True)]
    shared = _Shared()
    covered_start = [_index(v, c.value) for c, v in zip(moved, values, strict=True)]
    covered = _walk(widget, moved, values, shared, [not control.disabled for control in moved])
    for control, options, index in zip(moved, values, covered_start, strict=True):
        control.value = options[index]
    widget._show()
    start = [_index(v, c.value) for c, v in zip(moved, values, strict=True)]
    opened = _walk(widget, moved, values, shared, [True] * len(moved))
    controls = [Control(_kind(c), c.description, tuple(text)) for c, text in zip(moved, labels, strict=True)]
    sliders = [number for number, control in enumerate(controls) if control.kind == "slider"]
    return Player(
        widget.question,
        list(widget.choices),
        [bool(widget._is_right(choice)) for choice in widget.choices],
        controls,
        next((number for number in sliders if controls[number].name in STEPS), sliders[0]),
        start,
        covered_start,
        *(covered[0], opened[0], covered[1], opened[1]),
        list(shared.pieces),
        [list(frame) for frame in shared.frames],
        [sentence.removeprefix(NOT_PREDICTED).strip() for sentence in shared.sentences],
        [sentence.startswith(NOT_PREDICTED) for sentence in shared.sentences],
    )


def _controls(below: tuple) -> Iterator[ipywidgets.Widget]:
    """The controls that have a value, in the order in which they stand."""
    for part in below:
        if isinstance(part, ipywidgets.Box):
            yield from _controls(part.children)
        elif hasattr(part, "value") and not isinstance(part, ipywidgets.HTML | ipywidgets.Play):
            yield part


def _kind(control: ipywidgets.Widget) -> str:
    if isinstance(control, ipywidgets.IntSlider | ipywidgets.SelectionSlider):
        return "slider"
    return "check" if isinstance(control, ipywidgets.Checkbox) else "choice"


def _ranges(moved: list[ipywidgets.Widget]) -> list[list[Any]]:
    """What may be set, per control. A slider whose end depends on other controls has its longest range here."""
    before, values = [control.value for control in moved], [_values(control) for control in moved]
    for mover, options in zip(moved, list(values), strict=True):
        for option in options:
            mover.value = option
            values = [max(old, _values(c), key=len) for old, c in zip(values, moved, strict=True)]
        mover.value = before[moved.index(mover)]
    for control, value in zip(moved, before, strict=True):
        control.value = value
    return values


def _values(control: ipywidgets.Widget) -> list[Any]:
    if isinstance(control, ipywidgets.IntSlider):
        return list(range(control.min, control.max + 1))
    if isinstance(control, ipywidgets.Checkbox):
        return [False, True]
    if isinstance(control, ipywidgets.Text):
        return list(dict.fromkeys([control.value, "?", *"aeiou"]))[:LETTERS]
    return [value for _, value in control._options_full]


def _labels(control: ipywidgets.Widget, values: list[Any]) -> list[str]:
    if hasattr(control, "_options_full"):
        return [label for label, _ in control._options_full]
    return [str(value) for value in values]


def _index(values: list[Any], value: Any) -> int:
    return next(i for i, other in enumerate(values) if other == value)


class _Shared:
    """Frames and sentences, each kept once, and numbered in the order in which they came."""

    def __init__(self):
        self.pieces: dict[str, int] = {}
        self.frames: dict[tuple[int, ...], int] = {}
        self.sentences: dict[str, int] = {}

    def frame(self, html: str) -> int:
        parts = re.findall(r"<t[dh]\b.*?</t[dh]>|(?:(?!<t[dh]\b).)+", html, re.S)
        key = tuple(self.pieces.setdefault(part, len(self.pieces)) for part in parts)
        return self.frames.setdefault(key, len(self.frames))

    def sentence(self, text: str) -> int:
        return self.sentences.setdefault(text, len(self.sentences))


def _walk(widget, moved, values, shared, free) -> tuple[list[int], list[int]]:
    """Frame and sentence per position of the controls; controls that are not free stay where they are."""
    frames, says, before = [], [], [control.value for control in moved]
    counts = [len(options) for options in values]
    total = 1
    for count in counts:
        total *= count
    if total > MOST_FRAMES:
        raise ValueError(f"{type(widget).__name__}: {total} positions, more than {MOST_FRAMES}")
    for position in range(total):
        wanted, rest = [], position
        for options in reversed(values):
            rest, index = divmod(rest, len(options))
            wanted.insert(0, options[index])
        if any(not f and w != b for f, w, b in zip(free, wanted, before, strict=True)):
            frames.append(-1), says.append(-1)
            continue
        for control, value in zip(moved, wanted, strict=True):
            if control.value != value:
                control.value = value
        if [control.value for control in moved] != wanted:  # beyond the end, or covered
            frames.append(-1), says.append(-1)
            continue
        frames.append(shared.frame(widget.picture.value))
        says.append(shared.sentence(_said(widget)))
    return frames, says


def _said(widget: PredictFirst) -> str:
    """The verdict without its frame."""
    return re.sub(r"^<div[^>]*>|</div>$", "", widget.verdict.value)
