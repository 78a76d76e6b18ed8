"""Two workers over one pool, and one of them falls asleep with a write in its hand: what lands when it wakes?

`play` tells such an evening second by second, without a real clock. `LeaseTimeline` lets one choose who sleeps,
for how long, and whether the store compares tokens.
"""

import functools
import html
from dataclasses import dataclass

import ipywidgets

from ..allocator import PoolExhausted, whole_number
from ..block_table import slots_of
from . import pages, story
from .pages import _LETTERS, _LOST, _PLAIN, _SMALL, _cell, _coloured, _head, _row, _table
from .scheduler_timeline import Timeline
from .widgets import _LABEL, PredictFirst, Storyboard

LEASE, BEAT = 5, 2  # seconds: a heartbeat makes the lease last from now on; they come at even seconds
PAGES_AT = 5  # when both workers write a page for each of their sequences; the sleep begins just before
LETTERS = dict(zip((11, 13, 15, 17), "now ", strict=True))  # what each sequence says next, and when
END = 17
LONGEST = 10  # seconds of sleep
CARRIED = 1  # the number of everybody's first lease
HOLDS = {1: ("a", "b"), 2: ("c", "d")}
OWN, FREE, FOREIGN, REFUSED = "own", "free", "foreign", "refused"  # where the pages of the sleeper went

MARKS = {
    "w": ("writes", "background-color:#009E73;color:#000;"),
    "♥": ("renews its lease", "background-color:#56B4E9;color:#000;"),
    "z": ("sleeps", "background-color:#999999;color:#000;"),
    "!": ("writes into blocks that are not its own", "background-color:#D55E00;color:#000;"),
    "x": ("is refused", "background-color:#CC79A7;color:#000;"),
    "j": ("joins again", "background-color:#F0E442;color:#000;"),
    "?": ("finds no free block", "background-color:#E69F00;color:#000;"),
    "·": ("has nothing to write", "background:none;color:inherit;"),
    "=": ("its lease holds", "background:none;color:inherit;"),
    "R": ("its blocks are reclaimed", "background-color:#E69F00;color:#000;"),
    " ": ("", ""),
}


# ---- what happens ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """One second of the evening, when it is over.

    Args: strip: the pool; texts: what each sequence reads; damaged: those that do not read what they wrote; said:
        what happened.
    """

    strip: pages.Strip
    texts: dict[str, str]
    damaged: tuple[str, ...]
    said: str


@dataclass(frozen=True)
class Evening:
    """What happened, second by second; in which second the sleeper's pages arrived, and where they went."""

    timeline: Timeline
    moments: tuple[Moment, ...]
    wakes: int
    outcome: str  # OWN, FREE, FOREIGN or REFUSED


def play(worker: int = 1, pause: int = 7, tokens: bool = False) -> Evening:
    """An evening on which one worker sleeps from second 5 on, with a page of each of its sequences in its hand.

    Worker 1 has a and b, worker 2 has c and d, and the pool is at the wall of lesson 04. Heartbeats come every 2
    seconds and make a lease last 5; a reaper looks every second. Simplified: one clock for all.

    Args: worker: who sleeps, 1 or 2; pause: seconds, 0 … 10; tokens: whether the store compares the number that a
        write carries with the one it has on record for the worker.
    """
    if worker not in HOLDS:
        raise ValueError(f"worker must be 1 or 2, got {worker!r}")
    if whole_number("pause", pause) > LONGEST:
        raise ValueError(f"pause must be 0 … {LONGEST}, got {pause}")
    return _played(worker, int(pause), bool(tokens))


@functools.cache
def _played(worker: int, pause: int, tokens: bool) -> Evening:
    stage = _Stage(worker, pause, tokens)
    for second in range(END + 1):
        stage.go_on(second)
    timeline = Timeline(stage.lanes, tuple(stage.free), marks=MARKS, unit="second")
    return Evening(timeline, tuple(stage.moments), stage.wakes, stage.outcome)


