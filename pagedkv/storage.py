"""The page arrays: where keys and values really lie. Moves bytes, decides nothing."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from .allocator import whole_number, whole_numbers, whole_numbers_below

ALIGNMENT = (
    64  # bytes. A copy to 16 bytes past where its source lies in a page of memory took ten times as long
)


def aligned_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An array of zeros that begins at a multiple of ALIGNMENT, which NumPy does not promise."""
    dtype = np.dtype(dtype)
    size = dtype.itemsize * math.prod(shape)
    try:
        memory = np.zeros(size + ALIGNMENT, np.uint8)
    except (MemoryError, ValueError):  # ValueError: more than an address can say
        raise MemoryError(f"no memory for an array of shape {shape}, {dtype}: {size:,} bytes") from None
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


class Field(NamedTuple):
    """One array that holds keys or values, or a part of them."""

    dtype: np.dtype
    shape: tuple[int, ...]  # behind (…, num_kv_heads)
    poison: float | int | None  # what marks a slot without a token; None leaves it as it is


class Format:
    """How vectors of head_dim numbers are kept: the one place that knows a storage type.

    `fields` lists the arrays for keys or for values. A type whose vectors need a scale has two; copy,
    poison, save and share loop over them. `widen` is for the fast kernel, which has no time to decode: what it
    makes of a stored number, times `factor`, is the number; scales are left to the scores and weights.
    """

    factor = 1.0

    def __init__(self, dtype: DTypeLike):
        self.dtype = np.dtype(dtype)  # of the arrays

    def fields(self, name: str, head_dim: int) -> dict[str, Field]:
        """The arrays for `name`, "keys" or "values"."""
        return {name: Field(self.dtype, (head_dim,), poison=np.nan)}

    def scales(self, name: str) -> str | None:
        """The array that holds the scales of `name`, if the type has any."""
        return None

    def encode(self, name: str, vectors: np.ndarray) -> dict[str, np.ndarray]:
        """Arrays to store for float vectors [..., head_dim]; refuses what the type cannot hold."""
        if vectors.dtype == self.dtype:
            return {name: vectors}  # put copies at once
        with np.errstate(over="ignore"):
            stored = vectors.astype(self.dtype)
        if self.dtype.itemsize < vectors.dtype.itemsize:
            _refuse_overflow(name, vectors, np.isinf(stored), str(self.dtype), np.finfo(self.dtype).max)
        return {name: stored}

    def decode(self, name: str, stored: dict[str, np.ndarray]) -> np.ndarray:
        """float32 vectors [..., head_dim] of what `encode` made."""
        return stored[name].astype(np.float32, copy=False)

    def widen(self, stored: np.ndarray, out: np.ndarray) -> None:
        """Numbers to multiply with, without their factor and scales, into float32 `out` of the same shape."""
        np.copyto(out, stored)


class Float16(Format):
    """IEEE half precision. NumPy converts it number by number; shifting its bits into place is four times faster."""

    factor = (
        2.0**112
    )  # the bits of a half, read as float32, are 2**-112 of the number: the biases differ by 112

    def widen(self, stored: np.ndarray, out: np.ndarray) -> None:
        signed, unsigned = stored.view(np.int16), stored.view(np.uint16)
        if signed.max(initial=0) < 0x7C00 and unsigned.max(initial=0) < 0xFC00:  # neither infinity nor NaN
            bits = out.view(np.int32)
            np.copyto(bits, signed)  # the sign fills the upper half
            np.left_shift(bits, 13, out=bits)
            np.bitwise_and(bits, np.int32(-0x70002000), out=bits)  # 0x8FFFE000: all but what the sign filled
        else:
            np.copyto(out, stored)
            out *= np.float32(1 / self.factor)


class BFloat16(Format):
    """The upper half of a float32, kept as uint16: NumPy has no such type."""

    LARGEST = 0x7F7F

    def __init__(self):
        super().__init__(np.uint16)

    def fields(self, name: str, head_dim: int) -> dict[str, Field]:
        return {name: Field(self.dtype, (head_dim,), poison=0x7FC0)}  # a quiet NaN

    def encode(self, name: str, vectors: np.ndarray) -> dict[str, np.ndarray]:
        bits = _sticky_float32(vectors).view(np.uint32)
        stored = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)  # to nearest, ties to even
        nan = np.isnan(vectors)
        stored[nan] = bits[nan] >> 16 | 0x40  # rounding could carry a NaN over into the sign
        end = widened_bfloat16(np.uint16(self.LARGEST))
        _refuse_overflow(name, vectors, stored & 0x7FFF == self.LARGEST + 1, "bfloat16", end)
        return {name: stored}

    def decode(self, name: str, stored: dict[str, np.ndarray]) -> np.ndarray:
        return widened_bfloat16(stored[name])

    def widen(self, stored: np.ndarray, out: np.ndarray) -> None:
        np.left_shift(stored, 16, out=out.view(np.uint32), dtype=np.uint32)


