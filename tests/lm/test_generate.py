"""Greedy, sampling, parallel samples and beams over pages."""

import itertools

import numpy as np
import pytest

from pagedkv import PoolExhausted, dense_attention
from pagedkv.lm import Sampling, Usage, beam_search, greedy, sample
from pagedkv.lm.generate import draw, keep_top_k, keep_top_p

BLOCK_SIZES = [1, 2, 3, 4, 8, 16, 32]


def watched_cache(model, num_blocks, block_size):
    cache = model.new_cache(num_blocks, block_size, poison=True)
    cache.manager.observers.append(usage := Usage(cache.manager))
    return cache, usage


def assert_empty(cache):
    assert cache.seq_ids == []
    assert cache.num_free == cache.num_blocks


@pytest.fixture(scope="module")
def night(model):
    return model.tokenizer.encode("Good night")


# --- greedy


@pytest.fixture(scope="module")
def recomputed(model, night):
    """Sixty tokens, each from a recompute of everything before it."""
    tokens = list(night)
    for _ in range(60):
        tokens.append(int(np.argmax(model.forward_full(tokens)[-1])))
    return tokens[len(night) :]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_greedy_over_pages_writes_what_a_full_recompute_writes(model, night, recomputed, block_size):
    cache, _ = watched_cache(model, 70, block_size)
    assert list(greedy(model, cache, night, 60)) == recomputed
    assert_empty(cache)


def test_top_k_of_one_and_a_tiny_top_p_and_a_tiny_temperature_are_greedy(model, night, recomputed):
    cache, _ = watched_cache(model, 20, 4)
    for sampling in (Sampling(top_k=1), Sampling(top_p=1e-9), Sampling(temperature=1e-12)):
        texts = np.array(list(sample(model, cache, night, 20, sampling=sampling)))  # [20, 1]
        assert texts[:, 0].tolist() == recomputed[:20]


def test_nothing_is_written_when_no_tokens_are_asked_for(model, night):
    cache, _ = watched_cache(model, 4, 4)
    assert list(greedy(model, cache, night, 0)) == []
    assert list(beam_search(model, cache, night, 0)) == []
    assert_empty(cache)


# --- sampling


def test_top_p_keeps_the_token_that_crosses():
    probabilities = np.array([0.4, 0.3, 0.2, 0.1])
    np.testing.assert_allclose(keep_top_p(probabilities, 0.5), [4 / 7, 3 / 7, 0, 0])


def test_top_p_never_empties_the_set():
    np.testing.assert_array_equal(keep_top_p(np.array([0.4, 0.3, 0.2, 0.1]), 0.01), [1, 0, 0, 0])


