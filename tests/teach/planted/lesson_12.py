"""Wrong solutions of lesson 12, as learners write them. See ../test_planted.py."""

import numpy as np

# ---- interleaved(variants, rounds, clock)


def visits(
    variants, rounds, clock, *, warm=1, timed=1, order=lambda names, turn: names[:: 1 if turn % 2 else -1]
):
    """A right one, but for its order when there are more than two; the wrong ones change one thing each."""
    samples = {name: [] for name in variants}
    for turn in range(rounds):
        for name in order(list(variants), turn):
            for _ in range(warm):
                variants[name]()
            started = clock()
            for _ in range(timed):
                variants[name]()
            samples[name].append(clock() - started)
    return samples


def one_after_the_other(variants, rounds, clock):
    samples = {}
    for name, call in variants.items():
        samples[name] = []
        for _ in range(rounds):
            call()
            started = clock()
            call()
            samples[name].append(clock() - started)
    return samples


def never_warm(variants, rounds, clock):
    return visits(variants, rounds, clock, warm=0)


def warm_once(variants, rounds, clock):
    for call in variants.values():
        call()
    return visits(variants, rounds, clock, warm=0)


def the_warm_up_counts(variants, rounds, clock):
    return visits(variants, rounds, clock, warm=0, timed=2)


def always_in_one_order(variants, rounds, clock):
    return visits(variants, rounds, clock, order=lambda names, turn: names)


def only_the_median(variants, rounds, clock):
    samples = visits(variants, rounds, clock, order=lambda names, turn: np.roll(names, turn).tolist())
    return {name: float(np.median(times)) for name, times in samples.items()}


def the_clock_once_a_round(variants, rounds, clock):
    samples = {name: [] for name in variants}
    for turn in range(rounds):
        started = clock()
        for name in np.roll(list(variants), turn).tolist():
            variants[name]()
            samples[name].append(clock() - started)
    return samples


# ---- fair(ours, theirs, right, rounds, clock)


def right_one(
    ours,
    theirs,
    right,
    rounds,
    clock,
    *,
    warm=True,
    fresh=False,
    turns=True,
    middle=np.median,
    upside_down=False,
    wrong=lambda out, right: not np.abs(out - right).max() <= 2e-6 * np.abs(right).max(),
):
    out = np.empty(right.shape, np.float32)
    for call in (ours, theirs):
        call(out)
        if wrong(out, right):
            raise ValueError("wrong result")
    samples = {ours: [], theirs: []}
    calls = [(ours, theirs)[:: 1 if turn % 2 else -1] for turn in range(rounds)]
    if not turns:
        calls = [[ours] * rounds, [theirs] * rounds]
    for group in calls:
        for call in group:
            if warm:
                call(out)
            to = np.empty_like(out) if fresh else out
            started = clock()
            call(to)
            samples[call].append(clock() - started)
    took = [middle(samples[call]) for call in (theirs, ours)]
    return took[1] / took[0] if upside_down else took[0] / took[1]


def never_warmed(*args):
    return right_one(*args, warm=False)


def fresh_memory(*args):
    return right_one(*args, fresh=True)


def ours_first(*args):
    return right_one(*args, turns=False)


def means(*args):
    return right_one(*args, middle=np.mean)


def ours_by_theirs(*args):
    return right_one(*args, upside_down=True)


def unchecked(*args):
    return right_one(*args, wrong=lambda out, right: False)


def lets_nan_through(*args):
    return right_one(*args, wrong=lambda out, right: np.abs(out - right).max() > 2e-6 * np.abs(right).max())


def wants_equality(*args):
    return right_one(*args, wrong=lambda out, right: (out != right.astype(np.float32)).any())


# ---- chunks(length, chunk, tile)


