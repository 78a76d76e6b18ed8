"""The weights file: a zip of float16 arrays (NAME.npz), described by a NAME.json beside it."""

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

SHIPPED = Path(__file__).with_name("shakespeare.npz")


@dataclass(frozen=True)
class Config:
    """The shape of a Llama decoder; the names are those that the engine uses."""

    vocabulary_size: int
    num_layers: int
    width: int
    hidden: int  # of the MLP
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    context: int  # positions that it was trained on
    norm_eps: float
    rope_theta: float


class WeightsError(ValueError):
    """A weights file is missing or damaged; the message names the file and what was expected of it."""


class Layer(NamedTuple):
    """One layer's weights; matrices stand as [out, in], so that x goes through one as x @ matrix.T.

    A step for few tokens is as fast as memory can be read. So what multiplies the same x is one matrix, and matrices
    lie in memory column after column, which BLAS reads a fifth faster.
    """

    attention_norm: np.ndarray  # [width]
    query_key_value: np.ndarray  # [(num_q_heads + 2 num_kv_heads) * head_dim, width]
    output: np.ndarray  # [width, num_q_heads * head_dim]
    mlp_norm: np.ndarray  # [width]
    gate_up: np.ndarray  # [2 hidden, width]
    down: np.ndarray  # [width, hidden]

    def named(self) -> Iterator[tuple[str, np.ndarray]]:
        """Its arrays, or the rows of them, by the names that they have in transformers' LlamaForCausalLM."""
        query = self.output.shape[1]
        both = (query + len(self.query_key_value)) // 2  # query and key
        hidden = self.down.shape[1]
        yield "input_layernorm", self.attention_norm
        yield "self_attn.q_proj", self.query_key_value[:query]
        yield "self_attn.k_proj", self.query_key_value[query:both]
        yield "self_attn.v_proj", self.query_key_value[both:]
        yield "self_attn.o_proj", self.output
        yield "post_attention_layernorm", self.mlp_norm
        yield "mlp.gate_proj", self.gate_up[:hidden]
        yield "mlp.up_proj", self.gate_up[hidden:]
        yield "mlp.down_proj", self.down


class Weights(NamedTuple):
    """All weights of a decoder, float32; the output layer is the embedding."""

    embedding: np.ndarray  # [vocabulary, width]
    layers: list[Layer]
    final_norm: np.ndarray  # [width]

    @classmethod
    def empty(cls, config: Config) -> Self:
        """Room for the weights of this shape, to be filled through `named`."""
        width, queries = config.width, config.num_q_heads * config.head_dim
        heads = (config.num_q_heads + 2 * config.num_kv_heads) * config.head_dim
        hidden = config.hidden
        shapes = [(width,), (heads, width), (width, queries), (width,), (2 * hidden, width), (width, hidden)]
        return cls(
            np.empty((config.vocabulary_size, width), np.float32),
            [
                Layer(*(np.empty(shape, np.float32, "F") for shape in shapes))
                for _ in range(config.num_layers)
            ],
            np.empty(width, np.float32),
        )

    def named(self) -> dict[str, np.ndarray]:
        """Every array of a weights file by its name, as a view: what is written to it is written to the weights."""
        layers = {
            f"model.layers.{i}.{name}.weight": array
            for i, layer in enumerate(self.layers)
            for name, array in layer.named()
        }
        return {"model.embed_tokens.weight": self.embedding, **layers, "model.norm.weight": self.final_norm}


def read_weights(path: Path) -> tuple[Config, str, Weights]:
    """Read a weights file and check everything that can be checked.

    Args: path: the .npz; a .json of the same name lies beside it.
    Returns: the shape, the vocabulary, and the weights.
    Raises: WeightsError if one of the two is missing or damaged.
    """
    config, vocabulary, checksum = _read_description(path.with_suffix(".json"))
    content = _read_bytes(path, "the model's weights")
    found = hashlib.sha256(content).hexdigest()
    if checksum is not None and found != checksum:
        raise WeightsError(f"{path} is damaged: sha256 {checksum} was expected, it has {found}")
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise WeightsError(f"{path} is damaged: a zip of arrays (.npz) was expected ({error})") from error
    return config, vocabulary, checked_weights(arrays, config, path)


def checked_weights(arrays: dict[str, np.ndarray], config: Config, path: Path) -> Weights:
    """The weights that a shape asks for; WeightsError names the first array that is not as it should be."""
    weights = Weights.empty(config)
    for name, room in weights.named().items():
        if name not in arrays:
            raise WeightsError(f"{path} lacks the array {name} {list(room.shape)}")
        array = arrays[name]
        if array.shape != room.shape or array.dtype.kind != "f":
            expected = f"floating point {list(room.shape)} was expected"
            raise WeightsError(f"{path}: {name} is {array.dtype} {list(array.shape)}, {expected}")
        if not np.isfinite(array).all():
            raise WeightsError(f"{path}: {name} has {np.sum(~np.isfinite(array))} values that are not finite")
        room[...] = array
    return weights


def _read_description(path: Path) -> tuple[Config, str, str | None]:
    try:
        description = json.loads(_read_bytes(path, "the shape and vocabulary of the weights"))
        vocabulary = description["vocabulary"]
        config = Config(vocabulary_size=len(vocabulary), **description["config"])
        if not all(isinstance(getattr(config, field.name), field.type) for field in fields(config)):
            raise ValueError(f"config {description['config']}")
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, WeightsError):
            raise
        expected = "JSON with config, vocabulary and sha256 was expected"
        raise WeightsError(f"{path} is damaged: {expected} ({type(error).__name__}: {error})") from error
    return config, vocabulary, description.get("sha256")


def _read_bytes(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise WeightsError(f"{path} with {what} cannot be read: {error.strerror}") from error
