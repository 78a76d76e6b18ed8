"""What a pool would do with recorded traffic: hits for many pools at once, in one pass over the trace.

A hit-rate replay knows no time: a request comes, finds what it can, is computed and leaves. It answers how much a
pool of a given size remembers. Who waits and who is preempted is for the simulation.
"""

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from ..allocator import whole_number
from ..manager import BlockManager
from .request import Request
from .simulate import StepTime, simulate
from .traces import TraceRequest

COUNTS = ("tokens", "ids")


class Curve:
    """Totals over stretches of equal length; when there are too many, two and two become one.

    So a trace of any length leaves a curve of bounded size.
    """

    def __init__(self, most: int = 128):
        self.most = most  # points; an even number
        self.stretch = self._filled = 1  # values in a point, and in the last one
        self.points: list[float] = []

    def add(self, value: float) -> None:
        if self._filled == self.stretch:
            if len(self.points) == self.most:
                self.points = [a + b for a, b in zip(self.points[::2], self.points[1::2], strict=True)]
                self.stretch *= 2
            self.points.append(0.0)
            self._filled = 0
        self.points[-1] += value
        self._filled += 1


# ---- hits -----------------------------------------------------------------------------------------------------


@dataclass
class Hits:
    """What one pool found of what was asked; `num_blocks` None is a pool without end."""

    policy: str  # "manager", "lru"
    count: str  # "tokens", "ids"
    block_size: int
    num_blocks: int | None
    requests: int = 0
    too_long: int = 0  # requests that the whole pool could not hold; they find nothing
    blocks: int = 0  # of the prompts
    hit_blocks: int = 0
    tokens: int = 0  # of the prompts
    hit_tokens: int = 0
    seconds: Curve = field(default_factory=Curve)  # spent in the pool, over the trace
    work: Curve = field(default_factory=Curve)  # blocks asked for, over the trace

    @property
    def block_rate(self) -> float:
        """Blocks found per block asked for: 0 … 1."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def token_rate(self) -> float:
        """Tokens that need no prefill, per token of the prompts: 0 … 1."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    @property
    def rate(self) -> float:
        """The one that fits the way of counting."""
        return self.token_rate if self.count == "tokens" else self.block_rate

    @property
    def microseconds_per_block(self) -> list[float]:
        """Cost of a block over the trace: flat if a request costs the same however long the trace has run."""
        pairs = zip(self.seconds.points, self.work.points, strict=True)
        return [1e6 * seconds / blocks for seconds, blocks in pairs if blocks]


class Replay:
    """One pool that is fed requests, one after the other; `hits` is the result so far."""

    def __init__(self, policy: str, count: str, block_size: int, num_blocks: int | None):
        block_size = whole_number("block_size", block_size, minimum=1)
        if num_blocks is not None:
            num_blocks = whole_number("num_blocks", num_blocks, minimum=1)
        self.hits = Hits(policy, count, block_size, num_blocks)

    def feed(self, request: TraceRequest) -> None:
        """Serve a request."""
        started = time.perf_counter()
        asked, found = self._serve(request)
        hits = self.hits
        hits.requests += 1
        hits.blocks += asked
        hits.hit_blocks += found
        hits.tokens += request.prompt
        hits.hit_tokens += min(found * hits.block_size, request.prompt)
        hits.seconds.add(time.perf_counter() - started)
        hits.work.add(asked)

    def _serve(self, request: TraceRequest) -> tuple[int, int]:
        """Blocks asked for, and those found."""
        raise NotImplementedError


class LRUReplay(Replay):
    """The textbook's cache: every block of a prompt is touched from the head on, the least recently used one goes.

    The last block counts even if it is partly filled, and a block is found wherever it stands, as in Mooncake's
    evaluation (Qin et al., FAST 2025, section 5). No engine works like this: it is a measure to compare with.
    """

    def __init__(self, block_size: int, num_blocks: int | None = None):
        super().__init__("lru", "ids", block_size, num_blocks)
        self._blocks: OrderedDict[int, None] = OrderedDict()  # key -> None, least recently used first

    def _serve(self, request: TraceRequest) -> tuple[int, int]:
        keys, found, blocks = prompt_keys(request, self.hits.block_size), 0, self._blocks
        for key in keys:
            if key in blocks:
                found += 1
                blocks.move_to_end(key)
            else:
                if len(blocks) == self.hits.num_blocks:
                    blocks.popitem(last=False)
                blocks[key] = None
        return len(keys), found


