"""A folder of page records, each under its key; and checkpoints there that write only what is new."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from .files import Fill, filled_chunks, locked, remove_abandoned, replacing, saying_what_failed, sync_folder
from .record import FOREIGN, HEADER_BYTES, DamagedPage, Layout, Page, as_bytes, check_key
from .tables import SnapshotError, Tables, find_tables, twice

MANIFEST = "tables"  # the file with those of the last checkpoint
SUFFIX = ".page"


class PageStore:
    """Pages in a folder, one file each, named by their keys.

    A page that is missing, cut, damaged, of another layout or under a wrong name is a miss, never wrong data. A
    damaged one is removed and counted in `corrupt`, so that it can be stored anew.

    Args: folder: made if it is missing; layout: what the pages look like, and whose they are.
    """

    def __init__(self, folder: str | Path, layout: Layout):
        self.folder, self.layout = Path(folder), layout
        self.corrupt = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self.folder)

    def __contains__(self, key: bytes) -> bool:
        return self._path(key).is_file()

    def keys(self) -> list[bytes]:
        """The keys of all pages, damaged ones included."""
        found = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(ValueError):
                found.append(bytes.fromhex(path.stem))
        return found

    def put_many(self, records: Iterable[tuple[bytes, Page]]) -> int:
        """Store the pages that are not there yet; they are on the disk when this returns.

        Args: records: key (32 bytes) and page (as `KVStorage.page` returns it).
        Returns: how many were new.
        Raises: SaveFailed if the disk is full or refuses, ValueError for a key or page that does not fit.
        """
        return self.put_packed((key, self.layout.pack(key, page)) for key, page in records if key not in self)

    def put_packed(self, records: Iterable[tuple[bytes, bytes]]) -> int:
        """The same for the bytes of records, whether there are such already or not."""
        new = 0
        for key, record in records:
            with replacing(self._path(key)) as file:
                file.write(record)
            new += 1
        sync_folder(self.folder)
        return new

    def get_many(self, digests: Iterable[bytes]) -> list[Page | None]:
        """Pages by their keys; None in the place of each that cannot be had."""
        pages: list[Page | None] = []
        for key in digests:
            try:
                pages.append(self.layout.unpack(key, self.read(key)))
            except DamagedPage:
                pages.append(None)
        return pages

    def read(self, key: bytes) -> bytes:
        """The bytes of a record, or DamagedPage, which says why they cannot be had."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DamagedPage("missing" if isinstance(error, FileNotFoundError) else str(error)) from None
        reason = self.layout.fault(data, key)
        if reason is None:
            return data
        if reason != FOREIGN:
            self.corrupt += 1
            path.unlink(missing_ok=True)
        raise DamagedPage(reason)

    def delete(self, digest: bytes) -> bool:
        """Forget a page; whether it was there."""
        path = self._path(digest)
        there = path.is_file()
        path.unlink(missing_ok=True)
        return there

    def _path(self, key: bytes) -> Path:
        check_key(key)
        return self.folder / f"{key.hex()}{SUFFIX}"


def write_folder(folder: Path, tables: Tables, fill: Fill) -> tuple[int, int]:
    """Make a checkpoint: pages that the folder lacks, then the tables in one step, then old pages go.

    Pages are named by their contents, so one that did not change since the last checkpoint is there already.

    Returns: pages and bytes that were written.
    """
    with saying_what_failed(folder), contextlib.ExitStack() as stack:
        store = PageStore(folder, tables.layout)
        stack.enter_context(locked(folder, alone=True))
        digests: list[bytes] = []
        before = set(store.keys())

        def lacking() -> Iterator[tuple[bytes, bytes]]:
            for records in filled_chunks(tables, fill):
                keys = [_contents_key(tables.layout, data) for data in as_bytes(records)]
                tables.layout.seal(records, keys)
                for key, data in zip(keys, as_bytes(records), strict=True):
                    if key not in before:
                        before.add(key)
                        yield key, data.tobytes()
                digests.extend(keys)

        new = store.put_packed(lacking())
        with replacing(folder / MANIFEST) as file:
            file.write(twice(replace(tables, digests=tuple(digests)).to_bytes()))
        sync_folder(folder)
        for key in set(store.keys()) - set(digests):
            store.delete(key)
    return new, new * tables.layout.record.itemsize


def _contents_key(layout: Layout, record: np.ndarray) -> bytes:
    return hashlib.sha256(layout.digest + record[HEADER_BYTES:].tobytes()).digest()


class SnapshotFolder:
    """A checkpoint in a folder; the same face as SnapshotFile."""

    def __init__(self, folder: Path):
        try:
            self.tables, _, self.damages = find_tables((folder / MANIFEST).read_bytes())
        except (OSError, SnapshotError) as error:
            raise SnapshotError(f"{folder} is no checkpoint that can be read: {error}") from error
        self.store = PageStore(folder, self.tables.layout)

    def read(self, number: int) -> tuple[np.ndarray | None, str | None]:
        """Page `number` as its record, or None and what is wrong with it."""
        try:
            data = self.store.read(self.tables.key(number))
        except DamagedPage as error:
            return None, str(error)
        return np.frombuffer(data, self.tables.layout.record)[0], None

    def forget(self, number: int) -> None:
        """Nothing is kept in memory."""