class _Stage:
    """The pool, two leases, the numbers that writes must carry, and what has happened so far."""

    def __init__(self, sleeper: int, pause: int, tokens: bool):
        self.sleeper, self.wakes, self.tokens, self.outcome = sleeper, PAGES_AT + pause, tokens, OWN
        self.pool = story.at_the_wall()
        self.wrote = {name: self.pool.read(name) for name in story.ANSWERS}
        self.last = {name: self.pool.table(name)[-1] for name in story.ANSWERS}
        self.page = {name: self.pool.letters.block(block) for name, block in self.last.items()}
        for name in story.ANSWERS:
            self._put(name, pages.UNFILLED * len(self.page[name]))  # not written yet
        self.holds = dict(HOLDS)
        self.until = dict.fromkeys(HOLDS, LEASE)
        self.token = dict.fromkeys(HOLDS, CARRIED)  # on record
        self.lanes = {f"{what} {number}": "" for number in HOLDS for what in ("worker", "lease")}
        self.free, self.moments, self.said = [], [], []

    def go_on(self, second: int) -> None:
        self.said = []
        marks = {f"lease {number}": "R" for number in HOLDS if self._reap(number, second)}
        for number in sorted(HOLDS, key=lambda number: number == self.sleeper):  # who slept comes last
            marks[f"worker {number}"] = self._act(number, second)
        for lane in self.lanes:
            holds = "=" if int(lane[-1]) in self.until else " "
            self.lanes[lane] += marks.get(lane, holds)
        self.free.append(self.pool.num_free)
        texts = {name: self.pool.read(name) for name in self.pool.manager.seq_ids}
        damaged = (n for n, text in texts.items() if text != self.wrote[n] and pages.UNFILLED not in text)
        said = ". ".join(self.said) + "." * bool(self.said)
        self.moments.append(Moment(self.pool.strip(), texts, tuple(damaged), said))

    def _reap(self, number: int, second: int) -> bool:
        if self.until.get(number, END + 1) > second:
            return False
        del self.until[number]
        self.token[number] += 1
        before, names = self.pool.num_free, self.holds[number]
        blocks = sorted(self.pool.free(names).tolist())
        self.holds[number] = ()
        self.said.append(
            f"The lease of worker {number} is over, {_listed(names)} are given up: blocks {_listed(blocks)} come "
            f"free, {before} free become {self.pool.num_free}"
        )
        return True

    def _act(self, number: int, second: int) -> str:
        """What a worker does in this second, as a mark."""
        wakes = self.wakes if number == self.sleeper else PAGES_AT
        if PAGES_AT <= second < wakes:
            return "z"
        if second == wakes:
            mark = self._pages_arrive(number)
        elif number not in self.until:
            self.until[number] = second + LEASE
            self.said.append(
                f"Worker {number} learns that it was given up, and joins again: number {self.token[number]}"
            )
            return "j"
        else:
            mark = self._next_letter(number, second)
        if second % BEAT == 0 and number in self.until:
            self.until[number] = second + LEASE
            return "♥" if mark == "·" else mark
        return mark

    def _pages_arrive(self, number: int) -> str:
        names = HOLDS[number]
        blocks = [self.last[name] for name in names]
        where = f"the pages of {_listed(names)} to blocks {_listed(blocks)}"
        if number in self.until:
            for name in names:
                self._put(name, self.page[name])
            self.said.append(f"Worker {number} writes {where}")
            return "w"
        if self.tokens and self.token[number] != CARRIED:
            self.outcome = REFUSED
            self.said.append(
                f"Worker {number} wakes and writes {where}. "
                f"Its number is {CARRIED}, on record is {self.token[number]}: refused"
            )
            return "x"
        owners = [name for name in self.pool.manager.seq_ids if set(blocks) & set(self.pool.table(name))]
        self.outcome = FOREIGN if owners else FREE
        for name in names:
            self._put(name, self.page[name])
        now = f"of {_listed(owners)}" if owners else "free, and nobody is hurt, by luck"
        self.said.append(f"Worker {number} wakes and writes {where}. They are {now}")
        return "!"

    def _next_letter(self, number: int, second: int) -> str:
        names, letter = self.holds[number], LETTERS.get(second)
        if not names or not letter:
            return "·"
        try:
            self.pool.append(dict.fromkeys(names, letter))
        except PoolExhausted:
            self.said.append(f"Worker {number} finds no free block and waits")
            return "?"
        for name in names:
            self.wrote[name] += letter
        self.said.append(f"Worker {number} writes {pages.shown(letter)} to {_listed(names)}")
        return "w"

    def _put(self, name: str, letters: str) -> None:
        self.pool.letters.write(slots_of([self.last[name]], range(len(letters)), len(letters)), letters)


def _listed(things) -> str:
    return " and ".join(map(str, things))


# ---- the widget --------------------------------------------------------------------------------------------


