"""Three recorded minutes of a pretended server, with one thing going wrong after the first: what lesson 10 looks at.

The server is the package's: its scheduler over a manager, watched by `Metrics`, which is read every five seconds.
Only its clock and its users are pretended, so that a record is the same on every computer. Requests begin with
one of a few long instructions that their users share, and continue with something of their own.

To make the records again: `python -m pagedkv.teach.incidents`.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count, pairwise
from pathlib import Path

import numpy as np

from ..allocator import PoolExhausted
from ..manager import BlockManager
from ..metrics import Metrics
from ..serving import Request, Scheduler
from ..serving.request import SequenceGroup
from ..serving.simulate import StepTime

STORED = Path(__file__).with_name("incidents.json")

CAUSES = {
    "preemption storm": "the same requests want longer answers than the pool has room for",
    "prefix cache lost": "prompts that were found in the cache are not found any more",
    "copy-on-write storm": "sequences are forked and then written, again and again",
    "leak": "blocks stay taken that nobody uses",
    "traffic surge": "more requests come",
    "nothing": "a minute like the other",
}

WARM_UP = 40.0  # seconds before the record begins
CHANGE = WARM_UP + 60.0  # when it goes wrong
EVERY = 5.0  # seconds between two readings
NUM_BLOCKS, BLOCK_SIZE, MAX_BATCH = 256, 16, 20
GROUPS, SHARED = 6, 16  # groups of users; full blocks of the instructions that each group shares
BEAMS = 4  # texts of a request that is answered with beams
STEP = StepTime(fixed=0.1)  # seconds: a large model

COLUMNS = {  # short names of what is kept of a reading; what ends in _total only ever grows
    "usage": "pagedkv_kv_cache_usage_perc",
    "running": "pagedkv_num_requests_running",
    "waiting": "pagedkv_num_requests_waiting",
    "preemptions_total": "pagedkv_num_preemptions_total",
    "queries_total": "pagedkv_prefix_cache_queries_total",
    "hits_total": "pagedkv_prefix_cache_hits_total",
    "appends_total": "pagedkv_appends_total",
    "clones_total": "pagedkv_cow_clones_total",
    "evicted_total": "pagedkv_evicted_blocks_total",
}


@dataclass(frozen=True)
class Habits:
    """What users ask for, and what the server does with it.

    `rate`: requests a second; `answer`: tokens, mean; `beams`: share of requests that are answered with beams;
    `fresh`: share of prompts that begin with something new; `forgotten`: share of answers whose
    blocks are never freed.
    """

    rate: float = 1.6
    answer: int = 64
    beams: float = 0.0
    fresh: float = 0.0
    forgotten: float = 0.0


@dataclass(frozen=True)
class Incident:
    """A cause, habits before and after the first minute, and whether the server was started anew between them."""

    cause: str
    before: Habits
    after: Habits
    anew: bool = False


USUAL = Habits()
INCIDENTS = {
    "deploy": Incident("prefix cache lost", USUAL, Habits(fresh=1.0), anew=True),
    "clients": Incident("prefix cache lost", Habits(rate=1.3), Habits(rate=1.3, fresh=0.75)),
    "essays": Incident("preemption storm", USUAL, Habits(answer=260)),
    "novels": Incident("preemption storm", Habits(rate=1.9), Habits(rate=1.9, answer=400)),
    "search": Incident("copy-on-write storm", Habits(rate=0.8), Habits(rate=0.8, beams=0.7)),
    "samples": Incident(
        "copy-on-write storm", Habits(rate=1.1, beams=0.05), Habits(rate=1.1, beams=0.5), anew=True
    ),
    "lost": Incident("leak", Habits(rate=1.4), Habits(rate=1.4, forgotten=0.05)),
    "drip": Incident("leak", Habits(rate=1.2), Habits(rate=1.2, forgotten=0.06)),
    "noon": Incident("traffic surge", USUAL, Habits(rate=5.0)),
    "launch": Incident("traffic surge", Habits(rate=0.9), Habits(rate=3.4), anew=True),
    "busy": Incident("nothing", Habits(rate=1.9, answer=90), Habits(rate=1.9, answer=92)),
    "evening": Incident("nothing", Habits(rate=1.3), Habits(rate=1.5, answer=70)),
}


class Server:
    """One process: a pool, a scheduler that serves from it, and what is counted of both."""

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self.manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE, prefix_cache=True)
        self.scheduler = Scheduler(self.manager, max_batch=MAX_BATCH)
        self.metrics = Metrics(self.manager, clock=clock)
        self.metrics.watch(self.scheduler)
        self.groups: dict[int, SequenceGroup] = {}

    def add(self, request: Request) -> None:
        self.groups[request.id] = self.scheduler.add(request)

    def again(self) -> "Server":
        """The process that takes its place: what ran and waited is asked anew, and it has counted nothing yet."""
        server = Server(self.clock)
        for group in self.groups.values():
            server.add(group.request)
        return server

    def step(self, random: np.random.Generator, forgotten: float) -> float:
        """Compute once for everybody who runs: the seconds that it takes."""
        try:
            step = self.scheduler.schedule()
        except PoolExhausted:  # nobody runs, and what is forgotten has the blocks
            return STEP.fixed
        choosing = [self.groups[chunk.request_id] for chunk in step.chunks if chunk.samples]
        for group in choosing:
            if group.written + 1 == group.request.max_new_tokens and random.random() < forgotten:
                self.manager.fork(group.seq_ids[0], [f"{group.request.id} forgotten"])
        tokens = {group.request.id: [0] * len(group.seq_ids) for group in choosing}
        beams = [group.request.id for group in choosing if len(group.seq_ids) > 1]
        parents = {name: random.integers(0, BEAMS, BEAMS).tolist() for name in beams}
        for group in self.scheduler.advance(step, tokens, parents=parents):
            del self.groups[group.request.id]
        return STEP(step)

    def read(self, now: float) -> dict[str, float]:
        """A reading, as a scrape would find it."""
        found = self.metrics.read()
        return {"time": round(now, 1)} | {name: round(found[full], 4) for name, full in COLUMNS.items()}


def users(before: Habits, after: Habits, random: np.random.Generator, end: float) -> Iterator[Request]:
    """Their requests until `end`, in order of arrival."""
    now = random.gamma(4, 0.25 / before.rate)
    for number in count():
        habits = before if now < CHANGE else after
        group, own = random.integers(0, GROUPS), int(random.integers(8, 120))
        first = number if random.random() < habits.fresh else f"group {group}"
        blocks = SHARED + own // BLOCK_SIZE
        yield Request(
            number,
            max_new_tokens=int(habits.answer * random.uniform(0.5, 1.5)),
            arrival=now,
            beam_width=BEAMS if random.random() < habits.beams else None,
            num_tokens=SHARED * BLOCK_SIZE + own,
            block_hashes=[f"{first if i < SHARED else number}, block {i}" for i in range(blocks)],
        )
        now += random.gamma(4, 0.25 / habits.rate)
        if now >= end:
            return


def record(name: str, seed: int = 0, minutes: float = 3.0) -> list[dict[str, float]]:
    """Serve for three minutes, and read the metrics every five seconds.

    Args: name: one of INCIDENTS; seed: of the users' random numbers; minutes: how long.
    Returns: the readings: short name (COLUMNS) -> number, and "time" in seconds.
    """
    incident = INCIDENTS[name]
    random, now, end = np.random.default_rng(seed), 0.0, WARM_UP + 60 * minutes
    requests = deque(users(incident.before, incident.after, random, end))
    server, readings, changed = Server(lambda: now), [], False
    while now < end:
        if not changed and now >= CHANGE:
            changed = True
            server = server.again() if incident.anew else server
        habits = incident.after if changed else incident.before
        while requests and requests[0].arrival <= now:
            server.add(requests.popleft())
        now += server.step(random, habits.forgotten)
        if now >= WARM_UP + EVERY * len(readings):
            readings.append(server.read(now - WARM_UP))
    return readings


@cache
def _stored() -> dict:
    return json.loads(STORED.read_text("utf-8"))


def recorded(name: str) -> list[dict[str, float]]:
    """The readings of one of INCIDENTS as they are stored.

    Returns: as `record`.
    Raises: KeyError for an incident that was not recorded.
    """
    if name not in INCIDENTS:
        raise KeyError(f"incident must be one of {', '.join(INCIDENTS)}, got {name!r}")
    stored = _stored()
    return [dict(zip(stored["columns"], row, strict=True)) for row in stored["readings"][name]]


def per_second(samples: Sequence[tuple[float, float]]) -> float:
    """How fast a counter grows, of pairs (seconds, value); a value below the one before began again at 0."""
    grown = sum(value if value < last else value - last for (_, last), (_, value) in pairwise(samples))
    return grown / (samples[-1][0] - samples[0][0])


def summary(readings: Sequence[dict[str, float]], start: float, end: float) -> dict[str, float]:
    """What the readings from `start` to before `end` seconds show: means of gauges, and counters per second.

    Returns: the names of COLUMNS, without _total.
    """
    window = [reading for reading in readings if start <= reading["time"] < end]
    found = {}
    for name in COLUMNS:
        if name.endswith("_total"):
            rate = per_second([(reading["time"], reading[name]) for reading in window])
            found[name.removesuffix("_total")] = round(rate, 3)
        else:
            found[name] = round(sum(reading[name] for reading in window) / len(window), 3)
    return found


def stored_text() -> str:
    """What belongs into incidents.json: a line per reading."""
    lines = []
    for name in INCIDENTS:
        rows = ",\n  ".join(json.dumps(list(reading.values())) for reading in record(name))
        lines.append(f'"{name}": [\n  {rows}]')
    columns = json.dumps(["time", *COLUMNS])
    return f'{{"columns": {columns},\n"readings": {{\n' + ",\n".join(lines) + "}}\n"


if __name__ == "__main__":
    STORED.write_text(stored_text(), "utf-8")
    print(f"{STORED.name}: {len(INCIDENTS)} incidents, {STORED.stat().st_size:,} bytes")
