"""A small server to watch: who runs, who waits and who gives way, step by step, over a pool that is too small.

`Timeline` draws any such record, a reader's own too: one lane per request, one mark per step. `serve` makes one with
the package's scheduler, and the widget lets one move through it and change the watermark.
"""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import ipywidgets

from ..allocator import whole_number
from ..manager import BlockManager
from ..serving import Request, Scheduler, Step
from .widgets import _CAPTION, _LABEL, PredictFirst, Storyboard

MARKS = {
    "P": ("runs its prompt", "background-color:#56B4E9;color:#000;"),
    "d": ("writes one token", "background-color:#009E73;color:#000;"),
    "x": ("gives way", "background-color:#D55E00;color:#000;"),
    "R": ("is computed again", "background-color:#E69F00;color:#000;"),
    "·": ("waits", "background:none;color:inherit;"),
    "–": ("is done, its seat is idle", "background:none;color:inherit;"),
    " ": ("is not there", ""),
}
STEP_MS, TOKEN_MS = 10, 2  # a step of the small server, and each prompt token in it
MOST_STEPS = 200
ASKS = ("victim", "watermark")
_BOX = (
    "padding:0px 2px;border:1px solid #888;text-align:center;font-family:monospace;font-size:12px;"
    "line-height:17px;min-width:13px;"
)
_HEAD = _BOX.replace("border:1px solid #888;", "border:none;") + "font-weight:normal;background:none;"


# ---- drawing -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timeline:
    """Lanes of marks, one per step, and under them the free blocks, if they are known.

    Args: marks: what each mark means, and its colours as CSS; unit: what a column is.
    """

    lanes: Mapping[str, str]
    free: tuple[int, ...] = ()
    caption: str = ""
    marks: Mapping[str, tuple[str, str]] = field(default_factory=lambda: MARKS)
    unit: str = "step"

    def __post_init__(self):
        if bad := sorted(set("".join(self.lanes.values())) - set(self.marks)):
            raise ValueError(f"a mark is one of {''.join(self.marks)!r}, got {bad[0]!r}")

    @property
    def steps(self) -> int:
        return max([*map(len, self.lanes.values()), len(self.free), 0])

    def until(self, step: int, caption: str = "") -> "Timeline":
        """The same with nothing behind a step: lanes of one length, so that a picture keeps its width."""
        lanes = {name: marks[: step + 1].ljust(self.steps) for name, marks in self.lanes.items()}
        return replace(self, lanes=lanes, free=self.free[: step + 1], caption=caption or self.caption)

    @property
    def legend(self) -> str:
        """The marks that occur and what they mean."""
        used = [mark for mark in self.marks if any(mark in marks for marks in self.lanes.values())]
        return ", ".join(f"{mark} {self.marks[mark][0]}" for mark in used if mark != " ")

    def __repr__(self) -> str:
        width = max([len("free"), *(len(name) for name in self.lanes)])
        ruler = "".join(f"{step:<5}" for step in range(0, self.steps, 5))
        lines = [self.caption] * bool(self.caption) + [f"{'':{width}}  {ruler}".rstrip()]
        lines += [f"{name:{width}}  {marks}".rstrip() for name, marks in self.lanes.items()]
        if self.free:
            digits = "".join(str(n) if n < 10 else "+" for n in self.free)
            lines.append(f"{'free':{width}}  {digits}")
        return "\n".join([*lines, self.legend])

    def _repr_html_(self) -> str:
        numbers = "".join(f'<td style="{_HEAD}font-size:9px;">{step}</td>' for step in range(self.steps))
        rows = [_row(self.unit, numbers)]
        for name, marks in self.lanes.items():
            cells = (_cell(mark, *self.marks.get(mark, ("", ""))) for mark in marks.ljust(self.steps))
            rows.append(_row(name, "".join(cells)))
        if self.free:
            rows.append(_row("free", "".join(f'<td style="{_HEAD}">{n}</td>' for n in self.free)))
        caption = f'<caption style="{_CAPTION}">{html.escape(self.caption)}</caption>' * bool(self.caption)
        style = "border-collapse:collapse;border:none;margin:4px 0px;width:auto;"
        return (
            f'<div style="overflow-x:auto;"><table style="{style}">{caption}{"".join(rows)}</table></div>'
            f'<p style="font-size:12px;margin:0px 0px 6px 0px;">{html.escape(self.legend)}</p>'
        )


def _row(name: str, cells: str) -> str:
    head = f'<th scope="row" style="{_HEAD}text-align:right;">{html.escape(str(name))}</th>'
    return f'<tr style="background:none;">{head}{cells}</tr>'


def _cell(mark: str, meaning: str, colour: str) -> str:
    if mark == " ":
        return f'<td style="{_HEAD}"></td>'
    return f'<td style="{_BOX}{colour}" title="{meaning}">{mark}</td>'


