"""The decoder over pages computes what it computes without any cache."""

import json

import numpy as np
import pytest
from needs import STRESS

from pagedkv import PagedKVCache, PoolExhausted
from pagedkv.lm import Llama
from pagedkv.lm.model import rms_norm, rotate, rotations, silu
from pagedkv.lm.weights import SHIPPED

BLOCK_SIZES = [1, 2, 3, 4, 8, 16, 32]


def run_steps(model, cache, texts, steps):
    """Run each step's chunk per sequence, {seq: count}; returns all logits per sequence."""
    done, logits = dict.fromkeys(texts, 0), {seq: [] for seq in texts}
    for step in steps:
        chunks = [texts[seq][done[seq] : done[seq] + count] for seq, count in step.items()]
        rows = model.forward(cache, list(step), chunks)  # [n, vocabulary]
        cuts = np.cumsum([len(chunk) for chunk in chunks])
        for seq, part in zip(step, np.split(rows, cuts[:-1]), strict=True):
            logits[seq].append(part)
            done[seq] += step[seq]
    return {seq: np.concatenate(parts) for seq, parts in logits.items()}


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_chunks_of_prompts_and_single_tokens_in_one_batch_equal_a_full_recompute(model, speech, block_size):
    texts = {"a": speech[:51], "b": speech[20:53], "c": speech[7:40]}
    steps = [
        {"a": 5, "b": 32},  # a prompt in chunks beside a whole one
        {"b": 1, "a": 17},  # decode beside a chunk, in another order
        {"c": 1, "a": 27},  # the shortest prompt there is
        {"a": 1, "c": 31},
        {"c": 1, "a": 1},
    ]
    cache = model.new_cache(200, block_size, poison=True)
    for seq in texts:
        cache.add(seq)
    for seq, logits in run_steps(model, cache, texts, steps).items():
        np.testing.assert_allclose(logits, model.forward_full(texts[seq]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_prompts_of_every_boundary_length_equal_a_full_recompute(model, speech, block_size):
    lengths = sorted(
        {1, block_size - 1, block_size, block_size + 1, 2 * block_size, 2 * block_size + 1} - {0}
    )
    cache = model.new_cache(400, block_size, poison=True)
    texts = [speech[n : 2 * n] for n in lengths]
    seqs = [cache.add() for _ in texts]
    logits = model.next_logits(cache, seqs, texts)  # [batch, vocabulary]
    expected = [model.forward_full(text)[-1] for text in texts]
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_forks_that_diverge_equal_a_full_recompute(model, speech, block_size):
    cache = model.new_cache(200, block_size, poison=True)
    cache.add("a")
    model.forward(cache, "a", [speech[:21]])
    cache.fork("a", ["b", "c"])
    ends = {"a": speech[21:25], "b": speech[100:104], "c": speech[60:64]}
    logits = run_steps(model, cache, ends, [dict.fromkeys(ends, 1)] * 4)
    for seq, end in ends.items():
        expected = model.forward_full(np.concatenate([speech[:21], end]))[21:]
        np.testing.assert_allclose(logits[seq], expected, atol=1e-4, rtol=0)


def test_the_last_position_of_the_context_can_be_used_and_no_more(model, speech):
    context = model.config.context
    cache = model.new_cache(40, 16)
    cache.add("a")
    model.forward(cache, "a", [speech[: context - 1]])
    logits = model.next_logits(cache, "a", [speech[context - 1 : context]])
    expected = model.forward_full(speech[:context])[-1:]
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)
    with pytest.raises(
        ValueError, match=f"'a' would hold {context + 1} tokens; the model's context is {context}"
    ):
        model.forward(cache, "a", [[0]])
    assert cache.length("a") == context


def test_a_token_sees_what_stands_before_it_only(model, speech):
    changed = speech[:40].copy()
    changed[30:] = 0
    before, after = model.forward_full(speech[:40]), model.forward_full(changed)
    np.testing.assert_allclose(before[:30], after[:30], atol=1e-5)
    assert np.abs(before[30:] - after[30:]).max() > 0.1


def test_order_matters_although_the_letters_are_the_same(model):
    one, other = (
        model.forward_full(model.tokenizer.encode(text))[-1] for text in ("night good", "good night")
    )
    assert np.abs(one - other).max() > 0.1


@pytest.mark.parametrize(
    ("seqs", "tokens", "message"),
    [
        (["a"], [[]], "at least one"),
        (["a"], [[0.5]], "whole numbers"),
        (["a"], [[[1, 2]]], "whole numbers"),
        (["a"], [[3, 65]], "65 is no token: they go from 0 to 64"),
        (["a"], [[-1]], "-1 is no token"),
        (["a", "b"], [[1]], "2 sequences, 1 arrays"),
        ([], [], "0 sequences"),
        (["b", "a"], [[1], [1] * 510], "'a' would hold 513 tokens"),
    ],
)
def test_what_cannot_be_run_is_refused_and_changes_nothing(model, seqs, tokens, message):
    cache = model.new_cache(60, 16)
    cache.add("a"), cache.add("b")
    model.forward(cache, "a", [[1, 2, 3]])
    before = cache.num_free, cache.versions(["a", "b"]).tolist()
    with pytest.raises(ValueError, match=message):
        model.forward(cache, seqs, tokens)
    assert (cache.num_free, cache.versions(["a", "b"]).tolist()) == before


def test_unknown_sequences_and_full_pools_change_nothing(model):
    cache = model.new_cache(2, 4)
    cache.add("a")
    with pytest.raises(KeyError, match="nobody"):
        model.forward(cache, ["a", "nobody"], [[1], [1]])
    with pytest.raises(PoolExhausted):
        model.forward(cache, "a", [np.zeros(9, int)])
    assert (cache.num_free, cache.length("a")) == (2, 0)


def test_a_cache_of_another_shape_is_refused(model):
    cache = PagedKVCache(4, 4, 2, 32, num_layers=3)
    cache.add("a")
    with pytest.raises(ValueError, match=r"\(3, 2, 32\), the model needs \(4, 2, 32\)"):
        model.forward(cache, "a", [[1]])
    assert cache.length("a") == 0


@pytest.mark.parametrize("tokens", [[], [65], [0] * 513, [0.0]])
def test_forward_full_refuses_what_forward_refuses(model, tokens):
    with pytest.raises(ValueError, match="token"):
        model.forward_full(tokens)


# --- the parts, by hand


def test_rotation_turns_feature_i_with_feature_i_plus_half_by_its_own_angle(model):
    cos, sin = rotations(model.config)  # [512, 32] each
    x = np.zeros((1, 1, 32), np.float32)
    x[0, 0, 3] = 1
    turned = rotate(x, cos[7, None], sin[7, None])[0, 0]
    angle = 7 * 10000 ** (-2 * 3 / 32)
    expected = np.zeros(32)
    expected[3], expected[3 + 16] = np.cos(angle), np.sin(angle)
    np.testing.assert_allclose(turned, expected, atol=1e-6)


def test_after_rotation_a_product_depends_on_the_distance_only(model):
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 32), np.float32)
    cos, sin = rotations(model.config)

    def score(i, j):
        return np.vdot(rotate(q, cos[i, None], sin[i, None]), rotate(k, cos[j, None], sin[j, None]))

    np.testing.assert_allclose([score(5, 2), score(103, 100), score(503, 500)], score(3, 0), atol=1e-3)
    np.testing.assert_allclose(score(0, 0), np.vdot(q, k), rtol=1e-6)
    assert abs(score(9, 0) - score(3, 0)) > 0.01