class Int8(Format):
    """Whole numbers −127 … 127 and one float32 scale per token and KV head: the largest number becomes ±127."""

    def __init__(self):
        super().__init__(np.int8)

    def fields(self, name: str, head_dim: int) -> dict[str, Field]:
        return {
            name: Field(self.dtype, (head_dim,), poison=None),
            self.scales(name): Field(np.dtype(np.float32), (), poison=np.nan),
        }

    def scales(self, name: str) -> str:
        return {"keys": "key_scales", "values": "value_scales"}[name]

    def encode(self, name: str, vectors: np.ndarray) -> dict[str, np.ndarray]:
        with np.errstate(over="ignore"):
            vectors = vectors.astype(np.float32, copy=False)
        wrong = vectors[~np.isfinite(vectors)]
        if wrong.size:
            raise ValueError(f"{name} holds {wrong[0]:g}: int8 keeps finite numbers only")
        scales = np.abs(vectors).max(axis=-1) / np.float32(127)
        by = np.where(scales > 0, scales, 1)[..., None]  # zeros stay zeros
        stored = np.clip(np.rint(vectors / by), -127, 127).astype(np.int8)
        return {name: stored, self.scales(name): scales}

    def decode(self, name: str, stored: dict[str, np.ndarray]) -> np.ndarray:
        return stored[name] * stored[self.scales(name)][..., None]


FORMATS = {
    "float32": Format(np.float32),
    "float16": Float16(np.float16),
    "bfloat16": BFloat16(),
    "int8": Int8(),
}


def widened_bfloat16(stored: np.ndarray) -> np.ndarray:
    """float32 numbers of the uint16 halves that bfloat16 is kept in."""
    return np.left_shift(stored, 16, dtype=np.uint32).view(np.float32)


def _sticky_float32(numbers: np.ndarray) -> np.ndarray:
    """As float32; what does not fit is cut off and leaves its mark in the last bit, so as not to be rounded twice."""
    with np.errstate(over="ignore"):
        near = np.array(numbers, np.float32)
    if numbers.dtype.itemsize > 4:
        bits, inexact = near.view(np.uint32), near.astype(numbers.dtype) != numbers
        inexact &= ~np.isnan(numbers)
        bits -= inexact & (np.abs(near.astype(numbers.dtype)) > np.abs(numbers))
        bits |= inexact
    return near


def _refuse_overflow(name: str, given: np.ndarray, infinite: np.ndarray, dtype: str, end: float) -> None:
    over = infinite & np.isfinite(given)
    if over.any():
        worst = np.abs(given[np.isfinite(given)]).max()
        raise ValueError(f"{name} holds {worst:g}: {dtype} ends at {end:g}")


