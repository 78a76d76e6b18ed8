"""What an engine did, as numbers for Prometheus: an observer that counts, and is read when somebody asks.

    from prometheus_client import REGISTRY, start_http_server
    REGISTRY.register(Metrics(cache)), start_http_server(9400)     # then scrape http://…:9400/metrics

Everything is a counter, so that rates, ratios and quantiles are left to the query; only what is true at a moment (how
full, how many wait) is a gauge. Beside this file lie a Grafana dashboard and alerts: `DASHBOARD`, `RULES`.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from .allocator import Event, Observed
from .cache import PagedKVCache
from .manager import BlockManager

DASHBOARD = Path(__file__).with_name("dashboards") / "grafana.json"
RULES = Path(__file__).with_name("dashboards") / "rules.yml"  # recording and alert rules

LATENCY_BOUNDS = [10e-6 * 2**i for i in range(16)]  # seconds: 10 µs … 0.33 s
LIFETIME_BOUNDS = [0.001 * 4**i for i in range(13)]  # seconds: 1 ms … 4.7 h
DURATION_BOUNDS = [0.01 * 2**i for i in range(14)]  # seconds: 10 ms … 82 s


class Histogram:
    """How many observations lay at or below each bound, and their sum."""

    def __init__(self, bounds: list[float]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # per interval; the last has no upper end
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_many(self, values: np.ndarray) -> None:
        for place, n in Counter(np.searchsorted(self.bounds, values).tolist()).items():
            self.counts[place] += n
        self.sum += float(values.sum())

    def buckets(self) -> list[tuple[str, int]]:
        """Pairs of upper bound and how many lay up to there, as Prometheus writes them."""
        names = [repr(bound) for bound in self.bounds] + ["+Inf"]
        return list(zip(names, np.cumsum(self.counts).tolist(), strict=True))


@dataclass
class Family:
    """One metric: its numbers per value of its label, or under () if it has none."""

    kind: str  # "counter", "gauge" or "histogram"
    name: str
    help: str
    labels: tuple[str, ...] = ()
    values: dict[tuple[str, ...], float | Histogram] = field(default_factory=dict)


class Metrics:
    """Counts what a pool, its snapshots and its scheduler tell; a collector for prometheus_client (extra metrics).

    Args: pool: a BlockManager or PagedKVCache, which is observed from now on; namespace: what names begin with:
        "pagedkv", or "vllm" for vLLM's own names, where it has them, so that its dashboards work; labels: for
        every number, such as {"model_name": …}; clock: seconds that never go back.
    Source of the names: vLLM 0.11 and later, v1/metrics/loggers.py; ours where it has none.
    """

    def __init__(
        self,
        pool: BlockManager | PagedKVCache,
        *,
        namespace: str = "pagedkv",
        labels: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if namespace not in ("pagedkv", "vllm"):
            raise ValueError(f'namespace must be "pagedkv" or "vllm", got {namespace!r}')
        self.namespace = namespace
        defaults = {"model_name": "pagedkv", "engine": "0"} if namespace == "vllm" else {}
        self.labels = defaults | {str(k): str(v) for k, v in (labels or {}).items()}
        self._pool, self._clock = pool, clock
        self._manager = pool.manager if isinstance(pool, PagedKVCache) else pool
        self._born = np.full(pool.num_blocks, np.nan)  # [num_blocks]  when a block was taken; NaN: it is not
        self._watched: list[Observed] = []
        self.appended = self.cloned = self.first_touched = self.fetched = 0
        self.refused = self.evicted = self.preempted = self.running = self.waiting = 0
        self.conflicts = self.fenced = self.reclaimed = 0
        self.corrupt = Counter(disk=0, redis=0)
        self.latency = Histogram(LATENCY_BOUNDS)
        self.lifetime = Histogram(LIFETIME_BOUNDS)
        self.durations = {name: Histogram(DURATION_BOUNDS) for name in ("save", "load")}
        self.snapshots = Counter({(name, how): 0 for name in ("save", "load") for how in ("ok", "failed")})
        self.moved = Counter(save=0, load=0)  # bytes
        self.watch(self._manager)

    def watch(self, observed: Observed) -> None:
        """Count for something else too: the scheduler over this pool, or a store."""
        observed.observers.append(self)
        self._watched.append(observed)

    def close(self) -> None:
        """Observe no more; the numbers stay."""
        for observed in self._watched:
            observed.observers.remove(self)
        self._watched.clear()

    # Counting

    def __call__(self, event: Event) -> None:
        count = self._COUNT.get(event.kind)
        if count is not None:
            count(self, event)

    def _extend(self, event: Event) -> None:
        blocks = event.blocks
        new, copies = blocks["new"], blocks["copies"]
        self.appended += event.counts["tokens"]
        self.cloned += len(copies)
        self.first_touched += len(new)
        self.latency.observe(event.seconds)
        if len(new) or len(copies) or len(blocks.get("hits", ())):
            now = self._clock()
            self._evict(blocks, now)
            self._born[new] = self._born[copies[:, 1]] = now
            hits = blocks.get("hits", new)
            self._born[hits] = np.where(np.isnan(self._born[hits]), now, self._born[hits])

    def _restore(self, event: Event) -> None:
        now = self._clock()
        self._evict(event.blocks, now)
        self._born[event.blocks["new"]] = now

    def _evict(self, blocks: Mapping[str, np.ndarray], now: float) -> None:
        evicted = blocks.get("evicted", ())
        if len(evicted):
            self.evicted += len(evicted)
            self._end(evicted, now)

    def _freed(self, event: Event) -> None:
        """A block that stays findable lives on, until it is evicted."""
        freed = event.blocks["freed"]
        if len(freed):
            index = getattr(self._manager, "prefix_index", None)
            self._end(freed if index is None else freed[~index.sealed(freed)], self._clock())

    def _reset(self, event: Event) -> None:
        self._end(np.flatnonzero(self._manager.allocator.ref_counts == 0), self._clock())

    def _end(self, blocks: np.ndarray, now: float) -> None:
        ages = now - self._born[blocks]
        self._born[blocks] = np.nan
        self.lifetime.observe_many(ages[~np.isnan(ages)])

    def _refuse(self, event: Event) -> None:
        self.refused += 1

    def _snapshot(self, event: Event) -> None:
        name, counts = event.kind, event.counts
        if counts.get("failed"):
            self.snapshots[name, "failed"] += 1
            return
        self.snapshots[name, "ok"] += 1
        self.moved[name] += counts["bytes"]
        self.durations[name].observe(event.seconds)
        if name == "load":
            self.fetched += counts["pages"]
            self.corrupt["disk"] += counts["damaged"]

    def _fetch(self, event: Event) -> None:
        self.fetched += event.counts.get("pages", 0)
        self.corrupt["redis"] += event.counts.get("damaged", 0)

    def _schedule(self, event: Event) -> None:
        self.running, self.waiting = event.counts["running"], event.counts["waiting"]

    def _preempt(self, event: Event) -> None:
        self.preempted += 1

    def _conflict(self, event: Event) -> None:
        self.conflicts += 1

    def _fence(self, event: Event) -> None:
        self.fenced += 1

    def _reclaim(self, event: Event) -> None:
        self.reclaimed += len(event.blocks["freed"])

    _COUNT: ClassVar = {  # kind of event -> what it means; the last four are a coordinator's
        "extend": _extend,
        "restore": _restore,
        "free": _freed,
        "truncate": _freed,
        "reorder": _freed,
        "release_before": _freed,
        "reset_prefix_cache": _reset,
        "refuse": _refuse,
        "save": _snapshot,
        "load": _snapshot,
        "schedule": _schedule,
        "preempt": _preempt,
        "fetch": _fetch,
        "conflict": _conflict,
        "fence": _fence,
        "reclaim": _reclaim,
    }

    # Reading

    def families(self) -> Iterator[Family]:
        """Every metric as it is now, in plain Python."""
        manager = self._manager
        stats = getattr(manager, "prefix_stats", None)
        vllm = "vllm:" if self.namespace == "vllm" else "pagedkv_"

        def one(kind: str, name: str, help: str, value) -> Family:
            return Family(kind, name, help, (), {(): value})

        def several(kind: str, name: str, help: str, labels: str, values: Mapping) -> Family:
            keyed = {key if isinstance(key, tuple) else (key,): value for key, value in values.items()}
            return Family(kind, name, help, tuple(labels.split()), keyed)

        usage = 1 - manager.num_free / manager.num_blocks
        yield one("gauge", f"{vllm}kv_cache_usage_perc", "Share of blocks in use, 0 to 1.", usage)
        yield self._config(vllm)
        yield one("gauge", f"{vllm}num_requests_running", "Requests in the batch.", self.running)
        yield one("gauge", f"{vllm}num_requests_waiting", "Requests that wait or were put off.", self.waiting)
        yield one("counter", f"{vllm}num_preemptions", "Requests put off for lack of blocks.", self.preempted)
        if stats is not None:
            queries, hits = stats.total_queries, stats.total_hits
            yield one("counter", f"{vllm}prefix_cache_queries", "Prompt tokens looked for.", queries)
            yield one("counter", f"{vllm}prefix_cache_hits", "Prompt tokens found in the cache.", hits)
        lifetime = "Seconds from taking a block to giving it up or evicting it."
        yield one("histogram", f"{vllm}kv_block_lifetime_seconds", lifetime, self.lifetime)

        latency = "Seconds that a call took that reserves slots."
        yield one("histogram", "pagedkv_allocation_latency_seconds", latency, self.latency)
        yield one("counter", "pagedkv_appends", "Tokens that got a slot.", self.appended)
        yield one("counter", "pagedkv_cow_clones", "Blocks copied before a write.", self.cloned)
        faults = {"minor": self.first_touched, "major": self.fetched}
        what = "Pages touched first (minor), or fetched from disk or Redis (major)."
        yield several("counter", "pagedkv_page_faults", what, "kind", faults)
        failures = {"pool_exhausted": self.refused}
        yield several("counter", "pagedkv_allocation_failures", "Refused calls.", "reason", failures)
        yield one("counter", "pagedkv_evicted_blocks", "Cached blocks taken for others.", self.evicted)
        corrupt = "Pages that were not what had been stored."
        yield several("counter", "pagedkv_corrupt_pages", corrupt, "tier", self.corrupt)
        done = "Snapshots saved and loaded."
        yield several("counter", "pagedkv_snapshots", done, "operation outcome", self.snapshots)
        moved = "Bytes of pages saved and loaded."
        yield several("counter", "pagedkv_snapshot_bytes", moved, "operation", self.moved)
        took = "Seconds that a snapshot took."
        yield several("histogram", "pagedkv_snapshot_duration_seconds", took, "operation", self.durations)
        conflicts = "Changes of the shared pool that had to be tried again."
        yield one("counter", "pagedkv_coordinator_conflicts", conflicts, self.conflicts)
        fenced = "Changes refused to a worker whose lease was over."
        yield one("counter", "pagedkv_coordinator_fenced_writes", fenced, self.fenced)
        reclaimed = "Blocks taken back from dead workers."
        yield one("counter", "pagedkv_coordinator_reclaimed_blocks", reclaimed, self.reclaimed)

    def _config(self, prefix: str) -> Family:
        storage = getattr(self._pool, "storage", None)
        facts = {
            "block_size": self._manager.block_size,
            "num_gpu_blocks" if self.namespace == "vllm" else "num_blocks": self._manager.num_blocks,
            "cache_dtype": "none" if storage is None else storage.dtype,
            "enable_prefix_caching": getattr(self._manager, "prefix_cache", False),
        }
        values = {tuple(map(str, facts.values())): 1}
        return Family(
            "gauge", f"{prefix}cache_config_info", "How the pool was made; always 1.", tuple(facts), values
        )

    def read(self) -> dict[str, float]:
        """All numbers by name, for those without prometheus_client: histograms as `…_count` and `…_sum`."""
        found = {}
        for family in self.families():
            for values, number in family.values.items():
                labels = ",".join(f'{k}="{v}"' for k, v in sorted(zip(family.labels, values, strict=True)))
                labels = labels and f"{{{labels}}}"
                if isinstance(number, Histogram):
                    found[f"{family.name}_count{labels}"] = number.count
                    found[f"{family.name}_sum{labels}"] = number.sum
                else:
                    found[f"{family.name}{'_total' if family.kind == 'counter' else ''}{labels}"] = number
        return found

    def describe(self) -> list:
        """Nothing: a registry need not collect to learn the names."""
        return []

    def collect(self) -> Iterator:
        """The same for prometheus_client, which calls this when it is scraped."""
        try:
            from prometheus_client import core
        except ImportError:
            raise ImportError('metrics need prometheus_client: pip install "pagedkv[metrics]"') from None
        kinds = {
            "counter": core.CounterMetricFamily,
            "gauge": core.GaugeMetricFamily,
            "histogram": core.HistogramMetricFamily,
        }
        names, constants = tuple(self.labels), tuple(self.labels.values())
        for family in self.families():
            made = kinds[family.kind](family.name, family.help, labels=(*names, *family.labels))
            for values, number in family.values.items():
                labels = (*constants, *values)
                if isinstance(number, Histogram):
                    made.add_metric(labels, buckets=number.buckets(), sum_value=number.sum)
                else:
                    made.add_metric(labels, number)
            yield made
