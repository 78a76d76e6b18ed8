"""Kernels side by side on one workload: checked, measured in turns, one row each."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from .measure import TOLERANCE, Variant, error, interleave, limited_threads
from .peers import PEERS, Call
from .shapes import Workload


@dataclass
class Row:
    """What one kernel did on one shape. Times are seconds of one call, that is of one step of one layer."""

    shape: str
    peer: str
    dtype: str
    threads: int
    round_of: int  # threads of the rounds that it was measured in: only such rows can be compared
    block_size: int
    batch: int
    num_tokens: int  # keys in the caches of the batch
    num_bytes: float  # of keys and values that have to be read
    error: float  # at worst, as a part of the largest |V|
    bandwidth: float | None = None  # bytes per second that one core can read
    samples: list[float | None] = field(
        default_factory=list
    )  # seconds, round by round; None where it did not run

    @property
    def correct(self) -> bool:
        """Whether it gave the right answer; a NaN is none."""
        return self.error <= TOLERANCE

    @property
    def times(self) -> np.ndarray:
        return np.array(self.samples, np.float64)  # None becomes NaN

    def percentile(self, p: float) -> float:
        times = self.times[np.isfinite(self.times)]
        return float(np.percentile(times, p)) if times.size else np.nan

    @property
    def seconds(self) -> float:
        """The median."""
        return self.percentile(50)

    @property
    def tokens_per_second(self) -> float:
        """New tokens, if the model were this one layer's attention."""
        return self.batch / self.seconds

    @property
    def ns_per_token(self) -> float:
        """Nanoseconds per cached token and layer."""
        return self.seconds / self.num_tokens * 1e9

    @property
    def bytes_per_second(self) -> float:
        return self.num_bytes / self.seconds

    @property
    def bandwidth_share(self) -> float | None:
        """Of what one core reads from memory; above 1 if the data stays in the processor's cache."""
        return self.bytes_per_second / self.bandwidth if self.bandwidth else None

    def as_dict(self) -> dict:
        """What goes into results.json."""
        derived = {
            "correct": self.correct,
            "seconds": self.seconds,
            "p20": self.percentile(20),
            "p80": self.percentile(80),
            "tokens_per_second": self.tokens_per_second,
            "ns_per_token": self.ns_per_token,
            "bytes_per_second": self.bytes_per_second,
            "bandwidth_share": self.bandwidth_share,
        }
        return {k: None if v != v else v for k, v in (asdict(self) | derived).items()}  # JSON knows no NaN


def compare(
    workload: Workload,
    peers: Sequence[str] = ("paged", "numpy-padded"),
    *,
    threads: int = 1,
    dtypes: Sequence[str] = ("float32",),
    seconds: float = 2.0,
    min_rounds: int = 5,
    bandwidth: float | None = None,
    after_round: Callable[[float], object] = lambda share: None,
) -> list[Row]:
    """Measure peers on one workload, each checked against the float64 answer first.

    Args: peers: names in PEERS; threads: that each may use; with more than one, ours is also measured with one;
        dtypes: storage types of the paged cache, the peers have float32; seconds: to measure for; bandwidth: bytes
        per second that one core can read, for the share.
    Returns: a Row per variant, wrong ones included: those were not measured.
    Raises: KeyError for an unknown peer.
    """
    rows, variants = {}, []
    for name, call, row in _variants(workload, peers, threads, dtypes):
        with limited_threads(row.threads):
            row.error = error(call, *workload.expected(row.dtype))
        row.bandwidth, rows[name] = bandwidth, row
        if row.correct:
            variants.append(Variant(name, call, row.threads))
    how = {"seconds": seconds, "min_rounds": min_rounds, "after_round": after_round}
    taken = interleave(variants, workload.shape.num_layers, **how) if variants else {}
    for name, samples in taken.items():
        rows[name].samples = [None if np.isnan(s) else float(s) for s in samples]
    return list(rows.values())


def _variants(workload: Workload, peers, threads, dtypes):
    """Yield (name, call, row without times) of everything to measure."""
    shape = workload.shape

    def row(peer: str, dtype: str, n: int, num_bytes: float) -> Row:
        facts = (shape.block_size, shape.batch, shape.num_tokens, num_bytes)
        return Row(shape.name, peer, dtype, n, threads, *facts, error=np.nan)

    for peer in peers:
        ours = peer == "paged"
        for dtype in dtypes if ours else ("float32",):
            for n in sorted({1, threads}) if ours else (threads,):
                call: Call = PEERS[peer].build(workload, n, **({"dtype": dtype} if ours else {}))
                size = shape.num_bytes(bytes_per_vector_pair(workload, dtype))
                yield f"{peer} {dtype} {n}", call, row(peer, dtype, n, size)


def bytes_per_vector_pair(workload: Workload, dtype: str) -> float:
    """Bytes that one token's key and value of one head take in the pool, scales included."""
    storage = workload.cache(dtype).storage
    slots = storage.num_layers * storage.num_blocks * storage.block_size
    return storage.nbytes / (slots * storage.num_kv_heads)