class ManagerReplay(Replay):
    """A BlockManager with its prefix cache, exactly as a server uses it.

    Args: count: "tokens" is what an engine does: only full blocks are found, a prompt's last token is always
        computed, and the answer takes blocks too. "ids" takes each id of the prompt for a full block, the last one
        too, and knows no answers: what published tables count. Its pool has one block more, for the last token.
    """

    def __init__(self, block_size: int, num_blocks: int, *, count: str = "tokens"):
        super().__init__("manager", count, block_size, num_blocks)
        if count not in COUNTS:
            raise ValueError(f"count must be one of {COUNTS}, got {count!r}")
        if (
            count == "ids"
        ):  # the length of a block plays no part then; the shortest that can be full is the quickest
            self.manager = BlockManager(num_blocks + 1, 2, prefix_cache=True)
        else:
            self.manager = BlockManager(num_blocks, block_size, prefix_cache=True)

    def _serve(self, request: TraceRequest) -> tuple[int, int]:
        size, manager = self.hits.block_size, self.manager
        if self.hits.count == "ids":
            keys = prompt_keys(request, size)
            asked, size = len(keys), manager.block_size
            held = prompt = len(keys) * size + 1
        else:
            keys, prompt = full_keys(request, size), request.prompt
            asked, held = (
                -(-prompt // size),
                prompt + request.output - 1,
            )  # the answer's last token is never run
        if -(-held // size) > manager.num_blocks:
            self.hits.too_long += 1
            return asked, 0
        full = prompt // size
        known = {"block_hashes": keys[:full], "num_tokens": prompt} if request.id_tokens else {}
        seq = manager.add(**known)
        found = int(manager.extend(seq, None if known else prompt).start[0]) // size
        manager.commit(seq)
        if held > prompt:
            manager.extend(seq, held - prompt)
        if len(keys) > full:
            manager.commit(seq, block_hashes=keys[full:])
        manager.free(seq)
        return asked, found


def prompt_keys(request: TraceRequest, block_size: int) -> list[int]:
    """Keys of the prompt's blocks; the last one may be partly filled if the trace has an id for it."""
    keys = request.blocks(block_size)
    return keys if request.covered <= request.prompt else keys[: request.prompt // block_size]


def full_keys(request: TraceRequest, block_size: int) -> list[int]:
    """Keys of the full blocks that are written, those of the answer too where the trace tells them."""
    written = min(request.covered, request.prompt + request.output - 1)
    return request.blocks(block_size)[: written // block_size]


def feed_all(trace: Iterable[TraceRequest], listeners: Sequence) -> None:
    """Read a trace once and give each request to everyone who has a method `feed`."""
    for request in trace:
        for listener in listeners:
            listener.feed(request)


class Unique:
    """Counts the different blocks of all prompts: what a pool without end would keep. Grows with the trace."""

    def __init__(self, block_size: int):
        self.block_size, self._keys = block_size, set()

    def feed(self, request: TraceRequest) -> None:
        self._keys.update(prompt_keys(request, self.block_size))

    def __len__(self) -> int:
        return len(self._keys)


class SessionRates:
    """Hits of each session alone, in memory without end, as kv-cache-tester counts them.

    A model's first request is not asked. *Cumulative*: blocks that any earlier request of the model had. *Same
    model*: the beginning that a prompt has in common with the model's previous request.
    """

    def __init__(self):
        self._session, self._models = None, {}  # model -> blocks seen, previous keys
        self.asked: dict[str, int] = {}  # session -> blocks
        self.seen: dict[str, int] = {}
        self.continued: dict[str, int] = {}

    def feed(self, request: TraceRequest) -> None:
        name, keys = request.session, prompt_keys(request, request.id_tokens)
        if name != self._session:
            self._session, self._models = name, {}
            self.asked[name] = self.seen[name] = self.continued[name] = 0
        if request.model in self._models:
            seen, before = self._models[request.model]
            self.asked[name] += len(keys)
            self.seen[name] += sum(key in seen for key in keys)
            self.continued[name] += common_prefix(keys, before)
        seen = self._models.get(request.model, (set(), ()))[0]
        seen.update(keys)
        self._models[request.model] = seen, keys

    def rates(self) -> dict[str, tuple[float, float]]:
        """For each session its cumulative and its same-model rate: 0 … 1."""
        return {
            name: (self.seen[name] / asked, self.continued[name] / asked)
            for name, asked in self.asked.items()
            if asked
        }


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many elements two sequences share from the start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# ---- lengths and waste ----------------------------------------------------------------------------------------


class Traffic:
    """What all requests look like together, and how much memory lies idle beside their tokens.

    A request that has written j of its o tokens holds p + j; each of its o steps counts once, so whoever lives longer
    counts more. That is what a server with work to do shows at a random moment, each request on its own.
    """

    def __init__(self, block_sizes: Sequence[int] = ()):
        self.requests = self.prompt = self.output = self.longest = 0  # tokens
        self.last: float | None = None  # arrival
        self.models: set[str] = set()
        self.id_tokens: set[int] = set()
        self._steps = self._held = self._final = 0  # tokens times steps
        self.block_sizes = list(block_sizes)
        self._paged = dict.fromkeys(block_sizes, 0)  # block size -> slots times steps

    def feed(self, request: TraceRequest) -> None:
        p, o = request.prompt, request.output
        self.requests += 1
        self.prompt += p
        self.output += o
        self.longest = max(self.longest, p + o)
        self.last = request.arrival
        self.models.add(request.model)
        self.id_tokens.add(request.id_tokens)
        self._steps += o
        self._held += o * p + o * (o - 1) // 2
        self._final += o * (p + o)
        for size in self._paged:
            self._paged[size] += size * (blocks_up_to(p + o - 1, size) - blocks_up_to(p - 1, size))

    def paged_waste(self, block_size: int) -> float:
        """Share of the slots in used blocks that holds no token: 0 … 1 (Kwon et al. 2023, figure 2, "vLLM")."""
        slots = self._paged[block_size]
        return 1 - self._held / slots if slots else 0.0

    def reserved(self, maximum: int, pool: int | None = None) -> dict[str, float]:
        """Where the memory goes if everyone is given `maximum` tokens in one piece (figure 2, "Orca (Max)").

        Args: maximum: tokens, at least `longest`; pool: slots of the memory, whose rest no request fits into.
        Returns: shares of "tokens", "reservation" (will be used), "internal" (never), "external" (the rest).
        """
        if maximum < self.longest:
            raise ValueError(f"a request has {self.longest} tokens, {maximum} cannot hold it")
        given = 1.0 if pool is None else pool // maximum * maximum / pool
        slots = max(self._steps * maximum, 1)
        shares = {
            "tokens": self._held,
            "reservation": self._final - self._held,
            "internal": self._steps * maximum - self._final,
        }
        return {name: given * share / slots for name, share in shares.items()} | {"external": 1 - given}


def blocks_up_to(n: int, block_size: int) -> int:
    """Blocks of a request with 1, 2, … n tokens, all added up."""
    full, rest = divmod(n, block_size)
    return block_size * full * (full + 1) // 2 + rest * (full + 1)


# ---- time -----------------------------------------------------------------------------------------------------


def as_requests(
    trace: Iterable[TraceRequest], block_size: int, rate: float | None = None
) -> Iterator[Request]:
    """A trace's requests for the scheduler.

    Args: block_size: of the pool; rate: requests per second, at random times (the same ones every time) in place of
        the trace's own.
    Raises: ValueError for a trace without times if there is no rate.
    """
    random, now = np.random.default_rng(0), 0.0
    for number, request in enumerate(trace):
        if rate is not None:
            now += random.exponential(1 / rate)
        elif request.arrival is None:
            raise ValueError("the trace does not tell when requests arrive: give a rate")
        else:
            now = request.arrival
        keys = full_keys(request, block_size) if request.id_tokens else None
        if (
            keys is not None
        ):  # blocks that the trace tells nothing of are the request's own, if it comes back to them
            full = (request.prompt + request.output - 1) // block_size
            keys += [-(number << 32) - 1 - place for place in range(len(keys), full)]
        yield Request(
            number, num_tokens=request.prompt, max_new_tokens=request.output, arrival=now, block_hashes=keys
        )


@dataclass(frozen=True)
class Served:
    """How a trace fared in one pool."""

    block_size: int
    num_blocks: int
    finished: int
    too_long: int  # requests that the whole pool could not hold
    ttft: tuple[float, float, float]  # seconds to the first token: mean, median, 95 of 100
    latency: float  # seconds to the last one, mean
    running: float  # requests, mean over time
    waiting: float
    blocks_used: float  # mean over time
    most_used: float  # the highest point of `curve`
    preempted: int  # requests that had to give way at least once
    preemptions: int
    prefill_tokens: int
    recomputed_tokens: int  # of them, because of preemptions
    hit_tokens: int
    seconds: float  # simulated
    curve: dict[str, list[float]]  # time, running, waiting, blocks: means over equal spans


def serve(
    trace: Iterable[TraceRequest],
    block_size: int,
    num_blocks: int,
    *,
    rate: float | None = None,
    swap: bool = False,
    step_time: StepTime = StepTime(),  # noqa: B008  it is frozen
    **options,
) -> Served:
    """Serve a trace from one pool, on a clock of its own.

    Args: rate: as in `as_requests`; swap: preempt to a host pool of the same size in place of recomputing;
        step_time: seconds that a step takes; options: of the Scheduler.
    """
    manager = BlockManager(num_blocks, block_size, prefix_cache=True)
    if swap:
        options |= {"preemption": "swap", "host": BlockManager(num_blocks, block_size)}
    result = simulate(as_requests(trace, block_size, rate), manager, step_time, **options)
    means, curve = result.series.mean(), result.series.means()
    ttft = (0.0, 0.0, 0.0)
    if result.ids:
        ttft = (float(result.ttft.mean()), *np.percentile(result.ttft, (50, 95)).tolist())
    return Served(
        block_size,
        num_blocks,
        len(result.ids),
        len(result.refused),
        ttft,
        float(result.latency.mean()) if result.ids else 0.0,
        means["running"],
        means["waiting"],
        means["blocks"],
        float(curve["blocks"].max(initial=0.0)),
        int((result.preemptions > 0).sum()),
        int(result.preemptions.sum()),
        result.prefill_tokens,
        result.recomputed_tokens,
        int(result.hits.sum()),
        result.seconds,
        {name: values.tolist() for name, values in curve.items()},
    )


# ---- the answer -----------------------------------------------------------------------------------------------

NEAR = 0.95  # of the best hit rate counts as enough
SLOWER = 1.10  # times the shortest wait counts as enough
WASTE = 0.04  # the paper's "under 4 %"
WORSE = 0.01  # of hit rate that a larger block may cost


def enough_for_hits(hits: Sequence[Hits]) -> Hits:
    """The smallest pool that finds nearly as much as the best."""
    best = max(result.rate for result in hits)
    return min((r for r in hits if r.rate >= NEAR * best), key=capacity)


def enough_for_serving(served: Sequence[Served]) -> Served:
    """The smallest pool in which the first token comes nearly as soon as in the best, and no request is too long."""
    fewest = min(result.too_long for result in served)
    able = [result for result in served if result.too_long == fewest]
    best = min(result.ttft[0] for result in able)
    return min((r for r in able if r.ttft[0] <= SLOWER * best), key=capacity)


def capacity(result: Hits | Served) -> float:
    """Tokens that the pool holds."""
    return inf if result.num_blocks is None else result.num_blocks * result.block_size


def best_block_size(traffic: Traffic, hits: Sequence[Hits]) -> int:
    """The largest block size tried that wastes little and finds nearly as much as the best; else the thriftiest."""
    sizes = sorted(traffic.block_sizes)
    rates = {size: max((r.rate for r in hits if r.block_size == size), default=0.0) for size in sizes}
    good = [
        size
        for size in sizes
        if traffic.paged_waste(size) <= WASTE and rates[size] >= max(rates.values()) - WORSE
    ]
    return max(good) if good else min(sizes, key=traffic.paged_waste)


def ladder(longest: int, total: int, block_size: int, steps: int = 8) -> list[int]:
    """Pool sizes to try: doublings from what holds the longest request, up to what holds the whole trace.

    Args: longest, total: tokens; steps: at most so many.
    Returns: numbers of blocks.
    """
    first = 2 ** max(longest - 1, 0).bit_length()  # tokens; alike for every block size
    sizes = [first * 2**i for i in range(steps) if i == 0 or first * 2 ** (i - 1) < total]
    return [-(-tokens // block_size) for tokens in sizes]
