"""A missing or damaged weights file is named, together with what was expected of it."""

import hashlib
import json
import zipfile

import numpy as np
import pytest

from pagedkv.lm import Llama, WeightsError
from pagedkv.lm.weights import SHIPPED


@pytest.fixture
def copy(tmp_path):
    """A copy of the shipped files, for a test to damage."""
    for suffix in (".npz", ".json"):
        (tmp_path / f"copy{suffix}").write_bytes(SHIPPED.with_suffix(suffix).read_bytes())
    return tmp_path / "copy.npz"


def rewrite(path, change):
    """Store changed arrays with a right checksum, so that only the change itself can be noticed."""
    with np.load(path) as file:
        weights = {name: file[name] for name in file.files}
    change(weights)
    np.savez(path, **weights)
    describe(path, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def describe(path, **changes):
    json_path = path.with_suffix(".json")
    json_path.write_text(json.dumps(json.loads(json_path.read_text("utf-8")) | changes), "utf-8")


def assert_refused(path, *words):
    with pytest.raises(WeightsError) as caught:
        Llama.load(path)
    for word in (path.stem, *words):
        assert word in str(caught.value)


def test_the_shipped_file_is_small_half_precision_and_knows_the_story(model):
    assert SHIPPED.stat().st_size < 2_500_000
    with np.load(SHIPPED) as file:
        assert {file[name].dtype for name in file.files} == {np.dtype(np.float16)}
    for text in ("Good night", "Good day", "Good morrow, ", "Good night, good night"):
        model.tokenizer.encode(text)
    assert model.config.context >= 256


def test_an_untouched_copy_loads(copy, model, speech):
    assert (Llama.load(str(copy)).forward_full(speech[:9]) == model.forward_full(speech[:9])).all()


@pytest.mark.parametrize("suffix", [".npz", ".json"])
def test_a_missing_file(copy, suffix):
    copy.with_suffix(suffix).unlink()
    assert_refused(copy, suffix, "No such file")


def test_one_flipped_bit(copy):
    content = bytearray(copy.read_bytes())
    content[1000] ^= 1
    copy.write_bytes(content)
    assert_refused(copy, "damaged", "sha256")


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 a zip that ends early"])
def test_something_that_is_no_zip(copy, content):
    copy.write_bytes(content)
    describe(copy, sha256=hashlib.sha256(content).hexdigest())
    assert_refused(copy, "a zip of arrays (.npz) was expected")


def test_a_zip_without_arrays(copy):
    with zipfile.ZipFile(copy, "w") as file:
        file.writestr("hello.txt", "hello")
    describe(copy, sha256=None)
    assert_refused(copy, "lacks the array model.embed_tokens.weight [65, 128]")


def test_a_single_array(copy):
    with copy.open("wb") as file:
        np.save(file, np.zeros(3))
    describe(copy, sha256=None)
    assert_refused(copy, "a zip of arrays (.npz) was expected")


def test_a_missing_array(copy):
    rewrite(copy, lambda weights: weights.pop("model.layers.2.mlp.up_proj.weight"))
    assert_refused(copy, "lacks the array model.layers.2.mlp.up_proj.weight [344, 128]")


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (np.zeros((65, 127), np.float16), "float16 [65, 127]"),
        (np.zeros((65, 128), np.int64), "int64 [65, 128]"),
        (np.zeros((65, 128), "<U1"), "<U1 [65, 128]"),
    ],
)
def test_an_array_of_another_shape_or_type(copy, array, found):
    rewrite(copy, lambda weights: weights.update({"model.embed_tokens.weight": array}))
    assert_refused(copy, f"model.embed_tokens.weight is {found}, floating point [65, 128] was expected")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(copy, value):
    rewrite(copy, lambda weights: weights["model.norm.weight"].__setitem__(slice(2), value))
    assert_refused(copy, "model.norm.weight has 2 values that are not finite")


def test_a_pickled_array_is_not_opened(copy):
    rewrite(copy, lambda weights: weights.update({"model.norm.weight": np.array([{}], object)}))
    assert_refused(copy, "a zip of arrays (.npz) was expected")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"vocabulary": "ab", "config": {"width": 1}}',
        b'{"vocabulary": 3, "config": {}}',
        b"\xff",
    ],
)
def test_a_description_that_is_none(copy, content):
    copy.with_suffix(".json").write_bytes(content)
    assert_refused(copy, ".json", "JSON with config, vocabulary and sha256 was expected")


def test_a_description_with_a_shape_of_another_type(copy):
    config = json.loads(copy.with_suffix(".json").read_text("utf-8"))["config"]
    describe(copy, config=config | {"num_layers": "4"})
    assert_refused(copy, ".json", "was expected")
