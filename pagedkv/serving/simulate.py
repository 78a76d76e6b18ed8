"""Serving without a model: the scheduler over a bare manager, and a clock that jumps from event to event."""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ..manager import BlockManager
from .request import Request, SequenceGroup
from .scheduler import Scheduler
from .step import Step

BINS = 2048  # of the series over time


@dataclass(frozen=True)
class StepTime:
    """How long a step takes: reading the weights, and computing its tokens.

    The default was measured by others: Llama 3.1 8B in vLLM 0.19 on an RTX 4090 (casys-kaist/LLMServingSim).

    Args: fixed: seconds of any step; prefill_token, decode_token: seconds that each token of it adds.
    """

    fixed: float = 24.5e-3
    prefill_token: float = 94e-6
    decode_token: float = 0.0

    def __call__(self, step: Step) -> float:
        return self.fixed + self.prefill_token * step.prefill_tokens + self.decode_token * step.decode_tokens


class Series:
    """Means over equal spans of time, in bounded memory: when the spans run out, two become one."""

    def __init__(self, names: tuple[str, ...], width: float = 1.0):
        self.names, self.width = names, width
        self.end = 0.0
        self._sums = np.zeros((BINS, len(names)))  # [bins, names]  values times seconds

    def add(self, seconds: float, *values: float) -> None:
        """The values held for so long, from where the series ends."""
        start, self.end = self.end, self.end + seconds
        while self.end > BINS * self.width:
            self._sums[: BINS // 2] = self._sums[::2] + self._sums[1::2]
            self._sums[BINS // 2 :] = 0
            self.width *= 2
        bins = np.arange(int(start // self.width), min(int(self.end // self.width) + 1, BINS))
        edges = np.clip([bins * self.width, (bins + 1) * self.width], start, self.end)  # [2, bins]
        self._sums[bins] += np.outer(edges[1] - edges[0], values)

    def means(self) -> dict[str, np.ndarray]:
        """For each name its mean in each span [spans], and "time", where the spans begin, in seconds."""
        spans = min(math.ceil(self.end / self.width), BINS)
        time = np.arange(spans) * self.width
        lasted = np.minimum(self.width, self.end - time)
        means = self._sums[:spans] / lasted[:, None]  # [spans, names]
        return {"time": time, **dict(zip(self.names, means.T, strict=True))}

    def mean(self) -> dict[str, float]:
        """Means over the whole time."""
        return dict(zip(self.names, (self._sums.sum(axis=0) / max(self.end, 1e-12)).tolist(), strict=True))


@dataclass(frozen=True)
class Result:
    """What a simulation found. Arrays have one number per finished request, in the order of finishing."""

    ids: list
    ttft: np.ndarray  # float64 [finished]  seconds from arrival to the first token
    latency: np.ndarray  # float64 [finished]  seconds from arrival to the last token
    tpot: np.ndarray  # float64 [finished]  seconds per token behind the first; NaN where there is none
    hits: np.ndarray  # int64 [finished]    prompt tokens found in the prefix cache
    preemptions: np.ndarray  # int64 [finished]
    series: Series  # running, waiting, blocks over time
    refused: list  # ids of requests that could not fit even alone
    seconds: float  # of simulated time
    steps: int  # decode steps that were skipped over included
    events: int  # steps that were really scheduled
    prompt_tokens: int  # of the finished requests
    prefill_tokens: int  # computed
    decode_tokens: int
    recomputed_tokens: int  # of them, because of preemptions

    def means(self) -> dict[str, float]:
        """Means of everything over requests, and over time."""
        per_request = {
            name: getattr(self, name) for name in ("ttft", "latency", "tpot", "hits", "preemptions")
        }
        means = {
            name: float(np.nanmean(values)) if len(values) else math.nan
            for name, values in per_request.items()
        }
        return means | self.series.mean()


def simulate(
    requests: Iterable[Request],
    manager: BlockManager,
    step_time: Callable[[Step], float] = StepTime(),
    **options,
) -> Result:
    """Serve requests on a clock of its own, computing nothing.

    Only what changes who runs is a step of the simulation: decode steps between two such events are taken at once.
    Requests are read one ahead of the clock, so that a trace may be longer than the memory.

    Args: requests: in order of arrival; manager: an empty BlockManager; step_time: seconds that one step takes;
        options: of the Scheduler.
    Returns: a Result.
    Raises: ValueError for requests out of order or named twice.
    """
    return Simulation(requests, manager, step_time, **options).run()


class Simulation:
    """The state of `simulate`: a scheduler, a clock and what has been found so far."""

    def __init__(self, requests: Iterable[Request], manager: BlockManager, step_time, **options):
        self.scheduler = Scheduler(manager, **options)
        self.manager, self.step_time = manager, step_time
        self.now = 0.0
        self.series = Series(("running", "waiting", "blocks"))
        self._requests = _in_order(requests)
        self._next = next(self._requests, None)
        self._first: dict = {}  # request -> when its first token came
        self._ids, self._refused = [], []
        self._columns = {name: array("d") for name in ("ttft", "latency", "tpot")}
        self._columns |= {name: array("q") for name in ("hits", "preemptions")}
        self._counts = dict.fromkeys(
            ("steps", "events", "prompt_tokens", "prefill_tokens", "decode_tokens", "recomputed_tokens"), 0
        )

    def run(self) -> Result:
        """Serve them all."""
        while True:
            self._arrive()
            if self.scheduler.unfinished:
                self._step()
            elif self._next is not None:
                self._wait(self._next.arrival - self.now, self._used)
                self.now = self._next.arrival
            else:
                return self._result()

    def _arrive(self) -> None:
        while self._next is not None and self._next.arrival <= self.now:
            try:
                self.scheduler.check_fits(self._next)
            except ValueError:
                self._refused.append(self._next.id)
            else:
                self.scheduler.add(self._next)
            self._next = next(self._requests, None)

    def _step(self) -> None:
        step = self.scheduler.schedule()
        seconds, used = self.step_time(step), self._used
        until = math.inf if self._next is None else (self._next.arrival - self.now) / seconds
        step = self.scheduler.repeat(step, max(1, math.ceil(min(until, 2**31))))
        self._wait(seconds * step.repeat, (used + self._used) / 2)
        for chunk in step.chunks:
            if chunk.samples and not chunk.decode:
                self._first.setdefault(chunk.request_id, self.now)
        for group in self.scheduler.advance(step):
            self._finished(group)
        counts = self._counts
        counts["events"] += 1
        counts["steps"] += step.repeat
        counts["prefill_tokens"] += step.prefill_tokens
        counts["decode_tokens"] += step.decode_tokens * step.repeat
        counts["recomputed_tokens"] += step.recomputed_tokens

    @property
    def _used(self) -> int:
        return self.manager.num_blocks - self.manager.num_free

    def _wait(self, seconds: float, used: float) -> None:
        self.now += seconds
        self.series.add(seconds, len(self.scheduler.running), len(self.scheduler.waiting), used)

    def _finished(self, group: SequenceGroup) -> None:
        request, first = group.request, self._first.pop(group.request.id)
        behind = request.max_new_tokens - 1
        row = {
            "ttft": first - request.arrival,
            "latency": self.now - request.arrival,
            "tpot": (self.now - first) / behind if behind else math.nan,
            "hits": group.hits,
            "preemptions": group.preemptions,
        }
        for name, value in row.items():
            self._columns[name].append(value)
        self._ids.append(request.id)
        self._counts["prompt_tokens"] += request.num_tokens

    def _result(self) -> Result:
        columns = {name: np.array(column) for name, column in self._columns.items()}
        return Result(
            self._ids, **columns, series=self.series, refused=self._refused, seconds=self.now, **self._counts
        )


def _in_order(requests: Iterable[Request]) -> Iterator[Request]:
    last = 0.0
    for request in requests:
        if request.arrival < last:
            raise ValueError(
                f"request {request.id!r} arrives at {request.arrival} s, behind one that arrives at {last} s"
            )
        last = request.arrival
        yield request
