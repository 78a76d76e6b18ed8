"""A very short training: what it writes is what the NumPy decoder reads."""

import json

import numpy as np
import pytest
from needs import need_module

from pagedkv.lm import Llama

pytestmark = pytest.mark.torch

TEXT = (
    "Good night, good night! Parting is such sweet sorrow,\nThat I shall say good night till it be morrow.\n"
    * 20
)


@pytest.fixture(scope="module")
def train():
    need_module("tqdm", "train")
    need_module("torch", "train").set_num_threads(1)  # threads only wait for each other on so little work
    from pagedkv.lm import train

    return train


@pytest.fixture(scope="module")
def trained(train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    (folder / "text.txt").write_text(TEXT, "utf-8")

    def run(name, seed):
        options = ("--steps", "30", "--every", "20", "--batch", "4", "--context", "32", "--seed", str(seed))
        train.main(["--text", str(folder / "text.txt"), "--out", str(folder / f"{name}.npz"), *options])
        return folder / f"{name}.npz"

    return [run("one", 0), run("same", 0), run("other", 1)]


def test_the_decoder_reads_what_training_writes_and_computes_the_same(train, trained):
    import torch

    model = Llama.load(trained[0])
    tokens = model.tokenizer.encode(TEXT[:32])
    network = train.Network(train.SHAPE | {"context": 32}, len(model.tokenizer))
    with np.load(trained[0]) as file:
        network.load_state_dict(
            {name: torch.from_numpy(file[name].astype(np.float32)) for name in file.files}
        )
    with torch.no_grad():
        expected = network(torch.from_numpy(tokens[None]))[0].numpy()  # [32, vocabulary]
    np.testing.assert_allclose(model.forward_full(tokens), expected, atol=1e-4)


def test_training_learns_and_says_how_much(trained):
    model = Llama.load(trained[0])
    facts = json.loads(trained[0].with_suffix(".json").read_text("utf-8"))["training"]
    assert facts["validation_loss"] < np.log(len(model.tokenizer)) - 0.3  # better than guessing
    assert (facts["steps"], facts["of_steps"], facts["seed"]) == (30, 30, 0)
    last = json.loads(trained[2].with_suffix(".json").read_text("utf-8"))["training"]
    assert f"**{last['validation_loss']}** nats" in trained[2].with_name("CARD.md").read_text("utf-8")


def test_the_seed_decides_the_weights(trained):
    one, same, other = (Llama.load(path).embedding for path in trained)
    np.testing.assert_allclose(one, same, atol=1e-3)  # to rounding: threads may add up in another order
    assert np.abs(one - other).max() > 0.01