class LeaseTimeline(PredictFirst):
    """A worker sleeps past its lease with a write in its hand. What becomes of it? Then one may play.

    Args: worker, pause, tokens: the evening of the question, as in `play`; because: a sentence that says why, shown
        with the verdict.
    Raises: ValueError for an evening that cannot be played.
    """

    def __init__(self, worker: int = 1, pause: int = 7, *, tokens: bool = False, because: str = ""):
        self.asked_about = worker, pause, bool(tokens)
        self.because = because
        evening = play(*self.asked_about)
        self.ask_at = max(evening.wakes - 1, 0)
        names = _listed(HOLDS[worker])
        blocks = _listed(story.at_the_wall().table(name)[-1] for name in HOLDS[worker])
        others = _listed(HOLDS[3 - worker])
        self._answers = {
            OWN: f"they land, in blocks of {names}",
            FREE: "they land, in blocks of nobody",
            FOREIGN: f"they land, in blocks of {others}",
            REFUSED: "they are refused",
        }
        self.answer = self._answers[evening.outcome]
        question = (
            f"Worker {worker} sleeps for {pause} s with the pages of {names} in its hand, for blocks {blocks}. "
            f"The lease lasts {LEASE} s, and tokens are {'' if tokens else 'not '}compared. "
            "What becomes of the pages?"
        )
        self.worker = ipywidgets.ToggleButtons(
            options=[(f"Worker {number}", number) for number in HOLDS],
            value=worker,
            description="Who sleeps",
            disabled=True,
            style={"button_width": "auto", **_LABEL},
        )
        self.tokens = ipywidgets.ToggleButtons(
            options=[("not compared", False), ("compared", True)],
            value=bool(tokens),
            description="Tokens",
            disabled=True,
            style={"button_width": "auto", **_LABEL},
        )
        slider = {"min": 0, "disabled": True, "style": _LABEL, "layout": {"width": "300px"}}
        self.pause = ipywidgets.IntSlider(max=LONGEST, value=pause, description="Sleep (s)", **slider)
        self.second = ipywidgets.IntSlider(max=END, value=self.ask_at, description="Second", **slider)
        self.picture = ipywidgets.HTML()
        self.picture.add_class("pagedkv-picture")
        rows = [ipywidgets.HBox([self.worker, self.tokens]), ipywidgets.HBox([self.pause, self.second])]
        for row in rows:
            row.layout.flex_flow = "row wrap"
        choices = list(self._answers.values())
        super().__init__(question, choices, lambda guess: guess == self.answer, "", [*rows, self.picture])
        for control in (self.worker, self.pause, self.tokens, self.second):
            control.observe(self._draw, names="value")
        self._draw()

    def frame(self, worker: int, pause: int, tokens: bool, second: int) -> str:
        """The evening up to a second as HTML: who did what, the pool, what the sequences read."""
        timeline, moment = self._until(worker, pause, tokens, second)
        rows = [_read(name, text, name in moment.damaged) for name, text in moment.texts.items()]
        texts = _table("What the sequences read", *rows)
        return f"{timeline._repr_html_()}{moment.strip._repr_html_()}{texts}<p>{html.escape(moment.said)}</p>"

    def text_frame(self, worker: int, pause: int, tokens: bool, second: int) -> str:
        """The same as text."""
        timeline, moment = self._until(worker, pause, tokens, second)
        reads = "  ".join(
            f"{name}: {pages.shown(text)}{' (not what it wrote)' * (name in moment.damaged)}"
            for name, text in moment.texts.items()
        )
        return "\n".join(filter(None, [repr(timeline), repr(moment.strip), reads, moment.said]))

    def storyboard(self) -> Storyboard:
        """The second before the sleeper wakes, the second in which it does, and the same with or without tokens."""
        worker, pause, tokens = self.asked_about
        wakes = play(worker, pause).wakes
        places = [(tokens, self.ask_at), (tokens, wakes), (tokens, END), (not tokens, END)]
        frames = tuple(
            (self.text_frame(worker, pause, *place), self.frame(worker, pause, *place)) for place in places
        )
        return Storyboard(self.question, self.choices, frames, self._truth())

    def opened(self) -> None:
        for control in (self.worker, self.pause, self.tokens, self.second):
            control.disabled = False
        self.second.value = END
        self._draw()

    def _draw(self, _=None) -> None:
        place = self.worker.value, self.pause.value, self.tokens.value
        self.picture.value = self.frame(*place, self.second.value)
        if not self.is_open:
            self.say("What comes next is covered until you predict.")
        elif place == self.asked_about:
            self.say(self._judged(self._truth()))
        else:
            self.say(self._found(play(*place)))

    def _until(self, worker: int, pause: int, tokens: bool, second: int) -> tuple[Timeline, Moment]:
        evening = play(worker, pause, tokens)
        if whole_number("second", second) > END:
            raise ValueError(f"second must be 0 … {END}, got {second}")
        compared = "compared" if tokens else "not compared"
        caption = f"Worker {worker} sleeps {pause} s, tokens are {compared}: second {second}"
        return evening.timeline.until(second, caption), evening.moments[second]

    @staticmethod
    def _found(evening: Evening) -> str:
        """What became of the pages, in a sentence."""
        damaged = evening.moments[-1].damaged
        return {
            OWN: "The pages land where they belong: the lease held.",
            FREE: "The pages land in free blocks, and who takes these writes over them. Luck, not order.",
            FOREIGN: f"The pages land in other people's blocks: {_listed(damaged)} read what nobody wrote.",
            REFUSED: "The pages are refused: the number that they carry is old.",
        }[evening.outcome]

    def _truth(self) -> str:
        return f"{self._found(play(*self.asked_about))} {self.because}".strip()


def _read(name: str, text: str, damaged: bool) -> str:
    """A row: who reads what, and whether it is what was written."""
    letters = _cell(html.escape(pages.shown(text)), _LETTERS + (_LOST if damaged else _PLAIN))
    return _row([_head(name, "row", _coloured(name)), letters, _cell("not what it wrote" * damaged, _SMALL)])
