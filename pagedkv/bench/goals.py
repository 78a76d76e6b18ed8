"""What the kernel is to reach, and whether it did.

Times are compared within one run, in rounds that the kernels shared, so most goals say how many times longer a
peer takes. Two kinds of OpenBLAS kernels matter: with AVX-512 (`SkylakeX` and its like) and with AVX2 (`Haswell`,
`Zen`). The goals were set on a machine with AVX-512 that reads 40 GB/s with one core.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .compare import Row
from .measure import ratio

SLACK = 0.15  # of noise
AVX512 = {"SkylakeX", "Cooperlake", "SapphireRapids"}


@dataclass(frozen=True)
class Goal:
    """A figure to reach: `value` finds it in the results, None where it was not measured."""

    name: str
    value: Callable[[dict], float | None]
    avx512: float | None
    avx2: float | None
    unit: str = "x"
    at_most: bool = False

    @property
    def shape(self) -> str | None:
        return self.name.split(":")[0] if ":" in self.name else None


@dataclass(frozen=True)
class Verdict:
    goal: Goal
    measured: float | None
    wanted: float | None  # None: no goal for this BLAS kernel

    @property
    def ok(self) -> bool | None:
        """None where there is nothing to judge."""
        if self.measured is None or self.wanted is None:
            return None
        if self.goal.at_most:
            return self.measured <= self.wanted * (1 + SLACK)
        return self.measured >= self.wanted * (1 - SLACK)


def judge(results: dict, goals: "list[Goal] | None" = None) -> list[Verdict]:
    """Compare results with the goals for their BLAS kernel.

    Args: results: {machine: {blas_kernel, …}, rows: [Row, …], bookkeeping: [{name, seconds, over}, …]}.
    """
    column = "avx512" if results["machine"]["blas_kernel"] in AVX512 else "avx2"
    return [
        Verdict(goal, goal.value(results), getattr(goal, column))
        for goal in (GOALS if goals is None else goals)
    ]


# --- where the figures stand


def find(results: dict, shape: str, peer: str, dtype="float32", threads=1, round_of=None) -> Row | None:
    for row in results["rows"]:
        facts = (row.shape, row.peer, row.dtype, row.threads, row.round_of)
        if facts == (shape, peer, dtype, threads, round_of or threads) and row.samples:
            return row
    return None


def times(shape: str, slower: dict, faster: dict) -> Callable[[dict], float | None]:
    """How many times longer `slower` takes; both as arguments of `find`."""

    def value(results: dict) -> float | None:
        a, b = find(results, shape, **slower), find(results, shape, **faster)
        return ratio(a.times, b.times) if a and b else None

    return value


def against(shape: str, peer: str, threads: int = 1) -> Callable[[dict], float | None]:
    return times(shape, {"peer": peer, "threads": threads}, {"peer": "paged", "threads": threads})


def two_threads(shape: str) -> Callable[[dict], float | None]:
    return times(shape, {"peer": "paged", "round_of": 2}, {"peer": "paged", "threads": 2})


def share_of_bandwidth(shape: str) -> Callable[[dict], float | None]:
    def value(results: dict) -> float | None:
        row = find(results, shape, "paged")
        return row.bandwidth_share if row else None

    return value


def narrow(shape: str, dtype: str) -> Callable[[dict], float | None]:
    return times(shape, {"peer": "paged"}, {"peer": "paged", "dtype": dtype})


def bytes_of(shape: str, dtype: str) -> Callable[[dict], float | None]:
    def value(results: dict) -> float | None:
        wide, row = find(results, shape, "paged"), find(results, shape, "paged", dtype)
        return row.num_bytes / wide.num_bytes if wide and row else None

    return value


def microseconds(name: str) -> Callable[[dict], float | None]:
    return lambda results: next(
        (row["seconds"] * 1e6 for row in results["bookkeeping"] if row["name"] == name), None
    )


def over_loop(results: dict) -> float | None:
    return next((row["over"] for row in results["bookkeeping"] if "over" in row), None)


GOALS = [
    Goal("b8: padded contiguous NumPy", against("b8", "numpy-padded"), 2.0, 1.0),
    Goal("b8: torch enable_gqa", against("b8", "torch-gqa"), 3.0, 2.0),
    Goal("b8: torch, queries as rows", against("b8", "torch-rows"), 1.8, 1.15),
    Goal("b8: torch, sequence by sequence", against("b8", "torch-sequences"), 1.3, 0.9),
    Goal("b8: torch gather + attention", against("b8", "torch-gather"), 3.0, 2.2),
    Goal("b8: the first draft's loop", against("b8", "seed"), 9.0, 6.0),
    Goal("b8: vLLM's CPU kernel, 1 thread", against("b8", "vllm"), 1.05, 0.68),
    Goal("b8: vLLM's CPU kernel, 2 threads", against("b8", "vllm", 2), 0.9, 0.63),
    Goal("b8: share of a core's read bandwidth", share_of_bandwidth("b8"), 0.50, 0.28, ""),
    Goal("b32: share of a core's read bandwidth", share_of_bandwidth("b32"), 0.50, 0.28, ""),
    Goal("b8: two threads over one", two_threads("b8"), 1.6, 1.6),
    Goal("b32: two threads over one", two_threads("b32"), 1.6, 1.6),
    Goal("b8: bfloat16, speed of float32", narrow("b8", "bfloat16"), 0.9, 0.9),
    Goal("b8: bfloat16, memory of float32", bytes_of("b8", "bfloat16"), 0.5, 0.5, "", at_most=True),
    Goal("b8: int8, speed of float32", narrow("b8", "int8"), 0.9, 0.9),
    Goal("b8: int8, memory of float32", bytes_of("b8", "int8"), 0.26, 0.26, "", at_most=True),
    Goal("c: padded contiguous NumPy", against("c", "numpy-padded"), 2.0, 1.4),
    Goal("c: torch, queries as rows", against("c", "torch-rows"), 1.8, 1.2),
    Goal("c: torch gather + attention", against("c", "torch-gather"), 2.8, 1.9),
    Goal("a: padded contiguous NumPy", against("a", "numpy-padded"), 0.6, 0.6),
    Goal("a: torch gather + attention", against("a", "torch-gather"), 1.6, 1.6),
    Goal("d16: not grouped", against("d16", "paged-ungrouped"), 2.0, 2.3),
    Goal("d16: torch, queries as rows", against("d16", "torch-rows"), 3.0, 2.4),
    Goal("d64: not grouped", against("d64", "paged-ungrouped"), 2.7, None),
    Goal("d64: torch, queries as rows", against("d64", "torch-rows"), 4.0, None),
    Goal("d64: torch enable_gqa", against("d64", "torch-gqa"), 7.0, None),
    Goal("append, all layers, over a Python loop", over_loop, 5.0, 5.0),
    Goal("step metadata, batch 256", microseconds("step metadata, batch 256"), 50, 50, "µs", True),
    Goal("fork 4096 tokens into 8", microseconds("fork 4096 tokens into 8"), 10, 10, "µs", True),
    Goal(
        "allocate and release 256 blocks", microseconds("allocate and release 256 blocks"), 15, 15, "µs", True
    ),
]