# ---- a small server ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """How requests fared: their lanes, and when each was done."""

    timeline: Timeline
    done: dict[str, int]  # ms
    preemptions: tuple[tuple[int, str, int], ...]  # step, who, blocks that became free
    recomputed: int  # tokens

    @property
    def mean(self) -> float:
        """Mean of the times at which they were done, in ms."""
        return sum(self.done.values()) / len(self.done)


def serve(
    requests: Iterable[tuple[str, int, int, int]], num_blocks: int, block_size: int, watermark: int = 0
) -> Served:
    """Serve requests with the package's scheduler; nothing is computed.

    Args: requests: (name, prompt tokens, tokens to write, step at which it arrives), in order of arrival;
        watermark: blocks that an admission leaves free while others run.
    Raises: ValueError for requests that do not fit the pool, are out of order or are too many.
    """
    ahead, events = list(requests), []
    if [r[3] for r in ahead] != sorted(r[3] for r in ahead) or not ahead:
        raise ValueError("requests must be one or more, in the order of their arrival")
    if whole_number("watermark", watermark) >= whole_number("num_blocks", num_blocks, minimum=1):
        raise ValueError(f"watermark must be below the {num_blocks} blocks of the pool, got {watermark}")
    manager = BlockManager(num_blocks, block_size)
    share = (watermark + 0.5) / num_blocks  # the scheduler rounds it down to blocks
    scheduler = Scheduler(manager, watermark=share, observers=[events.append])
    lanes, free, done, now = {request[0]: "" for request in ahead}, [], {}, 0
    while ahead or scheduler.unfinished:
        while ahead and ahead[0][3] <= len(free):
            name, prompt, new, _ = ahead.pop(0)
            scheduler.add(Request(name, num_tokens=prompt, max_new_tokens=new))
        step = scheduler.schedule()
        free.append(manager.num_free)
        now += STEP_MS + TOKEN_MS * step.prefill_tokens
        waiting = {group.request.id for group in scheduler.waiting}
        for name in lanes:
            lanes[name] += _mark(name, step, waiting)
        done |= {group.request.id: now for group in scheduler.advance(step)}
        if len(free) > MOST_STEPS:
            raise ValueError(f"these requests take more than {MOST_STEPS} steps")
    gave_way = [(event.seq_ids[0], event.counts["freed"]) for event in events if event.kind == "preempt"]
    steps = [i for i in range(len(free)) for marks in lanes.values() if marks[i] == "x"]
    preemptions = tuple((i, *who) for i, who in zip(steps, gave_way, strict=True))
    recomputed = sum(event.counts["recomputed"] for event in events if event.kind == "schedule")
    return Served(Timeline(lanes, tuple(free)), done, preemptions, recomputed)


def _mark(name: str, step: Step, waiting: set) -> str:
    if name in step.preempted:
        return "x"
    for chunk in step.chunks:
        if chunk.request_id == name:
            return "d" if chunk.decode else "R" if chunk.recomputed else "P"
    return "·" if name in waiting else " "


# ---- the widget --------------------------------------------------------------------------------------------


