"""One page as bytes that can be checked: the record that snapshots, folders and remote stores all keep."""

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np

from ..storage import KVStorage

FORMAT = b"PKV1"  # the first bytes of every record: change it when records change
KEY_BYTES = 32  # a digest, or whatever else names a page
HEADER_BYTES = 48  # in front of the page: format, checksum, layout, key
FOREIGN = "a page of another model, layout or format"

Page = dict[str, np.ndarray]  # array name -> [num_layers, block_size, num_kv_heads, …]


class DamagedPage(ValueError):
    """A record is not the page that was asked for; the message says why."""


@dataclass(frozen=True)
class Layout:
    """What pages look like and whose they are; pages of another layout are never taken for one's own.

    Args: model: what computed the keys and values, in any words that tell it from others; dtype … head_dim: as in
        KVStorage; arrays: name, type and shape of each part of a page.
    """

    model: str
    dtype: str
    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    arrays: tuple[tuple[str, str, tuple[int, ...]], ...]
    order: str = "NHD"  # token-major: [block_size, num_kv_heads, head_dim] within a layer

    @classmethod
    def of(cls, storage: KVStorage, model: str = "") -> "Layout":
        """The layout of a storage's pages."""
        s = storage
        arrays = tuple(
            (name, array.dtype.newbyteorder("<").str, (s.num_layers, *array.shape[2:]))
            for name, array in s.arrays.items()
        )
        return cls(model, s.dtype, s.num_layers, s.block_size, s.num_kv_heads, s.head_dim, arrays)

    @classmethod
    def from_json(cls, fields: dict) -> "Layout":
        arrays = tuple((name, kind, tuple(shape)) for name, kind, shape in fields["arrays"])
        return cls(**(fields | {"arrays": arrays}))

    def to_json(self) -> dict:
        return asdict(self)

    @cached_property
    def digest(self) -> bytes:
        """Eight bytes that stand for the layout in every record."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).digest()[:8]

    @cached_property
    def record(self) -> np.dtype:
        """A record as NumPy sees it: a header of four fields, then the arrays of the page, end to end."""
        header = [("format", "V4"), ("crc32", "<u4"), ("layout", "V8"), ("key", f"V{KEY_BYTES}")]
        return np.dtype(header + [(name, kind, shape) for name, kind, shape in self.arrays])

    # Many pages at once: records [n] of type `record`

    def seal(self, records: np.ndarray, keys: Sequence[bytes]) -> None:
        """Name the pages that stand in records, and put the checksums on."""
        records["format"], records["layout"] = np.void(FORMAT), np.void(self.digest)
        records["key"] = [np.void(key) for key in keys]
        for i, data in enumerate(as_bytes(records)):
            records["crc32"][i] = _checksum(data)

    def fault(self, record: bytes | np.ndarray, key: bytes) -> str | None:
        """Why the bytes of a record are not those of the page called `key`; None if they are."""
        data = memoryview(record)
        if len(data) < HEADER_BYTES:
            return f"{len(data)} bytes instead of {self.record.itemsize}"
        found, written = _checksum(data), int.from_bytes(data[4:8], "little")
        if found != written:
            return f"checksum {written:08x}, contents {found:08x}"
        if data[:4] != FORMAT or data[8:16] != self.digest or len(data) != self.record.itemsize:
            return FOREIGN
        if data[16:HEADER_BYTES] != key:
            return f"another page, {bytes(data[16:HEADER_BYTES]).hex()[:16]}…"
        return None

    # One page

    def pack(self, key: bytes, page: Page) -> bytes:
        """A page as the bytes of its record.

        Args: key: 32 bytes; page: as `KVStorage.page` returns it.
        Raises: ValueError for another key or other arrays.
        """
        check_key(key)
        records = np.zeros(1, self.record)
        if set(page) != {name for name, _, _ in self.arrays}:
            raise ValueError(f"a page has the arrays {[a[0] for a in self.arrays]}, got {sorted(page)}")
        for name, kind, shape in self.arrays:
            array = np.asarray(page[name])
            if array.shape != shape or array.dtype != np.dtype(kind):
                raise ValueError(
                    f"{name} of a page is {np.dtype(kind)} {shape}, got {array.dtype} {array.shape}"
                )
            records[name][0] = array
        self.seal(records, [key])
        return records.tobytes()

    def unpack(self, key: bytes, data: bytes) -> Page:
        """The page in the bytes of a record. Raises DamagedPage if they are not the page called `key`."""
        reason = self.fault(data, key)
        if reason is not None:
            raise DamagedPage(f"page {key.hex()}: {reason}")
        (record,) = np.frombuffer(data, self.record)
        return {name: record[name].astype(np.dtype(kind).newbyteorder("=")) for name, kind, _ in self.arrays}


def _checksum(record: bytes | np.ndarray) -> int:
    """CRC32 of a record, but for the four bytes where it stands itself."""
    return zlib.crc32(record[8:], zlib.crc32(record[:4]))


def as_bytes(records: np.ndarray) -> np.ndarray:
    """Records [n] as uint8 [n, record.itemsize], without a copy."""
    return records.view(np.uint8).reshape(len(records), records.dtype.itemsize)


def check_key(key: bytes) -> None:
    """ValueError unless `key` can name a page."""
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise ValueError(f"a page is named by {KEY_BYTES} bytes, got {key!r}")
