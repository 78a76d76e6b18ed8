"""Checks of lesson 10: counters by hand, rates with resets, quantiles of buckets, causes of incidents."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedkv.metrics import Histogram
from pagedkv.teach import incidents, variants

from ._core import SETTING, Learner, Wrong, call_text, check, seeded, show


def _number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


# ---- by hand


@check("the second wall, counted", wants="value")
def second_wall(learner: Learner) -> str:
    """`answer`: appended, clones, refusals, usage when those that are left are refused for the second time."""
    case, answer = variants.counted(SETTING.variant), learner.value
    pool, _, _ = case.wall(2)
    truth = case.answer
    if not isinstance(answer, tuple | list) or len(answer) != 4 or not all(map(_number, answer)):
        raise Wrong(f"answer is {show(answer)}; it takes four numbers: appended, clones, refusals, usage.")
    strip = pool.strip("The second wall")
    questions = (
        "how many texts wrote each position, before and behind the first wall: does a refused token get a slot?",
        "who still shared a half-full block at the first wall? And does giving way copy anything?",
        "at which positions was the whole batch refused?",
        "which of the boxes has no owner?",
    )
    names = ("tokens appended", "clones", "refusals", "usage")
    for name, given, right, question in zip(names, answer, truth, questions, strict=True):
        if not math.isclose(given, right, abs_tol=1e-9):
            raise Wrong(f"You say {name}: {show(given)}. The engine counted something else.", question, strip)
    appended, clones, refusals, usage = truth
    told = f"{appended} appended, {clones} clones, {refusals} refusals, usage {usage:.2f}"
    return f"{told}: and nothing is wrong with this pool."


# ---- rate(samples)


def _rate_is(learner: Learner, samples: list, question: str) -> None:
    right = incidents.per_second(samples)
    got = learner(list(samples))
    if not _number(got) or not math.isclose(got, right, rel_tol=1e-9, abs_tol=1e-12):
        said = call_text("rate", samples) if len(samples) < 7 else f"rate of {len(samples)} samples"
        raise Wrong(f"{said} gave {show(got)}, expected {show(right)} per second.", question)


@check("rate", own=(incidents.per_second,))
def rate(learner: Learner) -> str:
    """`rate(samples)`: growth per second of a counter that may begin again at 0."""
    _rate_is(learner, [(0, 100), (5, 110)], "how much did it grow, in how many seconds?")
    _rate_is(learner, [(0, 7), (5, 7), (10, 7)], "what is the rate of a counter that stands still?")
    _rate_is(learner, [(0, 0), (5, 10), (20, 10)], "how long is it from the first sample to the last?")
    again = "the process began again between two samples: how much has it counted since then?"
    _rate_is(learner, [(0, 100), (5, 110), (10, 4)], again)
    _rate_is(learner, [(0, 100), (5, 110), (10, 4), (15, 12)], again)
    _rate_is(learner, [(0, 50), (5, 20), (10, 40), (15, 10)], again)
    _rate_is(learner, [(0, 100), (5, 0), (10, 0)], again)
    _rate_is(
        learner, [(0, 100), (5, 10), (10, 150)], "it ends above its beginning: did it never begin again?"
    )
    rng = seeded(10)
    for _ in range(100):
        n = int(rng.integers(2, 30))
        times = np.cumsum(rng.integers(1, 20, n)) + int(rng.integers(0, 1000))
        values = np.where(rng.random(n) < 0.2, 0, rng.integers(0, 50, n)).tolist()
        for i in range(1, n):
            if rng.random() < 0.8:
                values[i] += values[i - 1]
        _rate_is(learner, list(zip(times.tolist(), values, strict=True)), again)
    return "Growth over time, through every reset; 100 random counters."


# ---- quantile(buckets, q)


def quantile_of(buckets: list[tuple[float, int]], q: float) -> float:
    """As Prometheus' histogram_quantile: a straight line through the bucket that holds rank q."""
    total = buckets[-1][1]
    if total == 0:
        return math.nan
    rank, low, below = q * total, 0.0, 0
    for bound, upto in buckets:
        if upto >= rank:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / (upto - below)
        low, below = bound, upto
    raise AssertionError("the last bucket holds all")


def _quantile_is(learner: Learner, buckets: list, q: float, question: str) -> None:
    right, got = quantile_of(buckets, q), learner(list(buckets), q)
    agrees = _number(got) and (
        math.isnan(got) if math.isnan(right) else math.isclose(got, right, rel_tol=1e-9)
    )
    if not agrees:
        said = call_text("quantile", buckets, q)
        raise Wrong(f"{said} gave {show(got)}, expected {show(right)}.", question)


