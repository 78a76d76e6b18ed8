"""Lesson 12: measure, then speed up. Benchmarks are checked on a pretended machine, where the truth is known."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..machine import Machine, neighbour_from, quiet, spells
from ._core import Learner, Wrong, _Raised, check, expect_refusal, same, seeded, show

WARM = "a call that follows another kernel's is slow: what should happen before the clock is read?"

# ---- interleaved(variants, rounds, clock)


@check("interleaved")
def interleaved(learner: Learner) -> str:
    """`interleaved(variants, rounds, clock)`: the times of each variant, round by round."""
    _interleaves(learner, {"pages": 10, "padded": 12}, 3, Machine())
    _interleaves(learner, {"pages": 10, "padded": 12}, 3, Machine(cold=30))
    _interleaves(learner, {"only": 7}, 1, Machine(cold=5))
    four = {"a": 10, "b": 12, "c": 5, "d": 40}
    order = _interleaves(learner, four, 60, Machine(cold=20))
    for place, what in ((0, "first"), (-1, "last")):
        always = {turn[place] for turn in order}
        if always != set(four):
            rest = sorted(set(four) - always)
            raise Wrong(
                f"In 60 rounds of a, b, c, d the variants {', '.join(rest)} never came {what}.",
                "what if a round begins after a pause, or one variant leaves a bad mess for the next?",
            )
    _interleaves(learner, {"pages": 10, "padded": 12}, 40, Machine(cold=30, load=neighbour_from(900)))
    loads = spells(0.3, seed=int(seeded(12).integers(1000)))
    _interleaves(learner, {"pages": 10, "padded": 12}, 40, Machine(cold=30, load=loads))
    return "Each variant warm, each once a round, in changing order; also while a neighbour comes and goes."


def _interleaves(
    learner: Learner, ms: dict[str, int], rounds: int, machine: Machine
) -> list[tuple[str, ...]]:
    """Run it on a machine and compare with what happened there; the order of each round."""
    got = learner({name: machine.kernel(name, t) for name, t in ms.items()}, rounds, machine.clock)
    said = f"interleaved({list(ms)}, {rounds}, clock)"
    if not isinstance(got, dict) or set(got) != set(ms):
        raise Wrong(f"{said} gave {show(got)}, expected a dict with the keys {list(ms)}.")
    timed = _timed(machine)
    if len(timed) != rounds * len(ms):
        raise Wrong(
            f"{said} measured {len(timed)} times, expected {rounds} rounds × {len(ms)} variants.",
            "one look at the clock before a call and one after it, how many pairs should there be?",
        )
    for calls in timed:
        if len(calls) != 1:
            raise Wrong(
                f"{said}: between two looks at the clock stood {len(calls)} calls, expected one.",
                "is the call that warms up meant to count?",
            )
    names = [calls[0][0] for calls in timed]
    order = [tuple(names[i : i + len(ms)]) for i in range(0, len(names), len(ms))]
    for number, turn in enumerate(order, start=1):
        if sorted(turn) != sorted(ms):
            raise Wrong(
                f"{said}: round {number} measured {', '.join(turn)}.",
                "a neighbour who comes at half time should slow down everybody: who is measured when?",
            )
    for name in ms:
        expected = [took for calls in timed for who, took in calls if who == name]
        if not same(list(got[name]) if _is_sequence(got[name]) else got[name], expected):
            raise Wrong(
                f"{said} gave {show(got[name])} for {name}, the machine took {show(expected)}.",
                "is each time the second look minus the first, in the order of the rounds?",
            )
        if machine.cold and machine.load is quiet and expected != [ms[name]] * rounds:
            slow = next(took for took in expected if took != ms[name])
            raise Wrong(
                f"{said} found {slow} ms for {name}, which takes {ms[name]} ms when it is warm.", WARM
            )
    return order


def _timed(machine: Machine) -> list[list[tuple[str, int]]]:
    """The calls between the first and second look at the clock, the third and fourth, …"""
    parts: list[list[tuple[str, int]]] = [[]]
    for name, took in machine.log:
        if name == "clock":
            parts.append([])
        else:
            parts[-1].append((name, took))
    return parts[1::2]


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray)


# ---- the flawed lines

FLAWS = {"A": 6, "B": 2}
INNOCENT = {
    "A": {
        3: ("Line 3 draws the rounds; 20 are enough here.", "which line treats the two kernels differently?"),
        4: (
            "Line 4 lets the two take turns in being first.",
            "which line treats the two kernels differently?",
        ),
        5: ("Line 5 goes through both.", "what does each of them write to?"),
        7: ("Line 7 warms up what is about to be measured.", "what does it write to, and who did so before?"),
        8: ("Line 8 looks at the clock right before the call.", "what does the call itself write to?"),
        9: ("Line 9 is what should be measured.", "with which argument, in the second round?"),
        10: (
            "Line 10 keeps the difference of two looks.",
            "the clock is right: what did the time go into?",
        ),
        11: (
            "Line 11 takes medians, which stand a few bad rounds.",
            "what if every round is bad for one of the two?",
        ),
    },
    "B": {
        3: ("Line 3 makes room for the times.", "the times are right: what is made of them?"),
        4: ("Line 4 draws the rounds.", "the times are right: what is made of them?"),
        5: ("Line 5 lets the two take turns in being first.", "the times are right: what is made of them?"),
        6: ("Line 6 warms up.", "the times are right: what is made of them?"),
        7: ("Line 7 looks at the clock right before the call.", "the times are right: what is made of them?"),
        8: ("Line 8 is what should be measured.", "the times are right: what is made of them?"),
        9: (
            "Line 9 keeps the difference of two looks.",
            "the times are right: what is made of them?",
        ),
        10: (
            "Line 10 divides tokens by time, as a speed should be.",
            "which of these tokens did a user ask for?",
        ),
        11: ("Line 11 divides two speeds.", "in which unit is each, and who counted?"),
    },
}


@check("flaws", wants="value")
def flaws(learner: Learner) -> str:
    """The number of the line that makes each of two benchmarks unfair: {"A": line, "B": line}."""
    answer = learner.value
    if not isinstance(answer, dict) or set(answer) != {"A", "B"}:
        raise Wrong(f'answer is {show(answer)}; it takes two lines: {{"A": …, "B": …}}.')
    for name, right in FLAWS.items():
        line = answer[name]
        if line is ...:
            raise Wrong(f"{name} still has its dots.", "which line treats the two kernels differently?")
        if type(line) is not int or not 1 <= line <= 11:
            raise Wrong(f"{name} is {show(line)}; it takes the number of one line, 1 to 11.")
        if line != right:
            told, question = INNOCENT[name].get(
                line, (f"Line {line} of {name} only names things.", "where are the two treated differently?")
            )
            raise Wrong(f"{name}: {told}", question)
    return "A gives fresh memory to one side only; B counts padding as tokens."


# ---- fair(ours, theirs, right, rounds, clock)

RIGHT = np.linspace(-1, 1, 64)  # what both kernels should write


@check("fair")
def fair(learner: Learner) -> str:
    """`fair(ours, theirs, right, rounds, clock)`: how many times longer theirs takes, or ValueError."""
    for machine, question in [
        (Machine(), "how many times longer takes *theirs*: what is divided by what?"),
        (Machine(cold=30), WARM),
        (
            Machine(fault=40),
            "memory that nobody wrote to costs extra when it is first used: when was yours made?",
        ),
        (
            Machine(load=spells(0.15, 20, 7)),
            "some calls take 20 times as long: which number hardly notices a few of them?",
        ),
        (
            Machine(load=neighbour_from(450)),
            "a neighbour came at half time: was each of the two measured before and after?",
        ),
        (Machine(cold=30, fault=40, load=spells(0.15, seed=int(seeded(13).integers(1000)))), WARM),
    ]:
        got = _fairly(learner, machine)
        if not _is_number(got) or abs(got - 1.2) > 1e-9:
            told = f"On a machine {_told(machine)} fair(…, 21, clock) gave {show(got)}, the truth is 12 / 10 = 1.2."
            raise Wrong(told, question)
    almost = RIGHT.astype(np.float32) * np.float32(1 + 3e-7)
    got = _fairly(learner, Machine(), ours=almost)
    if not _is_number(got) or abs(got - 1.2) > 1e-9:
        raise Wrong(f"Results that are off by 3e-7 gave {show(got)}: float32 is not more exact than that.")
    wrong = RIGHT.astype(np.float32)
    wrong[7] += 1e-4
    for what, bad in (
        ("is off by 1e-4", wrong),
        ("holds a NaN", np.where(np.arange(64) == 7, np.nan, RIGHT)),
    ):
        for whose in ("ours", "theirs"):
            _refuses(learner, f"{whose} {what}", **{whose: bad})
    return "The truth on six machines, and no figure for a wrong result."


def _fairly(learner: Learner, machine: Machine, **results: np.ndarray) -> Any:
    kernels = (
        machine.kernel(name, ms, results.get(name, RIGHT)) for name, ms in (("ours", 10), ("theirs", 12))
    )
    return learner(*kernels, RIGHT.copy(), 21, machine.clock)


def _refuses(learner: Learner, what: str, **results: np.ndarray) -> None:
    try:
        got = _fairly(learner, Machine(), **results)
    except _Raised as raised:
        if isinstance(raised.error, ValueError):
            return
        raise
    raise Wrong(
        f"fair(…) gave {show(got)} where one number of {what}, expected ValueError.",
        "a fast kernel that is wrong is no kernel; and is NaN > 2e-6?",
    )


def _told(machine: Machine) -> str:
    parts = [f"where a cold call takes {machine.cold} ms more"] if machine.cold else []
    parts += [f"where fresh memory takes {machine.fault} ms more"] if machine.fault else []
    parts += ["that is not alone"] if machine.load is not quiet else []
    return " and ".join(parts) or "where nothing goes wrong"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


# ---- chunks(length, chunk, tile)


@check("chunks")
def chunks(learner: Learner) -> str:
    """`chunks(length, chunk, tile)`: (start, tiles, size) of products that cover each position once."""
    cases = [(10, 8, 4), (8, 8, 4), (11, 8, 4), (3, 8, 4), (0, 8, 4), (300, 128, 128)]
    cases += [(1, 1, 1), (7, 3, 5), (20, 10, 4), (513, 512, 128), (512, 512, 128), (511, 512, 128)]
    rng = seeded(14)
    for _ in range(60):
        cases.append(tuple(int(rng.integers(low, high)) for low, high in ((0, 600), (1, 200), (1, 70))))
    for length, chunk, tile in cases:
        got, expected = learner(length, chunk, tile), _chunks(length, chunk, tile)
        if not same(got, expected):
            told = f"chunks({length}, {chunk}, {tile}) gave {show(got)}, expected {show(expected)}."
            raise Wrong(told, _cover_question(got, length, chunk, tile))
    return f"{len(cases)} cases: each position once, whole tiles first, tails exact."


def _chunks(length: int, chunk: int, tile: int) -> list[tuple[int, int, int]]:
    found = []
    for start in range(0, length, chunk):
        tiles, rest = divmod(min(chunk, length - start), tile)
        found += [(start, tiles, tile)] if tiles else []
        found += [(start + tiles * tile, 1, rest)] if rest else []
    return found


def _cover_question(got: Any, length: int, chunk: int, tile: int) -> str:
    try:
        covered = [p for start, tiles, size in got for p in range(start, start + tiles * size)]
        crossing = [
            start for start, tiles, size in got if start // chunk != (start + tiles * size - 1) // chunk
        ]
    except (TypeError, ValueError):
        return "is each part a tuple (start, tiles, size)?"
    if any(tiles * size == 0 for _, tiles, size in got):
        return "is a product of no rows a product?"
    if any(p >= length for p in covered):
        return "whose rows stand behind the end?"
    if sorted(set(covered)) != list(range(length)):
        return "which positions does nobody cover?"
    if len(covered) != length:
        return "which positions are covered twice?"
    if crossing:
        return "a chunk is what was gathered together: can a tile reach into the next one?"
    return "do the whole tiles of a chunk stand in one part, and its tail in another?"


# ---- choose(lengths, points, most_waste)


@check("choose")
def choose(learner: Learner) -> str:
    """`choose(lengths, points, most_waste)`: a block size and its waste, from lengths and measured times."""
    story = [_point(1, 30, 31, 33), _point(4, 19, 20, 21), _point(8, 17, 19, 20), _point(16, 10, 11, 12)]
    _chooses(learner, [10, 8, 11], story, 0.25)
    _chooses(learner, [10, 8, 11], story, 0.1)
    _chooses(learner, [10, 8, 11], story, 1.0)
    near = [_point(8, 17, 18, 19), _point(16, 12, 12.5, 13.5), _point(32, 11.5, 13, 14)]
    _chooses(learner, [64, 128, 32], near, 0.0)
    plain = [_point(4, 18, 20, 21), _point(8, 15, 16, 17), _point(16, 12, 13, 13.5), _point(32, 11, 12, 13)]
    _chooses(learner, [64, 128, 32], plain, 0.0)
    _chooses(learner, [64, 128, 32], plain[::-1], 0.0)
    refused = "no size keeps the limit: which answer would be honest?"
    expect_refusal(learner, [1, 1, 1], story[1:], 0.5, question=refused)
    rng = seeded(15)
    for _ in range(40):
        lengths = rng.integers(1, int(rng.integers(20, 600)), 12).tolist()
        times = np.sort(rng.integers(20, 60, (6, 3)), axis=1).tolist()
        points = [_point(1 << i, *t) for i, t in enumerate(times)]
        _chooses(
            learner, lengths, [points[i] for i in rng.permutation(6)], float(rng.choice([0.02, 0.1, 0.3]))
        )
    return "46 tables: waste counted per sequence, and no difference believed that lies within the spread."


def _point(size: int, p20: float, seconds: float, p80: float) -> dict[str, float]:
    return {"block_size": size, "p20": p20, "seconds": seconds, "p80": p80}


def _waste(lengths: Sequence[int], size: int) -> float:
    held = sum(-(-n // size) for n in lengths) * size
    return 1 - sum(lengths) / held


def _chooses(learner: Learner, lengths: list[int], points: list[dict[str, float]], most_waste: float) -> None:
    fits = [p for p in points if _waste(lengths, p["block_size"]) <= most_waste]
    if not fits:
        return
    best = min(fits, key=lambda p: p["seconds"])
    equal = [p["block_size"] for p in fits if p["seconds"] <= best["p80"]]
    size, waste = min(equal), _waste(lengths, min(equal))
    got = learner(lengths, points, most_waste)
    table = "\n".join(
        f"{p['block_size']:4}: {p['p20']}, {p['seconds']}, {p['p80']}, waste {_waste(lengths, p['block_size']):.3f}"
        for p in sorted(points, key=lambda p: p["block_size"])
    )
    said = f"choose({lengths}, points, {most_waste:g})"
    if not _is_sequence(got) or len(got) != 2 or not all(map(_is_number, got)):
        raise Wrong(f"{said} gave {show(got)}, expected a pair: block size and waste.")
    seen = f"{said} gave {show(list(got))}, expected [{size}, {waste:.6g}].\n size: p20, seconds, p80, waste\n{table}"
    if got[0] == size:
        if abs(got[1] - waste) > 1e-9:
            raise Wrong(seen, _waste_question(got[1], lengths, size))
        return
    if got[0] not in [p["block_size"] for p in points]:
        raise Wrong(seen, "is it one of the sizes that were measured?")
    if got[0] not in [p["block_size"] for p in fits]:
        raise Wrong(
            seen,
            "each sequence has blocks of its own: how many of their slots would be empty?",
        )
    if got[0] == best["block_size"]:
        raise Wrong(seen, "is it faster than a smaller one, or does that one's median lie within its spread?")
    if got[0] in equal:
        raise Wrong(seen, "of sizes that are equally fast, which one leaves fewer slots empty?")
    raise Wrong(
        seen, "who is the fastest of those that are allowed at all, and whose median is not above its p80?"
    )


def _waste_question(got: float, lengths: list[int], size: int) -> str:
    together = -(-sum(lengths) // size) * size
    if abs(got - (1 - sum(lengths) / together)) < 1e-9:
        return "can two sequences share a last block that is not full?"
    held = sum(-(-n // size) for n in lengths) * size
    if abs(got - (held / sum(lengths) - 1)) < 1e-9:
        return "empty slots as a part of which number: the tokens, or all slots that are held?"
    return "how many slots are held, and how many of them have a token?"