def test_rms_norm_and_silu_by_hand():
    x = np.array([[3, 4], [0, 0]], np.float32)
    np.testing.assert_allclose(
        rms_norm(x, np.array([1, 2], np.float32), 0.5)[0], [3 / 13**0.5, 8 / 13**0.5], rtol=1e-6
    )
    np.testing.assert_array_equal(rms_norm(x, np.ones(2, np.float32), 1e-5)[1], [0, 0])
    with np.errstate(all="raise"):
        found = silu(np.array([0, 1, -200, 200], np.float32))
    np.testing.assert_allclose(found, [0, 1 / (1 + np.exp(-1)), 0, 200], atol=1e-6)


def test_the_losses_in_the_card_are_those_of_the_shipped_weights(model, shared):
    """A full run measures the whole validation split, a quick one its first windows."""
    facts = json.loads(SHIPPED.with_suffix(".json").read_text("utf-8"))["training"]
    assert f"**{facts['validation_loss']}** nats per character" in SHIPPED.with_name("CARD.md").read_text(
        "utf-8"
    )
    text = (shared / "data/text/tinyshakespeare.txt").read_text("utf-8")
    validation = model.tokenizer.encode(text[len(text) * 9 // 10 :])
    start = validation[: 20 * model.config.context + 1]
    assert abs(validation_loss(model, start) - facts["validation_loss_of_first_20_windows"]) < 0.01
    if STRESS:
        assert abs(validation_loss(model, validation) - facts["validation_loss"]) < 0.01


def validation_loss(model: Llama, tokens) -> float:
    """Nats per character, windows side by side, as `pagedkv.lm.train.evaluate`, with nothing shared with it."""
    total, context = 0.0, model.config.context
    for start in range(0, len(tokens) - 1, context):
        window = tokens[start : start + context + 1]
        logits = model.forward_full(window[:-1]).astype(np.float64)  # [count, vocabulary]
        logits -= logits.max(axis=1, keepdims=True)
        chosen = logits[np.arange(len(logits)), window[1:]]
        total += (np.log(np.exp(logits).sum(axis=1)) - chosen).sum()
    return total / (len(tokens) - 1)
