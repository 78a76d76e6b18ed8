"""How it is measured: warm, in interleaved rounds, against the right answer, beside the memory's speed.

What goes wrong otherwise: one kernel after the other measures the neighbours' work too, so kernels take turns in a
new order every round, and two are compared round by round. The first call pays for page faults and for a
processor that slept, so every visit begins with calls that do not count. Threads of BLAS and OpenMP spin for a
while after a call, so whoever comes next waits until they sleep.
"""

import functools
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

SETTLE = 0.02  # seconds of calls that do not count, at every visit
STEADY = 0.1  # the same for several threads: after an idle gap they run at one of two speeds
SPIN = 0.03  # seconds until threads that have no work go to sleep
TOLERANCE = 2e-6  # of the largest |V|: what float32 sums may be off
TIMED = 2e-3  # seconds that a visit should at least measure
RUNS = 12  # of an action, at every visit


@dataclass(frozen=True)
class Variant:
    """Something to measure: a call that takes a layer, and the threads that it may use."""

    name: str
    call: Callable[[int], object]
    threads: int = 1


def interleave(
    variants: Sequence[Variant],
    num_layers: int = 1,
    *,
    seconds: float = 2.0,
    min_rounds: int = 5,
    after_round: Callable[[float], object] = lambda share: None,
) -> dict[str, np.ndarray]:
    """Measure variants in turns for some seconds.

    Slow variants, more than four times the fastest, are visited every third round only.

    Args: num_layers: calls walk through layers 0 … num_layers − 1; after_round: told the share of the time that
        passed.
    Returns: seconds per call, by name: float64 [rounds], NaN where a variant was not visited.
    """
    random, samples = np.random.default_rng(0), {v.name: [] for v in variants}
    typical = {v.name: _visit(v, num_layers, settle=0) for v in variants}
    slow = {name for name, took in typical.items() if took > 4 * min(typical.values())}
    started = time.perf_counter()
    rounds = 0
    while rounds < min_rounds or time.perf_counter() - started < seconds:
        for i in random.permutation(len(variants)):
            variant = variants[i]
            name = variant.name
            visited = name not in slow or rounds % 3 == 0
            repeats = int(np.clip(TIMED / typical[name], 1, 100))
            samples[name].append(_visit(variant, num_layers, repeats, rounds) if visited else np.nan)
        rounds += 1
        after_round(min(1.0, (time.perf_counter() - started) / max(seconds, 1e-9)))
    return {name: np.array(taken) for name, taken in samples.items()}


def _visit(variant: Variant, num_layers: int, repeats=1, first=0, settle: float | None = None) -> float:
    """Seconds per call of one variant, after calls that do not count."""
    if settle is None:
        settle = SETTLE if variant.threads == 1 else STEADY
    with limited_threads(variant.threads):
        ready = time.perf_counter() + settle
        while True:
            variant.call(first % num_layers)
            if time.perf_counter() >= ready:
                break
        own_clock = getattr(variant.call, "timed", None)  # a peer in another process looks at its own watch
        if own_clock:
            taken = own_clock([(first + i) % num_layers for i in range(repeats)])
        else:
            started = time.perf_counter()
            for i in range(repeats):
                variant.call((first + i) % num_layers)
            taken = time.perf_counter() - started
    if variant.threads > 1:
        time.sleep(SPIN)
    return taken / repeats


def alternate(actions: dict[str, tuple[Callable, Callable]], rounds: int = 10) -> dict[str, np.ndarray]:
    """Measure actions that change something, in turns: each visit runs one a few times, and undoes it between.

    Args: actions: name -> (run, undo); undo is given what run returned, while the clock stands still.
    Returns: seconds per run, by name: the median of every visit, float64 [rounds].
    """
    samples = {name: [] for name in actions}
    for _ in range(rounds):
        for name, (run, undo) in actions.items():
            visit = []
            for _ in range(RUNS):
                started = time.perf_counter()
                result = run()
                visit.append(time.perf_counter() - started)
                undo(result)
            samples[name].append(np.median(visit[2:]))  # the first two warm up
    return {name: np.array(taken) for name, taken in samples.items()}


def error(call: Callable[[int], np.ndarray], expected: np.ndarray, largest: float) -> float:
    """How far a call is off at worst, over all layers, as a part of the largest |V|; NaN for a NaN or a wrong shape.

    Args: expected: float64 [layers, batch, num_q_heads, head_dim]; largest: of |V|.
    """
    worst = 0.0
    for layer, right in enumerate(expected):
        out = np.asarray(call(layer))
        if out.shape != right.shape:
            return np.nan
        worst = np.maximum(worst, np.abs(out - right).max(initial=0))  # keeps a NaN
    return float(worst / max(largest, 1e-30))


def ratio(slower: np.ndarray, faster: np.ndarray) -> float:
    """How many times longer the first took: the median over the rounds that both were in."""
    both = np.isfinite(slower) & np.isfinite(faster)
    return float(np.median(slower[both] / faster[both])) if both.any() else np.nan


def read_bandwidth(num_bytes: int = 256 << 20, rounds: int = 9) -> float:
    """Bytes per second that one core reads from memory: the dot product of two arrays too large for any cache."""
    a, b = np.ones((2, num_bytes // 16))  # written once: the pages exist
    with limited_threads(1):
        taken = interleave([Variant("read", lambda layer: a @ b)], seconds=0, min_rounds=rounds)["read"]
    return num_bytes / float(np.median(taken))


def limited_threads(threads: int):
    """A context in which BLAS and torch use at most so many threads."""
    if "torch" in sys.modules:  # a peer brought it; its own setting is the only one that it obeys everywhere
        sys.modules["torch"].set_num_threads(threads)
    return _controller("torch" in sys.modules).limit(limits=threads, user_api="blas")


@functools.cache
def _controller(with_torch: bool):
    """The libraries that have threads; looked for again (in 10 ms) when torch brought its own."""
    from threadpoolctl import ThreadpoolController  # extras `bench` and `course`

    return ThreadpoolController()


def machine() -> dict[str, object]:
    """What the figures depend on: processor, cores, versions and the BLAS kernel that NumPy runs."""
    blas = [lib for lib in _controller("torch" in sys.modules).info() if lib["user_api"] == "blas"]
    numpys = [lib for lib in blas if "numpy" in lib["filepath"]] or blas
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,  # others' work spoils figures
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": numpys[0]["internal_api"] if numpys else "unknown",
        "blas_kernel": numpys[0].get("architecture", "unknown") if numpys else "unknown",
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
