"""The weights file: a zip of float16 arrays (NAME.npz), described by a NAME.json beside it."""

import hashlib
import io
import json
import zipfile
import zlib
from dataclasses import dataclass, fields
from pathlib import Path

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


def layer_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Arrays of one layer, named as in transformers' LlamaForCausalLM; matrices are [out, in]."""
    width, hidden = config.width, config.hidden
    query, key = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "input_layernorm": (width,),
        "self_attn.q_proj": (query, width),
        "self_attn.k_proj": (key, width),
        "self_attn.v_proj": (key, width),
        "self_attn.o_proj": (width, query),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (hidden, width),
        "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
    }


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every array in the file; the output layer is the embedding."""
    layers = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(config.num_layers)
        for name, shape in layer_shapes(config).items()
    }
    return {
        "model.embed_tokens.weight": (config.vocabulary_size, config.width),
        **layers,
        "model.norm.weight": (config.width,),
    }


def read_weights(path: Path) -> tuple[Config, str, dict[str, np.ndarray]]:
    """Read a weights file and check everything that can be checked.

    Args: path: the .npz; a .json of the same name lies beside it.
    Returns: the shape, the vocabulary, and float32 arrays by name.
    Raises: WeightsError if one of the two is missing or damaged.
    """
    config, vocabulary, checksum = _read_description(path.with_suffix(".json"))
    content = _read_bytes(path, "the model's weights")
    found = hashlib.sha256(content).hexdigest()
    if checksum is not None and found != checksum:
        raise WeightsError(f"{path} is damaged: sha256 {checksum} was expected, it has {found}")
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            weights = {name: file[name] for name in file.files}
    except (ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise WeightsError(f"{path} is damaged: a zip of arrays (.npz) was expected ({error})") from error
    return config, vocabulary, check_weights(weights, config, path)


def check_weights(weights: dict[str, np.ndarray], config: Config, path: Path) -> dict[str, np.ndarray]:
    """The arrays that a shape asks for, as float32; WeightsError names the first that is not as it should be."""
    checked = {}
    for name, shape in shapes(config).items():
        if name not in weights:
            raise WeightsError(f"{path} lacks the array {name} {list(shape)}")
        array = weights[name]
        if array.shape != shape or array.dtype.kind != "f":
            expected = f"floating point {list(shape)} was expected"
            raise WeightsError(f"{path}: {name} is {array.dtype} {list(array.shape)}, {expected}")
        if not np.isfinite(array).all():
            raise WeightsError(f"{path}: {name} has {np.sum(~np.isfinite(array))} values that are not finite")
        checked[name] = array.astype(np.float32)
    return checked


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
