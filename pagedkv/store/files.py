"""Files: written whole or not at all, as .npz or .h5, and read by memory map.

Both containers hold the same bytes: the tables, all pages as records in one array, the tables again, and at the very
end a seal, the checksum of everything that is not a page. A reader needs neither zip nor HDF5: it looks for the
tables, which say where the pages begin. So one damaged byte, wherever it is, costs a page at most.
"""

import contextlib
import glob
import io
import mmap
import os
import secrets
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .record import as_bytes
from .tables import SnapshotError, Tables, find_tables

try:
    import fcntl
except ImportError:  # not on Windows: there, what a crash leaves behind is not cleaned up
    fcntl = None

SEAL = struct.Struct("<8sI")  # the last bytes of a file: a word, and the checksum of all that is not a page
SEAL_WORD = b"pkv seal"
CHUNK_BYTES = 8 << 20  # read and written at a time


class SaveFailed(OSError):
    """A snapshot could not be written; what was there before is untouched."""


# Whole or not at all


@contextlib.contextmanager
def saying_what_failed(path: Path) -> Iterator[None]:
    """What the disk refuses becomes a SaveFailed that names the file."""
    try:
        yield
    except SaveFailed:
        raise
    except OSError as error:
        reason = f"{error.strerror or error}; what was there before is untouched"
        raise SaveFailed(error.errno, reason, str(path)) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` in one step when the block ends well, even if the power fails.

    It is written under a name of its own in the same folder, flushed to the disk, and renamed; `sync_folder` then
    makes the new name last. Raises SaveFailed for what the disk refuses.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with saying_what_failed(path):
        file = open(temporary, "x+b")  # noqa: SIM115  closed before it is renamed
        try:
            with file:
                _lock(file, alone=True)
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def sync_folder(folder: Path) -> None:
    """Let the names in a folder survive a power failure."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_abandoned(folder: Path, name: str = "*") -> None:
    """Remove what interrupted writers left behind: files that nobody holds."""
    for left in folder.glob(f".{name}.*.tmp"):
        with contextlib.suppress(OSError), open(left, "rb") as file:
            if _lock(file, alone=True):
                left.unlink()


@contextlib.contextmanager
def locked(folder: Path, *, alone: bool) -> Iterator[None]:
    """Wait for other processes that use a folder. Readers may share it, and need not be able to write there."""
    lock = folder / ".lock"
    if not alone and not lock.exists():  # nobody ever wrote here
        yield
        return
    with open(lock, "ab" if alone else "rb") as file:
        _lock(file, alone=alone, wait=True)
        yield


def _lock(file: BinaryIO, *, alone: bool, wait: bool = False) -> bool:
    """Whether a file could be locked; the lock goes when it is closed, or when the process dies."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


# Writing

Fill = Callable[[np.ndarray, int], None]  # puts pages first … first + n − 1 into records [n]


def write_file(path: Path, tables: Tables, fill: Fill) -> tuple[int, int]:
    """Write a snapshot to a file, in the container that its name asks for; returns its pages and their bytes."""
    remove_abandoned(path.parent, glob.escape(path.name))
    with replacing(path) as file:
        pages_at = CONTAINERS[path.suffix](file, tables, _sealed_chunks(tables, fill))
        num_bytes = tables.num_pages * tables.layout.record.itemsize
        _seal(file, pages_at, pages_at + num_bytes)
    sync_folder(path.parent)
    return tables.num_pages, num_bytes


def filled_chunks(tables: Tables, fill: Fill) -> Iterator[np.ndarray]:
    """The pages as records, a few at a time, so that there never is a second copy of the pool in memory."""
    record = tables.layout.record
    some = np.zeros(max(1, min(tables.num_pages, CHUNK_BYTES // record.itemsize)), record)
    for first in range(0, tables.num_pages, len(some)):
        records = some[: tables.num_pages - first]
        fill(records, first)
        yield records


def _sealed_chunks(tables: Tables, fill: Fill) -> Iterator[np.ndarray]:
    first = 0
    for records in filled_chunks(tables, fill):
        tables.layout.seal(records, [tables.key(first + i) for i in range(len(records))])
        first += len(records)
        yield records


def _write_npz(file: BinaryIO, tables: Tables, chunks: Iterable[np.ndarray]) -> int:
    """Arrays `tables` and `pages`, as np.savez would store them; returns where the pages begin."""
    length = len(tables.to_bytes())
    start = _npy_start(np.dtype(np.uint8), length)
    pages_start = _npy_start(tables.layout.record, tables.num_pages)
    pages_at = 2 * ZIP_HEADER + len("tables.npypages.npy") + len(start) + length + len(pages_start)
    description = tables.to_bytes(pages_at)
    with zipfile.ZipFile(file, "w") as archive:
        with archive.open("tables.npy", "w", force_zip64=True) as member:
            member.write(start + description)
        with archive.open("pages.npy", "w", force_zip64=True) as member:
            member.write(pages_start)
            if file.tell() != pages_at:
                raise RuntimeError(f"zipfile wrote other headers than expected: {file.tell()}, {pages_at}")
            for records in chunks:
                member.write(as_bytes(records))
        with archive.open("tables_again.npy", "w", force_zip64=True) as member:
            member.write(start + description)
        archive.comment = bytes(SEAL.size)  # the last bytes of a zip file may say anything
    return pages_at


ZIP_HEADER = 30 + 20  # of each member, without its name: the fixed part, and the sizes in 64 bits


def _npy_start(kind: np.dtype, length: int) -> bytes:
    """What stands before the numbers of an array [length] in a .npy file."""
    out = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_2_0(out, description)
    return out.getvalue()


def _write_h5(file: BinaryIO, tables: Tables, chunks: Iterable[np.ndarray]) -> int:
    """Datasets `tables` and `pages`; returns where the pages begin.

    HDF5 lays out the file and leaves the pages' place empty, which is then filled as in any file. The tables stand
    also in front, in what HDF5 calls the user block.
    """
    try:
        import h5py
    except ImportError:
        raise ImportError('snapshots in HDF5 need h5py: pip install "pagedkv[hdf5]"') from None
    length = len(tables.to_bytes())
    front = max(512, 1 << (length - 1).bit_length())  # a user block has a power of two
    options = {"userblock_size": front, "libver": "latest", "driver": "fileobj"}
    with h5py.File(file, "w", **options) as archive:
        create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        create.set_layout(h5py.h5d.CONTIGUOUS)
        create.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        create.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        kind = h5py.h5t.py_create(tables.layout.record, logical=True)
        space = h5py.h5s.create_simple((tables.num_pages,))
        pages = h5py.h5d.create(archive.id, b"pages", kind, space, create)
        pages_at = pages.get_offset() if tables.num_pages else front
        archive.create_dataset("tables", data=np.frombuffer(tables.to_bytes(pages_at), np.uint8))
    file.seek(0)
    file.write(tables.to_bytes(pages_at))
    file.seek(pages_at)
    for records in chunks:
        file.write(as_bytes(records))
    file.seek(0, os.SEEK_END)
    file.write(bytes(SEAL.size))  # HDF5 does not mind what follows its own end
    return pages_at


CONTAINERS = {".npz": _write_npz, ".h5": _write_h5, ".hdf5": _write_h5}


def _seal(file: BinaryIO, pages_at: int, pages_end: int) -> None:
    """Overwrite the last bytes with the seal."""
    file.flush()
    end = file.seek(0, os.SEEK_END) - SEAL.size
    crc = 0
    for start, stop in ((0, pages_at), (pages_end, end)):
        file.seek(start)
        crc = zlib.crc32(file.read(stop - start), crc)
    file.seek(end)
    file.write(SEAL.pack(SEAL_WORD, crc))


# Reading


class SnapshotFile:
    """A snapshot in a file, mapped into memory: only what is asked for is read.

    `damages` is what is wrong beside the pages; it costs nothing.

    Args: path: a .npz or .h5 that `save` wrote, maybe damaged since.
    Raises: SnapshotError if there is none, or nothing of it can be understood.
    """

    def __init__(self, path: Path):
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise SnapshotError(f"{path} cannot be read: {error}") from error
        try:
            self.tables, self._pages_at, self.damages = find_tables(self._map)
        except SnapshotError as error:
            raise SnapshotError(f"{path} is no snapshot that can be read: {error}") from error
        self._kept_from = 0
        self._itemsize = self.tables.layout.record.itemsize
        self._check_seal()

    def read(self, number: int) -> tuple[np.ndarray | None, str | None]:
        """Page `number` as its record, a view of the file, or None and what is wrong with it."""
        at = self._pages_at + number * self._itemsize
        if at + self._itemsize > len(self._map):
            return None, "cut off"
        data = np.frombuffer(self._map, np.uint8, self._itemsize, at)
        reason = self.tables.layout.fault(data, self.tables.key(number))
        return (None, reason) if reason else (data.view(self.tables.layout.record)[0], None)

    def forget(self, number: int) -> None:
        """Page `number` is done with: now and then, what the map holds of the last pages in memory is let go."""
        end = min(len(self._map), self._pages_at + number * self._itemsize) & -mmap.PAGESIZE
        if end - self._kept_from >= CHUNK_BYTES and hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED, self._kept_from, end - self._kept_from)
        if not 0 <= end - self._kept_from < CHUNK_BYTES:
            self._kept_from = end

    def _check_seal(self) -> None:
        end = len(self._map) - SEAL.size
        pages_end = min(end, self._pages_at + self.tables.num_pages * self._itemsize)
        word, written = SEAL.unpack_from(self._map, max(0, end))
        crc = zlib.crc32(self._map[: self._pages_at])
        intact = word == SEAL_WORD and zlib.crc32(self._map[pages_end:end], crc) == written
        if not intact and not self.damages:  # a damaged copy of the tables breaks the seal too: one damage
            self.damages.append("the file between the pages")