class SchedulerTimeline(PredictFirst):
    """A small server, step by step and for every watermark.

    It asks one of two questions: "victim", who has to give way, with the record up to the step before; or
    "watermark", whether the requests are done sooner on average if an admission leaves some blocks free.

    Args: requests, num_blocks, block_size: as in `serve`; ask: the question; preemption: which one the first
        question asks for, from 0; watermark: the one that the second asks for; most: the largest that the
        reader may choose.
    Raises: ValueError for requests that cannot be served, and for a preemption that does not happen.
    """

    def __init__(
        self,
        requests: Sequence[tuple[str, int, int, int]],
        num_blocks: int = 8,
        block_size: int = 4,
        *,
        ask: str = "victim",
        preemption: int = 0,
        watermark: int = 2,
        most: int = 4,
    ):
        if ask not in ASKS:
            raise ValueError(f"ask must be one of {ASKS}, got {ask!r}")
        if not 0 < whole_number("watermark", watermark) <= whole_number("most", most):
            raise ValueError(f"watermark must be 1 … {most}, got {watermark}")
        self.served = [serve(requests, num_blocks, block_size, w) for w in range(most + 1)]
        happened = self.served[0].preemptions
        if whole_number("preemption", preemption) >= len(happened):
            raise ValueError(
                f"there is no preemption {preemption}: {len(happened)} requests have to give way"
            )
        self.ask, self.asked = ask, watermark
        self.num_blocks, self.block_size = num_blocks, block_size
        when, self.victim, self.freed = happened[preemption]
        self.ask_at = max(when - 1, 0) if ask == "victim" else self._last(0)
        self.reveal_at = when if ask == "victim" else self._last(watermark)
        self.watermark = ipywidgets.IntSlider(
            min=0, max=most, value=0, description="Watermark (blocks)", disabled=True, style=_LABEL
        )
        self.step = ipywidgets.IntSlider(
            min=0, max=self._last(0), value=self.ask_at, description="Step", disabled=True, style=_LABEL
        )
        self.watermark.layout.width, self.step.layout.width = "300px", "300px"
        self.picture = ipywidgets.HTML(self.frame(0, self.ask_at))
        self.picture.add_class("pagedkv-picture")
        controls = ipywidgets.HBox([self.watermark, self.step])
        controls.layout.flex_flow = "row wrap"
        names = [request[0] for request in requests]
        question, choices = {
            "victim": (f"In step {when} the pool has too few blocks. Who gives way?", names),
            "watermark": (
                f"A watermark of {watermark}: an admission leaves {watermark} blocks free. "
                "When are the requests done, on average?",
                ["sooner", "later", "no change"],
            ),
        }[ask]
        super().__init__(question, choices, lambda guess: guess == self.answer, "", [controls, self.picture])
        self.watermark.observe(self._other_watermark, names="value")
        self.step.observe(self._draw, names="value")

    @property
    def answer(self) -> str:
        if self.ask == "victim":
            return self.victim
        before, after = round(self.served[0].mean), round(self.served[self.asked].mean)
        return "sooner" if after < before else "later" if after > before else "no change"

    def frame(self, watermark: int, step: int) -> str:
        """The record up to a step as HTML, and what happened in that step."""
        return (
            self._timeline(watermark, step)._repr_html_()
            + f"<p>{html.escape(self._said(watermark, step))}</p>"
        )

    def text(self, watermark: int, step: int) -> str:
        """The same as text."""
        return f"{self._timeline(watermark, step)!r}\n{self._said(watermark, step)}"

    def storyboard(self) -> Storyboard:
        """The question's situation, the answer, and how it ends."""
        if self.ask == "victim":
            places = [(0, self.ask_at), (0, self.reveal_at), (0, self._last(0))]
        else:
            most = len(self.served) - 1
            places = [(w, self._last(w)) for w in dict.fromkeys((0, self.asked, most))]
        frames = tuple((self.text(*place), self.frame(*place)) for place in places)
        return Storyboard(self.question, self.choices, frames, self._truth())

    def opened(self) -> None:
        self.watermark.disabled = self.step.disabled = False
        if self.ask == "watermark":
            self.watermark.value = self.asked
        self.step.value = self.reveal_at
        self.say(self._judged(self._truth()))
        self._draw()

    def _other_watermark(self, _) -> None:
        last, at_end = self._last(self.watermark.value), self.step.value == self.step.max
        self.step.max = last
        if at_end:
            self.step.value = last  # who looks at the end wants to compare ends
        self._draw()

    def _draw(self, _=None) -> None:
        if self.is_open:
            self.picture.value = self.frame(self.watermark.value, self.step.value)

    def _last(self, watermark: int) -> int:
        return self.served[watermark].timeline.steps - 1

    def _timeline(self, watermark: int, step: int) -> Timeline:
        if whole_number("watermark", watermark) >= len(self.served):
            raise ValueError(f"watermark must be 0 … {len(self.served) - 1}, got {watermark}")
        if whole_number("step", step) > self._last(watermark):
            raise ValueError(f"step must be 0 … {self._last(watermark)}, got {step}")
        caption = f"Watermark {watermark}, step {step} of {self._last(watermark)}"
        return self.served[watermark].timeline.until(step, caption)

    def _said(self, watermark: int, step: int) -> str:
        served = self.served[watermark]
        if step == self._last(watermark):
            times = ", ".join(f"{name} {ms}" for name, ms in served.done.items())
            return (
                f"Done at {times} ms: {served.mean:.0f} ms on average. "
                f"{len(served.preemptions)} preemptions, {served.recomputed} tokens computed again."
            )
        gone = [f"{name} gives way, {_come_free(n)}" for i, name, n in served.preemptions if i == step]
        return "; ".join([*gone, f"{_blocks(served.timeline.free[step])} free when the step runs"]) + "."

    def _truth(self) -> str:
        if self.ask == "victim":
            return (
                f"It is {self.victim}, of those that run the last that arrived: {_come_free(self.freed)}. "
                "It waits at the head of the queue."
            )
        zero, asked, most = (self.served[w] for w in (0, self.asked, len(self.served) - 1))
        return (
            f"It is {self.answer}: {asked.mean:.0f} ms instead of {zero.mean:.0f}, with {len(asked.preemptions)} "
            f"preemptions instead of {len(zero.preemptions)}. A watermark of {len(self.served) - 1} makes it "
            f"{most.mean:.0f} ms: room that nobody uses helps nobody."
        )


def _blocks(n: int) -> str:
    return "1 block" if n == 1 else f"{n} blocks"


def _come_free(n: int) -> str:
    return f"{_blocks(n)} come{'s' * (n == 1)} free"