@pytest.mark.parametrize(("p", "kept"), [(0.4, 1), (0.7, 2), (0.700001, 3), (0.9, 3), (1.0, 4)])
def test_top_p_that_is_reached_exactly_keeps_no_more(p, kept):
    rows = np.array([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
    assert np.count_nonzero(keep_top_p(rows, p), axis=1).tolist() == [kept, kept]


def test_top_k_keeps_the_likeliest_of_each_row_and_the_lower_token_among_equals():
    rows = np.array([[0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]])
    np.testing.assert_allclose(keep_top_k(rows, 2), [[0, 0, 3 / 7, 4 / 7], [0.5, 0.5, 0, 0]])
    np.testing.assert_allclose(keep_top_k(rows, 99), rows)


def test_temperature_divides_the_logits():
    logits = np.log([[0.8, 0.2]])
    np.testing.assert_allclose(Sampling(temperature=0.5).probabilities(logits), [[0.64 / 0.68, 0.04 / 0.68]])
    np.testing.assert_allclose(Sampling(temperature=2).probabilities(logits), [[2 / 3, 1 / 3]])


def test_top_k_comes_before_top_p():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert np.count_nonzero(Sampling(top_k=2, top_p=0.55).probabilities(logits)) == 1  # 4/7 reaches 0.55
    assert np.count_nonzero(Sampling(top_p=0.55).probabilities(logits)) == 2


def test_draw_follows_the_probabilities():
    probabilities, random = np.array([0.0, 0.5, 0.0, 0.3, 0.2]), np.random.default_rng(0)
    counts = np.bincount([draw(probabilities, random) for _ in range(10_000)], minlength=5)
    np.testing.assert_allclose(counts / 10_000, probabilities, atol=0.02)
    assert counts[0] == counts[2] == 0


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (np.nextafter(1, 0), 2)])
def test_draw_at_both_ends_never_takes_an_impossible_token(number, token):
    class Fixed:
        def random(self):
            return number

    assert draw(np.array([0.0, 0.5, 0.5, 0.0]), Fixed()) == token


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 0},
        {"temperature": -1},
        {"temperature": np.nan},
        {"temperature": np.inf},
        {"top_k": 0},
        {"top_k": 1.5},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_p": np.nan},
    ],
)
def test_sampling_refuses_what_makes_no_sense(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        Sampling(**wrong)


# --- parallel samples


def written(model, prompt, num_samples, seed=3, block_size=4):
    cache, usage = watched_cache(model, 60, block_size)
    random = np.random.default_rng(seed)
    texts = np.array(list(sample(model, cache, prompt, 40, num_samples=num_samples, random=random)))
    assert_empty(cache)
    return texts.T, usage  # [num_samples, 40]


def test_the_same_seed_writes_the_same_texts_and_another_seed_others(model, night):
    (one, _), (same, _), (other, _) = (written(model, night, 2, seed) for seed in (3, 3, 4))
    assert (one == same).all()
    assert (one != other).any(axis=1).all()
    assert (one[0] != one[1]).any()


def test_a_text_does_not_depend_on_how_many_others_are_written_or_on_the_block_size(model, night):
    alone, _ = written(model, night, 1)
    among, _ = written(model, night, 4)
    coarse, _ = written(model, night, 4, block_size=16)
    assert (alone[0] == among[0]).all()
    assert (among == coarse).all()


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_samples_share_the_full_blocks_of_the_prompt(model, night, block_size):
    cache, usage = watched_cache(model, 200, block_size)
    for _ in sample(model, cache, night, 41, num_samples=4):
        pass
    blocks = -(-50 // block_size)  # the last token of 10 + 41 is chosen, not run
    shared = 10 // block_size
    assert usage.peak == shared + 4 * (blocks - shared)
    assert usage.unshared == 4 * blocks
    assert usage.copied == (3 if 10 % block_size else 0)  # the last owner writes in place


def test_a_prompt_is_computed_once_for_all_samples(model, night, monkeypatch):
    counts = []
    decode = type(model).decode

    def counting(self, tokens, *rest):
        counts.append(len(tokens))
        return decode(self, tokens, *rest)

    monkeypatch.setattr(type(model), "decode", counting)
    cache, _ = watched_cache(model, 60, 4)
    list(sample(model, cache, night, 3, num_samples=5))
    assert counts == [10, 5, 5]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_text_ends_with_the_end_token(model, night, recomputed, block_size):
    end = recomputed[9]
    length = recomputed.index(end) + 1
    cache, _ = watched_cache(model, 70, block_size)
    assert list(greedy(model, cache, night, 60, end=end)) == recomputed[:length]
    assert_empty(cache)


def test_a_sample_that_ends_frees_its_blocks_and_changes_no_other(model, night):
    def texts(end, watch=lambda cache: None):
        cache, _ = watched_cache(model, 200, 4)
        steps = []
        for tokens in sample(
            model, cache, night, 30, num_samples=5, random=np.random.default_rng(3), end=end
        ):
            steps.append(tokens)
            watch(cache)
        assert_empty(cache)
        return np.array(steps).T  # [num_samples, steps]

    whole, living = texts(None), []
    end = int(whole[2, 6])
    cut = texts(end, lambda cache: living.append(len(cache.seq_ids)))
    for one, other in zip(whole, cut, strict=True):
        length = [*one.tolist(), end].index(end) + 1  # up to the first end token, that included
        assert other.tolist() == [*one[:length].tolist(), *[end] * 30][: cut.shape[1]]
    running = [sum(end not in row[:step].tolist() for row in cut) for step in range(len(living))]
    assert living == running  # when tokens are shown, those that they end are still there
    assert running[-1] < 5


def test_nothing_is_computed_after_all_samples_have_ended(model, night):
    cache, _ = watched_cache(model, 60, 4)
    first = next(iter(sample(model, cache, night, 1, sampling=Sampling(top_k=1))))
    steps = list(
        sample(model, cache, night, 20, num_samples=3, sampling=Sampling(top_k=1), end=int(first[0]))
    )
    assert np.array(steps).tolist() == [[first[0]] * 3]
    assert_empty(cache)


# --- beams


def copying_beam_search(model, prompt, num_tokens, width):
    """A search in which each beam owns dense arrays of keys and values and every fork copies all of them."""

    def run(arrays, tokens):
        start = len(arrays[0][0])

        def attend(layer, q, k, v):
            keys, values = arrays[layer]
            arrays[layer] = (
                np.concatenate([keys, k]),
                np.concatenate([values, v]),
            )  # [length, kv_heads, head_dim]
            return dense_attention(q, *arrays[layer], dtype=np.float32)

        logits = model.decode(np.array(tokens), start + np.arange(len(tokens)), attend)[-1].astype(float)
        return logits - np.logaddexp.reduce(logits)  # [vocabulary]

    c = model.config
    empty = np.zeros((0, c.num_kv_heads, c.head_dim), np.float32)
    arrays = [(empty, empty)] * c.num_layers
    beams = [(0.0, [], arrays, run(arrays, list(prompt)))]
    for step in range(num_tokens):
        candidates = [
            (score + gain, text, token, arrays)
            for score, text, arrays, gains in beams
            for token, gain in enumerate(gains)
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        gap = candidates[width - 1][0] - candidates[width][0]
        assert gap > 1e-6, f"step {step} is too close to call ({gap}): take another prompt"
        beams = []
        for score, text, token, arrays in candidates[:width]:
            own = [(keys.copy(), values.copy()) for keys, values in arrays]
            beams.append((score, [*text, token], own, run(own, [token])))
    return [text for _, text, _, _ in beams], [score for score, _, _, _ in beams]


@pytest.fixture(scope="module")
def copied(model, night):
    return copying_beam_search(model, night, 200, 4)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_beams_of_pages_write_what_beams_of_copied_caches_write(model, night, copied, block_size):
    cache, usage = watched_cache(model, 4 * 209, block_size)
    *_, beams = beam_search(model, cache, night, 200, width=4)
    texts, scores = copied
    assert beams.texts.tolist() == texts
    np.testing.assert_allclose(beams.scores, scores, atol=1e-3)
    assert usage.unshared == 4 * -(-209 // block_size)
    assert usage.peak < usage.unshared * 2 / 3
    print(
        f"block size {block_size}: {usage.peak} blocks at most, {usage.unshared} unshared, {usage.copied} copies"
    )
    assert_empty(cache)


def test_one_beam_is_greedy(model, night, recomputed):
    cache, _ = watched_cache(model, 20, 4)
    *_, beams = beam_search(model, cache, night, 60, width=1)
    assert beams.texts[0].tolist() == recomputed


def test_more_beams_find_a_likelier_text_here(model, night):
    cache, _ = watched_cache(model, 100, 4)
    best = [list(beam_search(model, cache, night, 40, width))[-1].scores[0] for width in (1, 8)]
    assert best[1] > best[0]


def test_each_step_names_the_parents_whose_texts_it_continues(model, night):
    cache, _ = watched_cache(model, 60, 4)
    steps = list(beam_search(model, cache, night, 30, width=4))
    for before, after in itertools.pairwise(steps):
        assert (after.texts[:, :-1] == before.texts[after.parents]).all()
        assert (np.diff(after.scores) <= 0).all()
    assert any(len(set(step.parents.tolist())) < 4 for step in steps[1:])


def test_beams_copy_shared_last_blocks_only(model, night):
    """Of r beams that share a block and write to it, r − 1 copy: copies never exceed the step's doubled parents."""
    cache, _ = watched_cache(model, 60, 4)
    copies = []
    cache.manager.observers.append(
        lambda event: copies.append(len(event.blocks["copies"])) if event.kind == "extend" else None
    )
    steps = list(beam_search(model, cache, night, 30, width=4))
    doubled = [4 - len(set(step.parents.tolist())) for step in steps]
    for t, (made, most) in enumerate(zip(copies[1:], doubled, strict=False)):
        length = 10 + t
        assert made <= most
        if length % 4 == 0:
            assert made == 0
    assert sum(copies) > 0


def test_the_first_step_cannot_have_more_beams_than_the_vocabulary(model, night):
    cache, _ = watched_cache(model, 60, 4)
    with pytest.raises(ValueError, match="66 beams cannot start from 65"):
        next(beam_search(model, cache, night, 5, width=66))
    assert_empty(cache)


# --- limits

WAYS = {
    "greedy": lambda model, cache, prompt, n: (
        np.array([token]) for token in greedy(model, cache, prompt, n)
    ),
    "sample": lambda model, cache, prompt, n: sample(
        model, cache, prompt, n, num_samples=3, random=np.random.default_rng(1)
    ),
    "beams": lambda model, cache, prompt, n: beam_search(model, cache, prompt, n, width=3),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_full_pool_ends_the_text_after_what_could_be_written(model, night, way):
    roomy, _ = watched_cache(model, 60, 4)
    expected = list(way(model, roomy, night, 30))
    cache, _ = watched_cache(model, 6, 4)
    got = []
    with pytest.raises(PoolExhausted):
        for step in way(model, cache, night, 30):
            got.append(step)
    assert 0 < len(got) < 30
    for one, other in zip(got, expected, strict=False):
        assert np.array_equal(getattr(one, "texts", one), getattr(other, "texts", other))
    assert_empty(cache)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_pool_too_small_for_the_prompt_writes_nothing(model, night, way):
    cache, _ = watched_cache(model, 2, 4)
    with pytest.raises(PoolExhausted):
        next(way(model, cache, night, 30))
    assert_empty(cache)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_caller_who_stops_early_leaves_no_block_behind(model, night, way):
    cache, _ = watched_cache(model, 60, 4)
    steps = way(model, cache, night, 30)
    for _ in range(5):
        next(steps)
    assert cache.num_free < cache.num_blocks
    steps.close()
    if way is WAYS["greedy"]:  # a generator around a generator: closed when it is collected
        del steps
    assert_empty(cache)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    ("prompt", "num_tokens", "message"),
    [
        ([], 5, "the prompt is empty"),
        ([1] * 500, 13, "a prompt of 500 and 13 new tokens exceed the model's context of 512"),
        ([1], -1, "num_tokens must be a whole number of at least 0, got -1"),
        ([1], 1.5, "num_tokens"),
        ([65], 5, "65 is no token"),
        ([[1, 2]], 5, "whole numbers"),
        ([0.5], 5, "whole numbers"),
    ],
)
def test_requests_that_make_no_sense_are_refused(model, way, prompt, num_tokens, message):
    cache, _ = watched_cache(model, 60, 4)
    with pytest.raises(ValueError, match=message):
        next(way(model, cache, prompt, num_tokens))
    assert_empty(cache)


def test_other_sequences_of_the_cache_are_left_alone(model, night):
    cache, _ = watched_cache(model, 60, 4)
    cache.add("mine")
    model.forward(cache, "mine", [night])
    keys, _ = cache.gather(0, "mine")
    list(beam_search(model, cache, night, 10, width=4))
    assert cache.seq_ids == ["mine"]
    assert np.array_equal(cache.gather(0, "mine")[0], keys)