class KVStorage:
    """Pages of keys and values, token-major (the layout that flashinfer calls NHD).

    Every array begins (num_layers, num_blocks, block_size, num_kv_heads); keys and values end (head_dim,).
    Slot s is offset s % block_size of block s // block_size. With `poison`, slots that hold no token
    hold NaN, so that a read of one is seen.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: DTypeLike = "float32",
        *,
        poison: bool = False,
        buffer=None,
    ):
        self.num_layers = whole_number("num_layers", num_layers, minimum=1)
        self.num_blocks = whole_number("num_blocks", num_blocks, minimum=1)
        self.block_size = whole_number("block_size", block_size, minimum=1)
        self.num_kv_heads = whole_number("num_kv_heads", num_kv_heads, minimum=1)
        self.head_dim = whole_number("head_dim", head_dim, minimum=1)
        self.dtype, self.format = _format(dtype)
        self.poisoned = bool(poison)
        self.fields = {
            **self.format.fields("keys", self.head_dim),
            **self.format.fields("values", self.head_dim),
        }
        self.arrays = self._arrays(buffer)
        self._by_slot = {name: self._slot_view(a) for name, a in self.arrays.items()}
        if self.poisoned:
            self.poison(np.arange(self.num_blocks))

    @property
    def nbytes(self) -> int:
        """Bytes of all pages together."""
        return sum(array.nbytes for array in self.arrays.values())

    def write(self, layer: int, slots: ArrayLike, keys: np.ndarray, values: np.ndarray) -> None:
        """Scatter new keys and values of one layer to their slots.

        Args: layer: 0 … num_layers − 1; slots: whole numbers [n]; keys, values: float [n, num_kv_heads, head_dim].
        Raises: ValueError for wrong shapes, types, slots, or numbers the dtype cannot hold; nothing is written.
        """
        layer, slots = self._layer(layer), self._slots(slots)
        self.put(layer, slots, self.encode(keys, values, (len(slots),)))

    def encode(self, keys: np.ndarray, values: np.ndarray, lead: tuple[int, ...]) -> dict[str, np.ndarray]:
        """What will be stored for keys and values, float [*lead, num_kv_heads, head_dim], or ValueError."""
        shape, stored = (*lead, self.num_kv_heads, self.head_dim), {}
        for name, given in (("keys", keys), ("values", values)):
            stored |= self.format.encode(name, _floats(name, given, shape))
        return stored

    def put(self, layer: int | slice, slots: np.ndarray, encoded: dict[str, np.ndarray]) -> None:
        """Scatter what `encode` returned, to one layer or a slice of them."""
        slots = slots.astype(np.intp, copy=False)  # NumPy is faster with indices of its own type
        where = (layer, slots) if isinstance(layer, slice) else (self._layer(layer), slots)
        for name, stored in encoded.items():
            self._by_slot[name][where] = stored

    def put_blocks(self, layer: int | slice, blocks: np.ndarray, encoded: dict[str, np.ndarray]) -> None:
        """The same for tokens that fill whole blocks in order, which are copied block by block."""
        layer = layer if isinstance(layer, slice) else self._layer(layer)
        for name, stored in encoded.items():
            pages = self.arrays[name][layer]  # [block, …], or [layers, block, …]
            if isinstance(layer, slice):
                pages[:, blocks] = stored.reshape(len(pages), len(blocks), *pages.shape[2:])
            else:
                pages[blocks] = stored.reshape(len(blocks), *pages.shape[1:])

    def read(self, layer: int, slots: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Gather keys and values of one layer from slots [n]: two float32 [n, num_kv_heads, head_dim]."""
        layer, slots = self._layer(layer), self._slots(slots)
        stored = {name: array[layer].take(slots, axis=0) for name, array in self._by_slot.items()}
        return self.format.decode("keys", stored), self.format.decode("values", stored)

    def stored(self, name: str, layer: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Pages of one layer as they are, for `name` "keys" or "values", and their scales if the dtype has any."""
        layer, scales = self._layer(layer), self.format.scales(name)
        return self.arrays[name][layer], None if scales is None else self.arrays[scales][layer]

    def copy_blocks(self, copies: ArrayLike, source: "KVStorage | None" = None) -> None:
        """Copy the filled slots of blocks, all layers.

        Args: copies: whole numbers [m, 3] (source block, destination block, filled slots), or [m, 2] for
            whole blocks; source: the storage to read from, this one if None.
        Raises: ValueError for unknown blocks or a source of another shape; nothing is copied.
        Source: section 4.4, copy-on-write.
        """
        source = self if source is None else source
        copies = self._copies(copies, source)
        for origin, destination, filled in copies.tolist():
            for name, array in self.arrays.items():
                array[:, destination, :filled] = source.arrays[name][:, origin, :filled]

    def check_source(self, source: "KVStorage", blocks: ArrayLike = ()) -> None:
        """ValueError unless pages of `source`, and these blocks of it, can be copied here."""
        if not isinstance(source, KVStorage):
            raise ValueError(f"the source of pages must be a KVStorage, got {source!r}")
        mine, theirs = (
            {n: (a.dtype, a.shape[0], *a.shape[2:]) for n, a in s.arrays.items()} for s in (self, source)
        )
        if mine != theirs:
            raise ValueError(f"pages of the source are {theirs}, expected {mine}")
        source._blocks(blocks)

    def poison(self, blocks: ArrayLike, start: int = 0) -> None:
        """Mark slots `start` … of blocks as holding no token, all layers."""
        blocks = self._blocks(blocks)
        for name, field in self.fields.items():
            if field.poison is not None:
                self.arrays[name][:, blocks, start:] = field.poison

    def page(self, block: int) -> dict[str, np.ndarray]:
        """A copy of one block: array name -> [num_layers, block_size, num_kv_heads, …]."""
        block = self._blocks([block])[0]
        return {name: array[:, block].copy() for name, array in self.arrays.items()}

    def set_page(self, block: int, page: dict[str, np.ndarray]) -> None:
        """Overwrite one block with what `page` returned. ValueError for other names, shapes or types."""
        block = self._blocks([block])[0]
        if set(page) != set(self.arrays):
            raise ValueError(f"a page has the arrays {sorted(self.arrays)}, got {sorted(page)}")
        for name, array in self.arrays.items():
            want, given = array[:, block], np.asarray(page[name])
            if given.shape != want.shape or given.dtype != want.dtype:
                raise ValueError(
                    f"{name} of a page is {want.dtype} {want.shape}, got {given.dtype} {given.shape}"
                )
        for name, array in self.arrays.items():
            array[:, block] = page[name]

    def _arrays(self, buffer) -> dict[str, np.ndarray]:
        lead = (self.num_layers, self.num_blocks, self.block_size, self.num_kv_heads)
        shapes = {name: lead + field.shape for name, field in self.fields.items()}
        if buffer is None:
            return {name: aligned_zeros(shapes[name], field.dtype) for name, field in self.fields.items()}
        sizes = {n: field.dtype.itemsize * int(np.prod(shapes[n])) for n, field in self.fields.items()}
        try:
            memory = memoryview(buffer).cast("B")
        except TypeError as error:
            raise ValueError(
                f"buffer must be contiguous memory, got {type(buffer).__name__}: {error}"
            ) from None
        need = sum(sizes.values())
        if memory.nbytes < need or memory.readonly:
            raise ValueError(f"buffer must be writable and hold {need} bytes, got {memory.nbytes}")
        offsets, offset = {}, 0
        for name in sorted(
            sizes, key=lambda name: -self.fields[name].dtype.itemsize
        ):  # wide ones first: aligned
            offsets[name] = offset
            offset += sizes[name]
        return {
            name: np.ndarray(shapes[name], field.dtype, memory, offsets[name])
            for name, field in self.fields.items()
        }

    def _slot_view(self, array: np.ndarray) -> np.ndarray:
        return array.reshape(self.num_layers, self.num_blocks * self.block_size, *array.shape[3:])

    def _layer(self, layer: int) -> int:
        if type(layer) is int and 0 <= layer < self.num_layers:  # usually, and asked for at every step
            return layer
        if whole_number("layer", layer) >= self.num_layers:
            raise ValueError(f"there is no layer {layer}: the storage has 0 … {self.num_layers - 1}")
        return int(layer)

    def _slots(self, slots: ArrayLike) -> np.ndarray:
        return whole_numbers_below("slot", slots, self.num_blocks * self.block_size)

    def _blocks(self, blocks: ArrayLike) -> np.ndarray:
        return whole_numbers_below("block", blocks, self.num_blocks)

    def _copies(self, copies: ArrayLike, source: "KVStorage") -> np.ndarray:
        copies = whole_numbers("copies", copies)
        if copies.size == 0:
            return copies.reshape(0, 3)
        if copies.ndim != 2 or copies.shape[1] not in (2, 3):
            raise ValueError(f"copies must have shape (m, 2) or (m, 3), got {copies.shape}")
        if copies.shape[1] == 2:
            copies = np.column_stack([copies, np.full(len(copies), self.block_size)])
        self.check_source(source, copies[:, 0])
        self._blocks(copies[:, 1])
        whole_numbers_below("filled slot count", copies[:, 2], self.block_size + 1)
        return copies


def _format(dtype: DTypeLike) -> tuple[str, Format]:
    try:
        name = (
            dtype if isinstance(dtype, str) else np.dtype(dtype).name
        )  # ml_dtypes.bfloat16 has its name, too
    except TypeError:
        name = repr(dtype)
    if name not in FORMATS:
        raise ValueError(f"dtype must be one of {', '.join(FORMATS)}, got {dtype!r}")
    return name, FORMATS[name]


def _floats(name: str, given: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(given)
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    return as_floats(name, array)


def as_floats(name: str, given: np.ndarray) -> np.ndarray:
    """An array of floating-point numbers, or ValueError; ml_dtypes.bfloat16 becomes float32."""
    array = np.asarray(given)
    if array.dtype.kind == "f":
        return array
    if array.dtype.name == "bfloat16":
        return widened_bfloat16(array.view(np.uint16))
    raise ValueError(f"{name} must be floating point, got {array.dtype}")