@check("quantile", own=(quantile_of,))
def quantile(learner: Learner) -> str:
    """`quantile(buckets, q)`: from pairs (upper bound, how many lay up to there); the last bound is infinite."""
    inf = math.inf
    ten = [(10, 2), (20, 8), (40, 10), (inf, 10)]
    _quantile_is(
        learner, ten, 0.5, "rank 5 of 10: how many lie below its bucket, and how far into it is rank 5?"
    )
    _quantile_is(learner, ten, 0.9, "rank 9 of 10: where does its bucket begin, and where does it end?")
    _quantile_is(learner, ten, 0.1, "the first bucket has an upper bound. Where does it begin?")
    _quantile_is(learner, ten, 0.8, "rank 8: do the counts say how many lie in a bucket, or up to its end?")
    _quantile_is(learner, ten, 1.0, "rank 10 of 10: which is the first bucket up to which 10 lie?")
    _quantile_is(
        learner,
        [(10, 2), (20, 8), (inf, 10)],
        0.99,
        "the last bucket has no end: what is the largest number that you can still vouch for?",
    )
    _quantile_is(
        learner, [(10, 0), (20, 0), (inf, 0)], 0.99, "nobody was measured: is there a number at all?"
    )
    rng = seeded(11)
    for _ in range(100):
        histogram = Histogram(np.cumsum(rng.integers(1, 20, int(rng.integers(1, 8)))).tolist())
        histogram.observe_many(rng.exponential(30, int(rng.integers(1, 50))))
        buckets = [(float(bound), count) for bound, count in histogram.buckets()]
        _quantile_is(
            learner, buckets, float(rng.choice([0.25, 0.5, 0.9, 0.99])), "which bucket holds that rank?"
        )
    return "Inside a bucket a straight line, beyond the last bound its bound, of nothing NaN; 100 histograms."


# ---- diagnose(before, after)


@dataclass(frozen=True)
class _Two:
    """Two minutes side by side."""

    before: dict[str, float]
    after: dict[str, float]

    def __repr__(self) -> str:
        rows = [f"{'':12}{'before':>9}{'after':>9}"]
        rows += [f"{name:12}{self.before[name]:9.2f}{self.after[name]:9.2f}" for name in self.before]
        return "\n".join(rows)


ASK = {
    "preemption storm": "how many requests a second are put off, and which of the other four could explain it?",
    "prefix cache lost": "of the prompt tokens that are looked for, which share is found, before and after?",
    "copy-on-write storm": "how many blocks are copied for each token that is appended, before and after?",
    "leak": "how much of the pool is there for each request that runs, before and after?",
    "traffic surge": "how many tokens of prompts come in a second, before and after?",
    "nothing": "did any ratio change that a user would notice?",
}


def _scaled(minute: dict[str, float], factor: float) -> dict[str, float]:
    """The same on a server so many times as large."""
    return {name: value if name == "usage" else round(value * factor, 3) for name, value in minute.items()}


SIZES = {1.0: "", 0.5: ", on a server half as large", 2.0: ", on a server twice as large"}


def cases() -> list[tuple[str, str, dict[str, float], dict[str, float]]]:
    """Incident, cause, and its first and last minute; all of them again on a server half, and twice, as large."""
    found = []
    for name, incident in incidents.INCIDENTS.items():
        readings = incidents.recorded(name)
        late = float(seeded(12).choice([-10.0, -5.0])) if SETTING.hidden else 0.0
        before, after = (incidents.summary(readings, *span) for span in ((0, 60), (120 + late, 181 + late)))
        for factor, size in SIZES.items():
            found.append((f"{name!r}{size}", incident.cause, _scaled(before, factor), _scaled(after, factor)))
    return found


@check("diagnose")
def diagnose(learner: Learner) -> str:
    """`diagnose(before, after)`: one of incidents.CAUSES for two minutes of a server."""
    for name, cause, before, after in cases():
        got = learner(dict(before), dict(after))
        if not isinstance(got, str) or got not in incidents.CAUSES:
            causes = ", ".join(map(repr, incidents.CAUSES))
            raise Wrong(f"diagnose gave {show(got)} for incident {name}; it takes one of {causes}.")
        if got != cause:
            raise Wrong(
                f"Incident {name}: you say {got!r}, the record was made with {cause!r}.",
                ASK[cause],
                _Two(before, after),
            )
    return "Twelve incidents, on servers of three sizes."


# ---- the faulty lines

FAULTY = {1, 6, 8}


@check("the faulty lines", wants="value")
def faulty_lines(learner: Learner) -> str:
    """The three lines of a dashboard whose numbers cannot be."""
    answer = learner.value
    fits = isinstance(answer, tuple | list | set) and len(answer) == 3
    if not fits or not all(type(line) is int and 1 <= line <= 8 for line in answer) or len(set(answer)) < 3:
        raise Wrong(f"answer is {show(answer)}; it takes the numbers of three lines, 1 to 8.")
    ask = {
        1: "two copies were counted: when was the first of them made?",
        6: "an empty pool is 10 % full: which block does nobody own?",
        8: "a rate of 2.5: which of the two numbers can never be the larger one?",
    }
    right = FAULTY & set(answer)
    if missing := sorted(FAULTY - right):
        raise Wrong(f"{len(right)} of your three lines are faulty.", ask[missing[0]])
    return "Counted before it was done; a block in one number and not in the other; upside down."
