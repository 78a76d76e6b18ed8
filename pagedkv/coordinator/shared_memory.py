"""Pages in shared memory: all processes of a machine see the same bytes, so handing a sequence over copies nothing.

A segment is found by the name of its pool. Everybody who has it open holds a lock on it, which the kernel drops with
the process, however it ends: so the last one to close removes it, and what kill -9 left behind can be told from what
is in use.
"""

import contextlib
import hashlib
import json
import os
import secrets
import struct
import sys
import threading
import time
import weakref
from multiprocessing import shared_memory
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ..allocator import whole_number
from ..storage import KVStorage

try:
    import fcntl
except ImportError:  # Windows: memory goes with its last user anyway
    fcntl = None

MAGIC = b"\x89pagedkv-pages\n\x01"  # written last: a segment without it is not ready; the last byte is the version
HEAD = struct.Struct("<16sQ")  # magic, length of the JSON behind it
PAGE = 4096  # bytes of a page of memory: the digests begin at the second, the pages of the pool behind them
DIGEST_BYTES = 32
PREFIX = "pagedkv-"
FOLDER = Path("/dev/shm")  # where Linux shows shared memory as files
PATIENCE = 10.0  # seconds to wait for somebody who is making or removing the segment


class SharedStorage(KVStorage):
    """The pages of one pool in shared memory: the first process makes them, the others find them by the pool's name.

    Beside each page stands the digest of the text that it holds *on this machine*, or zeros: what a manager in Redis
    says of a block may be true on another machine, or before a restart. Every change of a page wipes its digest
    first, `remember` sets it when the page is full and final: no crash leaves a false one.

    `identity` is equal in two processes exactly if they see the same bytes.

    Args: pool: names the segment, any words; the others: as in KVStorage, the same in every process.
    Raises: ValueError if the segment is in use with another shape or dtype; OSError if there is not enough
        shared memory; TimeoutError if another process does not finish making it.
    """

    def __init__(
        self,
        pool: str,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: DTypeLike = "float32",
    ):
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        whole_number("num_blocks", num_blocks, minimum=1)
        plan = KVStorage(
            num_layers, 1, block_size, num_kv_heads, head_dim, dtype
        )  # of one block; it checks, too
        facts = {"pool": str(pool)[:200], "shape": [int(n) for n in shape], "dtype": plan.dtype}
        first = -(-(PAGE + num_blocks * DIGEST_BYTES) // PAGE) * PAGE  # where the pages begin
        segment, self.created = _open(segment_name(pool), first + plan.nbytes * num_blocks, facts)
        self.pool, self.name, self.identity = str(pool), segment.name, segment.facts()["identity"]
        super().__init__(*shape, plan.dtype, buffer=segment.buf[first:])
        self.digests = np.ndarray((num_blocks, DIGEST_BYTES), np.uint8, segment.buf, PAGE)  # [num_blocks, 32]
        self._leave = weakref.finalize(self, _leave, segment, os.getpid())  # when the process ends, at last

    # What the pages hold on this machine

    def holds(self, blocks: ArrayLike, digests: list[bytes]) -> np.ndarray:
        """Whether each block's page is that of a digest: bool [n]."""
        return (self.digests[self._blocks(blocks)] == _rows(digests)).all(axis=1)

    def remember(self, blocks: ArrayLike, digests: list[bytes]) -> None:
        """Say that pages are complete and final, and whose they are."""
        self.digests[self._blocks(blocks)] = _rows(digests)

    def forget(self, blocks: ArrayLike) -> None:
        """Say that pages are about to change; for those who write to `arrays` themselves."""
        self.digests[self._blocks(blocks)] = 0

    def put(self, layer: int | slice, slots: np.ndarray, encoded: dict[str, np.ndarray]) -> None:
        self.digests[np.asarray(slots) // self.block_size] = 0
        super().put(layer, slots, encoded)

    def copy_blocks(self, copies: ArrayLike, source: KVStorage | None = None) -> None:
        self.digests[self._copies(copies, self if source is None else source)[:, 1]] = 0
        super().copy_blocks(copies, source)

    def set_page(self, block: int, page: dict[str, np.ndarray]) -> None:
        self.forget([block])
        super().set_page(block, page)

    # The end

    def close(self, unlink: bool = False) -> None:
        """Leave the segment. The last one removes it; with `unlink` it loses its name at once, for all.

        Those who still have it open keep it. The storage cannot be used any more.
        """
        self.arrays, self._by_slot, self.digests = {}, {}, None
        leave = self._leave.detach()
        if leave is not None:
            _leave(*leave[2], unlink=unlink)

    def __enter__(self) -> "SharedStorage":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _rows(digests: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)  # [n, 32]


def _leave(segment: "Segment", process: int, unlink: bool = False) -> None:
    own = os.getpid() == process  # a forked child shares the lock, and must not take it
    alone = own and segment.lock(alone=True)
    if (unlink or alone) and segment.has_name():
        with contextlib.suppress(FileNotFoundError):
            segment.unlink()
    segment.close()


def segment_name(pool: str) -> str:
    """The name of a pool's segment: short enough for every system, the same in every process."""
    return PREFIX + hashlib.sha256(str(pool).encode("utf-8", "surrogatepass")).hexdigest()[:16]


class Found(NamedTuple):
    """A segment on this machine."""

    name: str
    pool: str | None  # None: it was never finished
    num_bytes: int
    in_use: bool


def segments() -> list[Found]:
    """The segments of this user on this machine. Only Linux can list them; elsewhere there are none to see."""
    found = []
    for path in sorted(FOLDER.glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError), path.open("rb") as file:  # another user's, or just gone
            facts = _facts(file.read(PAGE))
            num_bytes, in_use = os.fstat(file.fileno()).st_size, not _lock(file.fileno(), alone=True)
            found.append(Found(path.name, facts and facts["pool"], num_bytes, in_use))
    return found


def remove_leftovers() -> list[Found]:
    """Remove the segments that no process has open, as after kill -9; returns them."""
    removed = []
    for found in segments():
        with contextlib.suppress(OSError), (FOLDER / found.name).open("rb") as file:
            if not found.in_use and _lock(file.fileno(), alone=True):  # nobody opened it meanwhile
                (FOLDER / found.name).unlink()
                removed.append(found)
    return removed


class Segment(shared_memory.SharedMemory):
    """Shared memory that stays when a process ends, and that knows whether others have it open.

    Before Python 3.13 every process that opens a segment has it registered with its resource tracker, which removes
    it when that process ends, under the feet of all others (cpython issue 82300). This one is never registered.
    """

    def __init__(self, name: str, size: int = 0):
        options = {"name": name, "create": size > 0, "size": size}
        if sys.version_info >= (3, 13):
            super().__init__(**options, track=False)
        else:
            with _untracked():
                super().__init__(**options)
        if size and hasattr(os, "posix_fallocate"):  # claim it now: memory that is not there kills who writes
            try:
                os.posix_fallocate(self._fd, 0, size)
            except OSError as error:
                self.unlink()
                self.close()
                raise OSError(
                    error.errno, f"no room for {size} bytes of shared memory: {error.strerror}"
                ) from None

    def unlink(self) -> None:
        if sys.version_info >= (3, 13):
            super().unlink()
        else:
            with _untracked():
                super().unlink()

    def close(self) -> None:
        self._mmap = (
            None  # not closed but dropped: it goes with the last array in it, and they do not hold it open
        )
        super().close()

    def lock(self, *, alone: bool) -> bool | None:
        """Say that the segment is in use, or, `alone`, learn that nobody else uses it; None: cannot be told here."""
        return _lock(self._fd, alone)

    def facts(self) -> dict | None:
        """What it says of itself; None if it is not finished."""
        return _facts(bytes(self.buf[:PAGE]))

    def has_name(self) -> bool:
        """Whether the name still leads here, and not to a segment that was made after this one was removed."""
        path = FOLDER / self.name
        if fcntl is None or not FOLDER.is_dir():
            return True
        try:
            return os.path.samestat(path.stat(), os.fstat(self._fd))
        except OSError:
            return False


class _NoTracker:
    """Stands in for multiprocessing's resource tracker."""

    @staticmethod
    def register(name: str, kind: str) -> None: ...

    unregister = register


_TRACKER = threading.Lock()


@contextlib.contextmanager
def _untracked():
    """No registration while a segment is opened. Registering and taking it back would not do: the process can be
    killed in between, and processes that share a tracker take back each other's."""
    with _TRACKER:
        tracker, shared_memory.resource_tracker = shared_memory.resource_tracker, _NoTracker
        try:
            yield
        finally:
            shared_memory.resource_tracker = tracker


def _lock(descriptor: int, alone: bool) -> bool | None:
    """Share a lock, or have it alone, if that can be had at once; None where there are no such locks (macOS)."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _facts(start: bytes) -> dict | None:
    """What a segment says of itself; None if it is not finished."""
    magic, length = HEAD.unpack_from(start.ljust(HEAD.size, b"\0"))
    return json.loads(bytes(start[HEAD.size : HEAD.size + length])) if magic == MAGIC else None


def _open(name: str, size: int, facts: dict) -> tuple[Segment, bool]:
    """The segment, ready and in use by us, and whether it was made just now."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        segment, new = _open_or_make(name, size)
        if segment is not None:
            try:
                made = _enter(segment, new, size, facts)
            except BaseException:
                segment.close()
                raise
            if made is not None and segment.has_name():
                return segment, made
            segment.close()
        time.sleep(0.005)
    raise TimeoutError(
        f"shared memory {name} was not ready after {PATIENCE:g} s: whoever makes it has stopped"
    )


def _open_or_make(name: str, size: int) -> tuple[Segment | None, bool]:
    try:
        return Segment(name, size), True
    except FileExistsError:
        pass
    try:
        return Segment(name), False
    except FileNotFoundError:  # removed since
        pass
    except ValueError:  # empty: whoever makes it has got no further, or was killed there
        remove_leftovers()
    return None, False


def _enter(segment: Segment, new: bool, size: int, facts: dict) -> bool | None:
    """Join those who use a segment: False. Make it, if it is new or was never finished: True. Try again: None."""
    if segment.lock(alone=False) is False:
        return None  # somebody is making it
    found = segment.facts()
    if found is not None and facts.items() <= found.items():
        return False
    alone = segment.lock(alone=True)
    if found is not None:
        if alone is not True:
            raise ValueError(f"shared memory {segment.name} is in use with {found}, not {facts}")
        segment.unlink()  # nobody uses it, and it is of another shape
        return None
    if alone is False or (alone is None and not new) or segment.size < size:
        return None
    head = json.dumps(facts | {"identity": secrets.token_hex(8)}).encode()
    segment.buf[16 : HEAD.size + len(head)] = HEAD.pack(MAGIC, len(head))[16:] + head
    segment.buf[:16] = MAGIC
    return True if segment.lock(alone=False) is not False else None
