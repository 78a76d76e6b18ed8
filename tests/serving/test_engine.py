"""A real model behind the scheduler: whatever happens to a request, its text is the one it gets alone."""

import numpy as np
import pytest

from pagedkv.lm import Sampling, beam_search, sample
from pagedkv.serving import Engine, Request


def alone(model, request):
    """The texts of a request that has the model to itself."""
    cache = model.new_cache(200, 4)
    args = (model, cache, request.prompt, request.max_new_tokens)
    if request.beam_width is not None:
        *_, beams = beam_search(*args, request.beam_width)
        return beams.texts.tolist()
    sampling = Sampling(top_k=1) if request.sampling is None else request.sampling
    random = np.random.default_rng(request.seed)
    steps = sample(*args, num_samples=request.num_samples, sampling=sampling, random=random)
    texts = np.array(list(steps)).T.tolist()  # [num_samples][num_tokens]
    return [text[: text.index(request.stop) + 1] if request.stop in text else text for text in texts]


def assert_equal_alone(model, texts, requests):
    for request in requests:
        assert texts[request.id] == alone(model, request), request.id


def assert_empty(*caches):
    for cache in caches:
        assert cache.seq_ids == []
        assert cache.num_free == cache.num_blocks


def count(events, kind):
    return sum(event.kind == kind for event in events)


def speeches(model, n, seed=7):
    """Requests whose prompts begin alike, with texts of different lengths, some with several texts."""
    random = np.random.default_rng(seed)
    openings = ["ROMEO:\nGood night, good night! ", "JULIET:\nGood morrow, good my lord", "KING:\n"]
    requests = []
    for i in range(n):
        prompt = openings[i % 3] + "parting is such sweet sorrow"[: random.integers(0, 28)]
        options = {"sampling": Sampling(temperature=0.8), "seed": i}
        if i % 8 == 3:
            options |= {"num_samples": 3}
        elif i % 8 == 5:
            options = {"beam_width": 3}
        elif i % 8 == 6:
            options = {}
        elif i % 8 == 7:
            options |= {"num_samples": 2, "stop": int(model.tokenizer.encode("e")[0])}
        tokens = model.tokenizer.encode(prompt)
        requests.append(Request(f"r{i}", tokens, int(random.integers(1, 25)), **options))
    return requests


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_64_requests_through_a_pool_far_too_small(model, preemption):
    requests = speeches(model, 64)
    events = []
    cache = model.new_cache(40, 4, poison=True)
    host = model.new_cache(30, 4, poison=True) if preemption == "swap" else None
    options = {"watermark": 0.0, "token_budget": 48, "preemption": preemption, "host": host}
    engine = Engine(model, cache, observers=[events.append], **options)
    texts = engine.run(requests)
    assert_equal_alone(model, texts, requests)
    assert_empty(cache, *([host] if host else []))
    assert count(events, "preempt") >= 10
