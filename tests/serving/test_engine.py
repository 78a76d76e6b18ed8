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
        requests.append(Request(f"r{i}", tokens, int(random.integers(1, 15)), **options))
    return requests


@pytest.fixture(scope="module")
def sixty_four(model):
    """64 requests, and the texts that each gets alone."""
    requests = speeches(model, 64)
    return requests, {request.id: alone(model, request) for request in requests}


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_64_requests_through_a_pool_far_too_small(model, sixty_four, preemption, prefix_cache):
    requests, expected = sixty_four
    events = []
    cache = model.new_cache(34, 4, poison=True, prefix_cache=prefix_cache)
    host = model.new_cache(30, 4, poison=True) if preemption == "swap" else None
    options = {"watermark": 0.0, "token_budget": 48, "preemption": preemption, "host": host}
    engine = Engine(model, cache, observers=[events.append], **options)
    assert engine.run(requests) == expected
    assert_empty(cache, *([host] if host else []))
    swapped = [event.counts["swapped"] for event in events if event.kind == "preempt"]
    assert len(swapped) >= 10
    assert (sum(swapped) > 0) == (preemption == "swap")
    assert (sum(group_hits(events)) > 0) == prefix_cache


def group_hits(events):
    return [event.counts.get("hit", 0) for event in events if event.kind == "admit"]


def test_the_engine_refuses_what_the_model_cannot_compute(model):
    engine = Engine(model, model.new_cache(100, 16))
    vocabulary = model.config.vocabulary_size
    for request, message in [
        (Request("a", num_tokens=4), "'a' has no tokens"),
        (Request("a", [vocabulary]), f"there is no token {vocabulary}"),
        (Request("a", [-1]), "there is no token -1"),
        (Request("a", [1], model.config.context), "exceed the model's context"),
        (Request("a", [1], beam_width=vocabulary + 1), "beams cannot start"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.add(request)
    assert engine.scheduler.unfinished == 0
    assert engine.run() == {}


def test_an_interrupted_step_is_computed_again(model, monkeypatch):
    request = Request("a", model.tokenizer.encode("Good night"), 6)
    cache = model.new_cache(20, 4, poison=True)
    engine = Engine(model, cache)
    engine.add(request)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(model, "decode", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert engine.run() == {"a": alone(model, request)}
    assert_empty(cache)


def test_aborted_requests_leave_the_others_as_they_were(model, sixty_four):
    requests, expected = sixty_four
    cache = model.new_cache(40, 4, poison=True, prefix_cache=True)
    engine = Engine(model, cache, watermark=0.0, token_budget=48)
    groups = [engine.add(request) for request in requests[:24]]
    texts = {}
    for step in range(1000):
        texts |= {group.request.id: list(group.texts.values()) for group in engine.step()}
        alive = [group for group in groups if group.place != "done"]
        if step % 5 == 0 and alive:
            engine.abort(alive[step // 5 % len(alive)].request.id)
        if not engine.scheduler.unfinished:
            break
    assert 3 <= len(texts) < 24
    assert texts == {name: expected[name] for name in texts}
    assert_empty(cache)