def rounded_up(length, chunk, tile):
    return [(start, -(-min(chunk, length - start) // tile), tile) for start in range(0, length, chunk)]


def tail_lost(length, chunk, tile):
    parts = [(start, min(chunk, length - start) // tile, tile) for start in range(0, length, chunk)]
    return [part for part in parts if part[1]]


def chunks_ignored(length, chunk, tile):
    tiles, rest = divmod(length, tile)
    return ([(0, tiles, tile)] if tiles else []) + ([(tiles * tile, 1, rest)] if rest else [])


def empty_products(length, chunk, tile):
    found = []
    for start in range(0, length, chunk):
        tiles, rest = divmod(min(chunk, length - start), tile)
        found += [(start, tiles, tile), (start + tiles * tile, 1, rest)]
    return found


def tile_by_tile(length, chunk, tile):
    found = []
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        found += [(at, 1, min(tile, end - at)) for at in range(start, end, tile)]
    return found


def tail_of_the_length(length, chunk, tile):
    """Takes the tail from the whole length, not from its chunk: right while chunks are whole tiles."""
    found = []
    for start in range(0, length, chunk):
        tiles = min(chunk, length - start) // tile
        found += [(start, tiles, tile)] if tiles else []
    return found + ([(length - length % tile, 1, length % tile)] if length % tile else [])


# ---- choose(lengths, points, most_waste)


def wasted(lengths, size):
    held = sum(-(-n // size) * size for n in lengths)
    return 1 - sum(lengths) / held


def choice(lengths, points, most_waste, *, waste=wasted, keep=True, equal=True, pick=min):
    fits = [p for p in points if not keep or waste(lengths, p["block_size"]) <= most_waste]
    if not fits:
        raise ValueError("no block size wastes so little")
    best = min(fits, key=lambda p: p["seconds"])
    sizes = [p["block_size"] for p in fits if p["seconds"] <= best["p80"]] if equal else [best["block_size"]]
    return pick(sizes), waste(lengths, pick(sizes))


def fastest_of_all(lengths, points, most_waste):
    return choice(lengths, points, most_waste, keep=False)


def medians_believed(lengths, points, most_waste):
    return choice(lengths, points, most_waste, equal=False)


def largest_of_the_equal(lengths, points, most_waste):
    return choice(lengths, points, most_waste, pick=max)


def all_in_one_row(lengths, size):
    return wasted([sum(lengths)], size)


def one_row(lengths, points, most_waste):
    return choice(lengths, points, most_waste, waste=all_in_one_row)


def of_the_tokens(lengths, points, most_waste):
    size, waste = choice(lengths, points, most_waste)
    return size, waste / (1 - waste)


def smallest_always(lengths, points, most_waste):
    size = min(p["block_size"] for p in points if wasted(lengths, p["block_size"]) <= most_waste)
    return size, wasted(lengths, size)


def never_refuses(lengths, points, most_waste):
    try:
        return choice(lengths, points, most_waste)
    except ValueError:
        size = min(p["block_size"] for p in points)
        return size, wasted(lengths, size)


BUGS = [
    ("interleaved", "one after the other", one_after_the_other, "a neighbour who comes at half time"),
    ("interleaved", "never warm", never_warm, "what should happen before the clock is read"),
    ("interleaved", "warm once", warm_once, "what should happen before the clock is read"),
    ("interleaved", "the warm-up counts", the_warm_up_counts, "is the call that warms up meant to count"),
    ("interleaved", "always in one order", always_in_one_order, "never came first"),
    ("interleaved", "only the median", only_the_median, "in the order of the rounds"),
    ("interleaved", "the clock once a round", the_clock_once_a_round, "how many pairs should there be"),
    ("flaws", "the warm-up", {"A": 7, "B": 2}, "what does it write to, and who did so before"),
    ("flaws", "the median", {"A": 11, "B": 2}, "what if every round is bad for one of the two"),
    ("flaws", "the division", {"A": 6, "B": 10}, "which of these tokens did a user ask for"),
    ("flaws", "exchanged", {"A": 2, "B": 6}, "only names things"),
    ("flaws", "half an answer", {"A": 6, "B": ...}, "B still has its dots"),
    ("fair", "never warmed", never_warmed, "what should happen before the clock is read"),
    ("fair", "fresh memory", fresh_memory, "when was yours made"),
    ("fair", "ours first", ours_first, "was each of the two measured before and after"),
    ("fair", "means", means, "which number hardly notices a few of them"),
    ("fair", "upside down", ours_by_theirs, "what is divided by what"),
    ("fair", "unchecked", unchecked, "a fast kernel that is wrong is no kernel"),
    ("fair", "NaN let through", lets_nan_through, "is NaN > 2e-6"),
    ("fair", "equality wanted", wants_equality, "wrong result", "error in your code"),
    ("chunks", "rounded up", rounded_up, "whose rows stand behind the end"),
    ("chunks", "tail lost", tail_lost, "which positions does nobody cover"),
    ("chunks", "chunks ignored", chunks_ignored, "can a tile reach into the next one"),
    ("chunks", "empty products", empty_products, "is a product of no rows a product"),
    ("chunks", "tile by tile", tile_by_tile, "do the whole tiles of a chunk stand in one part"),
    ("chunks", "tail of the length", tail_of_the_length, "which positions does nobody cover"),
    ("choose", "fastest of all", fastest_of_all, "how many of their slots would be empty"),
    ("choose", "medians believed", medians_believed, "lie within its spread"),
    ("choose", "largest of the equal", largest_of_the_equal, "which one leaves fewer slots empty"),
    ("choose", "all in one row", one_row, "each sequence has blocks of its own"),
    ("choose", "waste of the tokens", of_the_tokens, "as a part of which number"),
    ("choose", "smallest always", smallest_always, "whose median is not above its p80"),
    ("choose", "never refuses", never_refuses, "which answer would be honest"),
]
