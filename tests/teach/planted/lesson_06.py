"""Wrong solutions of lesson 06, as learners write them. See ../test_planted.py."""

import numpy as np

from pagedkv.attention import softmax
from pagedkv.lm.generate import Beams, best
from pagedkv.teach.checks._core import ERROR

# ---- decode_step(model, cache, seq_ids, tokens)


def decoder(place, *, before=lambda cache, ids: None, write=True, counts=1, planned_early=False):
    """A decode step that differs from a right one in what is said."""

    def decode_step(model, cache, seq_ids, tokens):
        lengths = cache.lengths(seq_ids)
        plan = cache.plan(seq_ids) if planned_early else None
        reservation = cache.extend(seq_ids, counts)
        plan = plan or cache.plan(seq_ids)

        def attend(layer, q, k, v):
            if write:
                cache.write(layer, reservation, k, v)
            return cache.attend(layer, q, plan)

        return model.decode(tokens.ravel(), place(lengths), attend)

    return decode_step


def right(lengths):
    return lengths


def the_last_token_again(lengths):
    return lengths - 1


def the_length_afterwards(lengths):
    return lengths + 1


def always_the_beginning(lengths):
    return np.zeros_like(lengths)


def one_for_all(lengths):
    return np.full_like(lengths, lengths.max())


def number_in_the_batch(lengths):
    return lengths[0] + np.arange(len(lengths))


def one_vector(model, cache, seq_ids, tokens):
    return decoder(right)(model, cache, seq_ids, tokens)[-1]


# ---- top_p(probabilities, p)


def crossing_dropped(probabilities, p):
    order = np.argsort(-probabilities)
    kept = order[np.cumsum(probabilities[order]) <= p]
    out = np.zeros_like(probabilities)
    out[kept] = probabilities[kept]
    return out / max(out.sum(), 1e-300) if len(kept) else np.eye(len(out))[order[0]]


def empty_for_small_p(probabilities, p):
    order = np.argsort(-probabilities)
    count = np.searchsorted(np.cumsum(probabilities[order]), p) + (p > probabilities.max() / 2)
    out = np.zeros_like(probabilities)
    out[order[:count]] = probabilities[order[:count]]
    return out / out.sum() if count else out


def kept_by_top_p(probabilities, p):
    order = np.argsort(-probabilities)
    before = np.cumsum(probabilities[order]) - probabilities[order]
    return order[before < p - 1e-12]


def not_renormalised(probabilities, p):
    out = np.zeros_like(probabilities)
    kept = kept_by_top_p(probabilities, p)
    out[kept] = probabilities[kept]
    return out


def one_more(probabilities, p):
    order = np.argsort(-probabilities)
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept = order[before <= p + 1e-12]
    out = np.zeros_like(probabilities)
    out[kept] = probabilities[kept]
    return out / out.sum()


def in_the_order_of_the_alphabet(probabilities, p):
    kept = np.cumsum(probabilities) - probabilities < p - 1e-12
    return np.where(kept, probabilities, 0) / probabilities[kept].sum()


def left_sorted(probabilities, p):
    ordered = -np.sort(-probabilities)
    kept = np.cumsum(ordered) - ordered < p - 1e-12
    return np.where(kept, ordered, 0) / ordered[kept].sum()


def only_the_kept(probabilities, p):
    kept = np.sort(kept_by_top_p(probabilities, p))
    return probabilities[kept] / probabilities[kept].sum()


def in_place(probabilities, p):
    mask = np.ones(len(probabilities), bool)
    mask[kept_by_top_p(probabilities, p)] = False
    probabilities[mask] = 0
    probabilities /= probabilities.sum()
    return probabilities


# ---- beam_step(cache, seq_ids, texts, scores, logits, width)


def logs(logits):
    return logits - softmax(logits)[1][:, None]


def chosen(table, width):
    order = np.argsort(-table, axis=None, kind="stable")[:width]
    return [divmod(int(i), table.shape[1]) for i in order], table.ravel()[order]


def fork_all(cache, seq_ids, parents):
    new = [cache.fork(seq_ids[parent])[0] for parent in parents]
    cache.free(seq_ids)
    return new


def searcher(table, move=fork_all):
    """A beam step whose scores are `table(scores, logits)` and whose sequences go by `move`."""

    def beam_step(cache, seq_ids, texts, scores, logits, width):
        pairs, new_scores = chosen(table(scores, logits), width)
        ids = move(cache, seq_ids, [parent for parent, _ in pairs])
        return ids, [[*texts[parent], token] for parent, token in pairs], new_scores

    return beam_step


def sums_of_logs(scores, logits):
    return scores[:, None] + logs(logits)


