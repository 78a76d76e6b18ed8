"""The model over contiguous caches is the same model, and its time is fully accounted for."""

import numpy as np
import pytest

from pagedkv.bench import model
from pagedkv.lm import Llama


@pytest.mark.parametrize(("batch", "mix"), [(1, "uniform"), (3, "spread"), (9, "skewed")])
def test_all_caches_give_the_same_logits_and_shares_add_up(batch, mix):
    found = model.compare_caches(batch, mix, steps=3, rounds=1)
    assert (found["batch"], found["mix"]) == (batch, mix)
    assert found["difference"] < 1e-4
    for name in ("paged", *model.CACHES):
        way = found[name]
        assert way["paged"] > 0
        assert way["tokens_per_second"] > 0
        assert way["attention"] + way["bookkeeping"] + way["network"] == pytest.approx(1)
        assert min(way["attention"], way["bookkeeping"], way["network"]) > 0


@pytest.mark.parametrize("broken", model.CACHES.values())
def test_a_contiguous_cache_that_forgets_a_token_is_noticed(monkeypatch, broken):
    write = broken.write

    def forgetful(self, layer, reservation, keys, values):
        write(self, layer, reservation, keys * (layer > 0), values)

    monkeypatch.setattr(broken, "write", forgetful)
    assert model.compare_caches(2, steps=2, rounds=1)["difference"] > 1e-3


def test_the_first_steps_of_a_turn_do_not_count():
    llama = Llama.load()
    cache = llama.new_cache(8, 16)
    ids = [cache.add()]
    first = llama.next_logits(cache, ids, [[1, 2, 3]]).argmax(axis=-1)
    way = model.Decoder(llama, cache, ids)
    logits = way.turn(np.array([first] * 5))
    assert logits.shape == (5, 1, llama.config.vocabulary_size)
    assert len(way.times) == 5 - model.WARM
    assert sum(way.spent.values()) < sum(way.times)
    way.turn(np.array([first]))
    assert len(way.times) == 5 - model.WARM + 1, "a turn that is shorter counts once"
    way.restart(forget=True)
    assert (cache.length(ids[0]), way.times, set(way.spent.values())) == (3, [], {0.0})


def test_steps_can_be_done_again_from_the_prompts():
    llama = Llama.load()
    cache = llama.new_cache(8, 16)
    ids = [cache.add(), cache.add()]
    first = llama.next_logits(cache, ids, [[1, 2, 3], [4]]).argmax(axis=-1)
    for some in (cache, *(made(llama, cache, ids) for made in model.CACHES.values())):
        way = model.Decoder(llama, some, ids)
        once = way.step(first)
        way.step(first)
        way.restart()
        assert (way.step(first) == once).all()
        way.restart()
