"""GGUF, the file format of llama.cpp: named facts, then tensors in few bits a number, all in one file.

The package `gguf` (extra model) reads and widens it. Here are the questions of the loader, and its errors.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .weights import WeightsError

TYPES = ("F32", "Q8_0", "Q4_1")  # of tensors, as SmolLM2's file has them; no other was tried


class Tensor(NamedTuple):
    """A tensor of the file: its type's name, its shape, and the bytes as the package `gguf` takes them."""

    type: str
    shape: tuple[int, ...]
    data: np.ndarray


class GGUF:
    """A GGUF file, mapped into memory: its `facts` and `tensors` by name.

    Args: path: of the file.
    Raises: WeightsError if it cannot be read, is damaged, or has a tensor of a type that is not in TYPES;
        ImportError without the package gguf.
    """

    def __init__(self, path: str | Path):
        self._gguf, self.path = _package(), Path(path)
        try:
            reader = self._gguf.GGUFReader(self.path)
            self.facts: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        except OSError as error:
            raise WeightsError(f"{path} cannot be read: {error}") from error
        except Exception as error:  # whatever its reader stumbles over
            raise WeightsError(
                f"{path} is damaged, or no GGUF file: {error or type(error).__name__}"
            ) from error
        self.tensors = {
            tensor.name: Tensor(tensor.tensor_type.name, tuple(tensor.shape[::-1].tolist()), tensor.data)
            for tensor in reader.tensors  # the file begins a shape with the last axis
        }
        for name, tensor in self.tensors.items():
            if tensor.type not in TYPES:
                known = ", ".join(TYPES)
                raise WeightsError(
                    f"{path}: {name} is of type {tensor.type}; what can be read here is {known}"
                )

    def fact(self, name: str, kind: type) -> Any:
        """A fact of this kind; WeightsError if it is another, or absent."""
        value = self.facts.get(name)
        if type(value) is not kind:
            found = "is not in it" if value is None else f"is {str(value)[:40]!r}"
            raise WeightsError(f"{self.path}: {name} {found}; {kind.__name__} was expected")
        return value

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of this name; WeightsError if there is none, or one of another shape."""
        if name not in self.tensors:
            raise WeightsError(f"{self.path} lacks the tensor {name} {list(shape)}")
        tensor = self.tensors[name]
        if tensor.shape != shape:
            found = f"{name} is {tensor.type} {list(tensor.shape)}"
            raise WeightsError(f"{self.path}: {found}, {list(shape)} was expected")
        return tensor

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A tensor as float32 of this shape.

        Raises: as `tensor`, and WeightsError for numbers that are not finite.
        """
        tensor = self.tensor(name, shape)
        kind = self._gguf.GGMLQuantizationType[tensor.type]
        numbers = self._gguf.quants.dequantize(tensor.data, kind).reshape(shape)
        if not np.isfinite(numbers).all():
            raise WeightsError(f"{self.path} is damaged: {name} has numbers that are not finite")
        return numbers


def _package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ImportError('GGUF files need the package gguf: pip install "pagedkv[model]"') from error
    return gguf