def probabilities_added(scores, logits):
    return scores[:, None] + softmax(logits)[0]


def raw_logits(scores, logits):
    return scores[:, None] + logits


def rows_overwritten(cache, seq_ids, parents):
    """Row by row, so a later row may continue what an earlier one has just become."""
    rows = list(seq_ids) + [None] * (len(parents) - len(seq_ids))
    for i, parent in enumerate(parents):
        new = cache.fork(rows[parent])[0]
        if rows[i] is not None:
            cache.free(rows[i])
        rows[i] = new
    return rows


def released_first(cache, seq_ids, parents):
    cache.free(seq_ids)
    return [cache.fork(seq_ids[parent])[0] for parent in parents]


def losers_stay(cache, seq_ids, parents):
    return [cache.fork(seq_ids[parent])[0] for parent in parents]


def one_sequence_for_two(cache, seq_ids, parents):
    cache.free([name for i, name in enumerate(seq_ids) if i not in parents])
    return [seq_ids[parent] for parent in parents]


def each_its_own_best(cache, seq_ids, texts, scores, logits, width):
    """Every beam goes on by itself: no parent has two children, none has none."""
    if len(seq_ids) < width:
        return searcher(sums_of_logs)(cache, seq_ids, texts, scores, logits, width)
    table = sums_of_logs(scores, logits)
    tokens = table.argmax(axis=1)
    pairs = sorted(enumerate(tokens.tolist()), key=lambda pair: -table[pair])
    ids = fork_all(cache, seq_ids, [parent for parent, _ in pairs])
    return ids, [[*texts[i], t] for i, t in pairs], np.array([table[pair] for pair in pairs])


def the_packages_choice(cache, seq_ids, texts, scores, logits, width):
    beams = best(Beams(np.array(texts, np.int64), scores, np.zeros(1, np.int64)), logits, width)
    return fork_all(cache, seq_ids, beams.parents), beams.texts.tolist(), beams.scores


BUGS = [
    ("decode_step", "position 9", decoder(the_last_token_again), "the network was told [9]"),
    ("decode_step", "position 11", decoder(the_length_afterwards), "the network was told [11]"),
    (
        "decode_step",
        "position 0",
        decoder(always_the_beginning),
        "which position has a letter behind ten others",
    ),
    ("decode_step", "one position for all", decoder(one_for_all), "was told [12, 12, 12]"),
    ("decode_step", "number in the batch", decoder(number_in_the_batch), "was told [11, 12, 13]"),
    ("decode_step", "keys never written", decoder(right, write=False), "what must be in the cache"),
    ("decode_step", "one vector", one_vector, "how many tokens does each sequence run"),
    ("decode_step", "planned before the extend", decoder(right, planned_early=True), "StalePlan", ERROR),
    ("top_p", "crossing token dropped", crossing_dropped, "does the token that crosses p stay"),
    ("top_p", "not renormalised", not_renormalised, "what must probabilities sum to"),
    ("top_p", "empty for small p", empty_for_small_p, "what is left to draw from"),
    ("top_p", "one token too many", one_more, "who else is needed"),
    ("top_p", "not sorted", in_the_order_of_the_alphabet, "likeliest first, or first in the alphabet"),
    ("top_p", "left in sorted order", left_sorted, "where does each go back to"),
    ("top_p", "only the kept ones", only_the_kept, "one probability per token"),
    ("top_p", "in place", in_place, "changed its arguments"),
    ("shared_blocks", "prompt counted per answer", (52, 16), "hold the prompt's letters for all of them"),
    ("shared_blocks", "share rounded up", (43, 13), "who writes into it next"),
    ("shared_blocks", "share rounded up in the large blocks", (46, 13), "who writes into it next"),
    ("shared_blocks", "prompt forgotten", (40, 12), "its prompt included"),
    ("shared_blocks", "blocks of 16 save something", (46, 15), "You say 15 in blocks of 16"),
    ("beam_step", "probabilities added", searcher(probabilities_added), "how likely are both together"),
    ("beam_step", "raw logits", searcher(raw_logits), "are they on one scale"),
    ("beam_step", "rows overwritten", searcher(sums_of_logs, rows_overwritten), "beams may change places"),
    ("beam_step", "released first", searcher(sums_of_logs, released_first), "KeyError", ERROR),
    ("beam_step", "losers stay", searcher(sums_of_logs, losers_stay), "that nobody continues"),
    (
        "beam_step",
        "one sequence for two",
        searcher(sums_of_logs, one_sequence_for_two),
        "can they be one sequence",
    ),
    ("beam_step", "each its own best", each_its_own_best, "may two of the best continue the same parent"),
    ("beam_step", "the package's choice", the_packages_choice, "calls the package's best"),
]
