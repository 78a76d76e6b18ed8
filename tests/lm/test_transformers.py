"""The shipped weights are those of a LlamaForCausalLM: transformers computes the same logits from them."""

import numpy as np
import pytest
from llama_peer import config_of
from needs import need_module

from pagedkv.lm.weights import SHIPPED

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def peer(model):
    transformers, torch = need_module("transformers", "transformers"), need_module("torch", "transformers")
    config = config_of(model.config)
    network = transformers.LlamaForCausalLM(config).eval()
    with np.load(SHIPPED) as file:
        weights = {name: torch.from_numpy(file[name].astype(np.float32)) for name in file.files}
    missing, unexpected = network.load_state_dict(weights, strict=False)
    network.tie_weights()
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return network


def peer_logits(peer, tokens):
    import torch

    with torch.no_grad():
        return peer(torch.tensor(np.asarray(tokens)[None])).logits[0].numpy()  # [length, vocabulary]


@pytest.mark.parametrize("length", [1, 2, 17, 512])
def test_logits_without_cache_equal_transformers(model, peer, speech, length):
    tokens = speech[:length]
    np.testing.assert_allclose(model.forward_full(tokens), peer_logits(peer, tokens), atol=1e-4, rtol=0)


def test_logits_through_pages_equal_transformers(model, peer, speech):
    texts = [speech[:50], speech[11:28]]
    cache = model.new_cache(100, 4, poison=True)
    seqs = [cache.add(), cache.add()]
    first = model.forward(cache, seqs, [text[:-3] for text in texts])  # [47 + 14, vocabulary]
    rest = [model.forward(cache, seqs, [text[i : i + 1] for text in texts]) for i in (-3, -2)]
    expected = [peer_logits(peer, text) for text in texts]
    np.testing.assert_allclose(first, np.concatenate([e[:-3] for e in expected]), atol=1e-4, rtol=0)
    for i, got in zip((-3, -2), rest, strict=True):
        np.testing.assert_allclose(got, [e[i] for e in expected], atol=1e-4, rtol=0)
