"""GGUF, the file format of llama.cpp: named facts, then tensors in few bits a number, all in one file.

Only what SmolLM2's file needs. The package `gguf` reads everything, but takes five seconds to walk through a
vocabulary and three to widen these weights; here it is what the tests compare with.
"""

import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .weights import WeightsError

VERSION = 3
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TYPES = (  # by number
    "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S "
    "IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16"
)
PIECE = 1 << 13  # blocks that are widened at once: what they become stays in the processor's cache


class Layout(NamedTuple):
    """How a type keeps numbers: blocks of so many, each a record."""

    count: int  # numbers in a block
    record: np.dtype
    widen: Callable[[np.ndarray, np.ndarray], None]  # records [n] into float32 [n, count]


def _f32(records: np.ndarray, out: np.ndarray) -> None:
    out[:, 0] = records["number"]


def _q8_0(records: np.ndarray, out: np.ndarray) -> None:
    np.multiply(records["number"], records["scale"].astype(np.float32)[:, None], out=out)


def _q4_1(records: np.ndarray, out: np.ndarray) -> None:
    np.bitwise_and(records["pair"], 15, out=out[:, :16])  # the lower halves are the first 16 numbers
    np.right_shift(records["pair"], 4, out=out[:, 16:])
    out *= records["scale"].astype(np.float32)[:, None]
    out += records["least"].astype(np.float32)[:, None]


LAYOUTS = {
    "F32": Layout(1, np.dtype([("number", "<f4")]), _f32),
    "Q8_0": Layout(32, np.dtype([("scale", "<f2"), ("number", "i1", 32)]), _q8_0),
    "Q4_1": Layout(32, np.dtype([("scale", "<f2"), ("least", "<f2"), ("pair", "u1", 16)]), _q4_1),
}


class Tensor(NamedTuple):
    """Where a tensor lies in the file, and as what."""

    type: str
    shape: tuple[int, ...]
    offset: int  # bytes from the beginning of the file
    num_records: int


class GGUF:
    """A GGUF file, mapped into memory: its `facts` and `tensors` by name.

    Args: path: of the file.
    Raises: WeightsError if it cannot be read, is damaged, or has a tensor of a type that is not in LAYOUTS.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self.bytes = np.memmap(self.path, np.uint8, mode="r")  # [size of the file]
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise WeightsError(f"{path} cannot be read: {error}") from error
        self._view, self._at = memoryview(self.bytes), 0
        if self._bytes(4) != b"GGUF":
            raise self._damaged("it does not begin with GGUF")
        if (version := self._scalar("I")) != VERSION:
            raise WeightsError(
                f"{path} is GGUF version {version}; version {VERSION} is what can be read here"
            )
        num_tensors, num_facts = self._scalar("Q"), self._scalar("Q")
        self.facts: dict[str, Any] = {}
        for _ in range(num_facts):
            name = self._string()
            self.facts[name] = self._value(self._scalar("I"))
        headers = [self._header() for _ in range(num_tensors)]
        alignment = self.fact("general.alignment", int, 32)
        if not 8 <= alignment <= 1 << 20 or alignment % 8:
            raise self._damaged(f"general.alignment is {alignment}")
        start = -(-self._at // alignment) * alignment
        self.tensors = {name: self._tensor(name, *header, start) for name, *header in headers}
        if len(self.tensors) < num_tensors:
            raise self._damaged("two tensors have one name")

    def fact(self, name: str, kind: type, default: Any = None) -> Any:
        """A fact of this kind; WeightsError if it is another, or absent and there is no default."""
        value = self.facts.get(name, default)
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

    def read(self, name: str, out: np.ndarray) -> None:
        """Widen a tensor into contiguous float32 `out` of its shape.

        Raises: as `tensor`, and WeightsError for numbers that are not finite.
        """
        tensor = self.tensor(name, out.shape)
        count, record, widen = LAYOUTS[tensor.type]
        end = tensor.offset + tensor.num_records * record.itemsize
        records = np.ndarray.view(self.bytes[tensor.offset : end], record)  # [num_records]
        for field in record.names:
            if record[field].kind == "f" and not np.isfinite(records[field]).all():
                raise WeightsError(f"{self.path} is damaged: {name} has numbers that are not finite")
        rows = out.reshape(-1, count)  # [num_records, count]
        for i in range(0, len(rows), PIECE):
            widen(records[i : i + PIECE], rows[i : i + PIECE])

    # The header, from its beginning

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._view):
            raise self._damaged(f"it ends at byte {len(self.bytes)}, within its header")
        taken = bytes(self._view[self._at : end])
        self._at = end
        return taken

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._bytes(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        try:
            return self._bytes(self._scalar("Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged(f"text before byte {self._at} is not UTF-8") from error

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            if kind not in SCALARS:
                raise self._damaged(f"there is no value of type {kind} (byte {self._at})")
            return self._scalar(SCALARS[kind])
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == STRING:
            return [self._string() for _ in range(count)]
        if kind not in SCALARS:
            raise self._damaged(f"there are no arrays of type {kind} (byte {self._at})")
        numbers = np.dtype("<" + SCALARS[kind])
        return np.frombuffer(self._bytes(count * numbers.itemsize), numbers).tolist()

    def _header(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset of a tensor."""
        name, num_dimensions = self._string(), self._scalar("I")
        if num_dimensions > 4:
            raise self._damaged(f"{name} has {num_dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))[::-1]  # the file begins with the last
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, offset: int, start: int) -> Tensor:
        kind = dict(enumerate(TYPES.split())).get(number, f"number {number}")
        if kind not in LAYOUTS:
            known = ", ".join(LAYOUTS)
            raise WeightsError(f"{self.path}: {name} is of type {kind}; what can be read here is {known}")
        layout, size = LAYOUTS[kind], prod(shape)
        end = start + offset + size // layout.count * layout.record.itemsize
        if not shape or shape[-1] % layout.count:
            raise self._damaged(f"{name} {list(shape)} cannot be {kind}, blocks of {layout.count}")
        if end > len(self._view):
            raise self._damaged(f"{name} would end at byte {end}, the file ends at {len(self.bytes)}")
        return Tensor(kind, shape, start + offset, size // layout.count)

    def _damaged(self, how: str) -> WeightsError:
        return WeightsError(f"{self.path} is damaged: {how}")
