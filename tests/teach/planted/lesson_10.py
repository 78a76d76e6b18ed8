"""Wrong solutions of lesson 10, as learners write them. See ../test_planted.py."""

import itertools
import math

from pagedkv.teach.incidents import CAUSES

# ---- rate(samples)


def ends_only(samples):
    (first, a), (last, b) = samples[0], samples[-1]
    return (b - a) / (last - first)


def resets_dropped(samples):
    grown = sum(max(b - a, 0) for (_, a), (_, b) in itertools.pairwise(samples))
    return grown / (samples[-1][0] - samples[0][0])


def resets_as_growth(samples):
    grown = sum(abs(b - a) for (_, a), (_, b) in itertools.pairwise(samples))
    return grown / (samples[-1][0] - samples[0][0])


def healed(samples):
    return sum(b - a if b >= a else b for (_, a), (_, b) in itertools.pairwise(samples))


def per_sample(samples):
    return healed(samples) / (len(samples) - 1)


def mean_of_rates(samples):
    pairs = list(itertools.pairwise(samples))
    return sum((b - a if b >= a else b) / (t - s) for (s, a), (t, b) in pairs) / len(pairs)


def nothing_after_a_reset(samples):
    if any(b < a for (_, a), (_, b) in itertools.pairwise(samples)):
        return 0.0
    return ends_only(samples)


def last_pair(samples):
    (s, a), (t, b) = samples[-2:]
    return (b - a if b >= a else b) / (t - s)


# ---- quantile(buckets, q)


def quantiles(*, start=0.0, line=True, last="bound", empty=math.nan, cumulative=True, at=lambda rank: rank):
    def quantile(buckets, q):
        total = buckets[-1][1] if cumulative else sum(count for _, count in buckets)
        if total == 0:
            return empty
        rank, low, below = at(q * total), start, 0
        for bound, count in buckets:
            upto = count if cumulative else below + count
            if upto >= rank:
                if math.isinf(bound):
                    return low if last == "bound" else bound
                if not line:
                    return bound
                if low is None:
                    return bound
                return low + (bound - low) * (rank - below) / ((upto - below) or 1)
            low, below = bound, upto
        return low

    return quantile


# ---- diagnose(before, after)


def diagnoses(*order, hits=0.5, clones=0.05, queries=1.5, put_off=0.05, leak=1.2):
    """The causes are asked for in this order; "nothing" if none fits."""

    def fits(cause, b, a):
        return {
            "traffic surge": a["queries"] > queries * b["queries"],
            "prefix cache lost": a["hits"] / a["queries"] < hits * b["hits"] / b["queries"],
            "copy-on-write storm": a["clones"] / a["appends"] > clones,
            "preemption storm": a["preemptions"] / a["running"] > put_off,
            "leak": a["usage"] / a["running"] > leak * b["usage"] / b["running"],
            "full pool": a["usage"] > 0.75,
            "queue": a["waiting"] > 5,
            "many queries": a["queries"] > 900,
            "more appends": a["appends"] > 1.5 * b["appends"],
        }[cause]

    named = {
        "full pool": "leak",
        "queue": "traffic surge",
        "many queries": "traffic surge",
        "more appends": "traffic surge",
    }

    def diagnose(before, after):
        found = next((cause for cause in order if fits(cause, before, after)), "nothing")
        return named.get(found, found)

    return diagnose


RIGHT = ("traffic surge", "prefix cache lost", "copy-on-write storm", "preemption storm", "leak")
assert set(CAUSES) == {*RIGHT, "nothing"}

BUGS = [
    ("second_wall", "refused tokens counted", (27, 3, 2, 1.0), "does a refused token get a slot"),
    ("second_wall", "the first wall's numbers", (8, 3, 1, 0.75), "does a refused token get a slot"),
    ("second_wall", "every sharer copies", (20, 4, 2, 1.0), "does giving way copy anything"),
    ("second_wall", "a refusal per sequence", (20, 3, 7, 1.0), "was the whole batch refused"),
    ("second_wall", "usage as at the first wall", (20, 3, 2, 0.75), "which of the boxes"),
    ("second_wall", "usage in blocks", (20, 3, 2, 8), "which of the boxes"),
    ("rate", "last minus first", ends_only, "how much has it counted since then"),
    ("rate", "negative steps dropped", resets_dropped, "how much has it counted since then"),
    ("rate", "a reset taken as growth", resets_as_growth, "how much has it counted since then"),
    ("rate", "per sample", per_sample, "in how many seconds"),
    ("rate", "mean of the pairs' rates", mean_of_rates, "from the first sample to the last"),
    ("rate", "zero after a reset", nothing_after_a_reset, "how much has it counted since then"),
    ("rate", "the last pair only", last_pair, "from the first sample to the last"),
    ("quantile", "upper bounds", quantiles(line=False), "how far into it is rank 5"),
    ("quantile", "not cumulative", quantiles(cumulative=False), "how far into it is rank 5"),
    ("quantile", "the first bucket has no beginning", quantiles(start=None), "Where does it begin"),
    ("quantile", "infinity", quantiles(last="inf"), "you can still vouch for"),
    ("quantile", "zero of nothing", quantiles(empty=0.0), "is there a number at all"),
    (
        "quantile",
        "ranks in whole numbers",
        quantiles(at=lambda rank: int(rank) + 1),
        "how far into it is rank 5",
    ),
    (
        "diagnose",
        "preemptions first",
        diagnoses("preemption storm", *RIGHT, put_off=0.001),
        "which share is found",
    ),
    ("diagnose", "a full pool is a leak", diagnoses("full pool", *RIGHT), "which share is found"),
    ("diagnose", "a queue is a surge", diagnoses("queue", *RIGHT), "which share is found"),
    ("diagnose", "appends are traffic", diagnoses("more appends", *RIGHT), "which share is found"),
    ("diagnose", "absolute numbers", diagnoses("many queries", *RIGHT[1:]), "twice as large"),
    (
        "diagnose",
        "never nothing",
        lambda b, a: diagnoses(*RIGHT)(b, a).replace("nothing", "leak"),
        "a user would notice",
    ),
    ("diagnose", "leaks overlooked", diagnoses(*RIGHT[:-1]), "for each request that runs"),
    (
        "diagnose",
        "hits upside down",
        diagnoses("prefix cache lost", *RIGHT, hits=2.0),
        "which of the other four",
    ),
    ("faulty_lines", "two and a good one", (1, 6, 7), "never be the larger one"),
    ("faulty_lines", "the refusal's own line", (3, 6, 8), "when was the first of them made"),
    ("faulty_lines", "the block that is left out", (1, 5, 8), "which block does nobody own"),
    ("faulty_lines", "two lines", (1, 8), "three lines"),
]
