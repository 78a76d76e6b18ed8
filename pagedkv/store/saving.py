"""Save sequences and their pages; and what saving, loading and recovering have in common."""

import contextlib
import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from ..allocator import whole_numbers
from ..block_table import NOTHING, SeqId
from ..cache import PagedKVCache
from ..snapshot import Snapshot
from ..storage import KVStorage
from .files import CONTAINERS, write_file
from .folder import write_folder
from .record import Layout
from .tables import SnapshotError, Tables, part

Progress = bool | Callable[[int, int], None]  # True: a bar; or told (pages done, pages in all)
STEM_BYTES = (
    24  # of a page's key, the same for all pages of one snapshot and for no other; its number follows
)


@dataclass(frozen=True)
class Loss:
    """What one sequence lost: its tokens from `kept` on, for `page` was the first of its pages that is damaged."""

    seq_id: SeqId
    saved: int
    kept: int
    page: int
    reason: str

    def __str__(self) -> str:
        return f"{self.seq_id!r} keeps {self.kept} of {self.saved} tokens (page {self.page}: {self.reason})"


@dataclass(frozen=True)
class Report:
    """What a save, load or recovery did.

    Args: cache: that holds the sequences; seq_ids: them; num_pages: each once, however many sequences share it;
        written: pages that had to be written; num_bytes: read or written; damaged: page -> what is wrong with it;
        losses: the sequences that came back shorter; recomputed: pages that the model computed again; elsewhere:
        damage beside the pages, which costs nothing; tokens: of each sequence, as far as anybody said them.
    """

    cache: PagedKVCache
    seq_ids: tuple[SeqId, ...]
    num_pages: int
    num_bytes: int
    written: int = 0
    damaged: dict[int, str] = field(default_factory=dict)
    losses: tuple[Loss, ...] = ()
    recomputed: tuple[int, ...] = ()
    elsewhere: tuple[str, ...] = ()
    tokens: dict[SeqId, list[int]] = field(default_factory=dict)

    @property
    def num_damages(self) -> int:
        """All damage that was found, in pages or not."""
        return len(self.damaged) + len(self.elsewhere)

    def __str__(self) -> str:
        lines = [f"{len(self.seq_ids)} sequences on {self.num_pages} pages, {self.num_damages} damaged"]
        lines += [f"harmless: {what}" for what in self.elsewhere]
        lines += [f"page {page} computed again ({self.damaged[page]})" for page in self.recomputed]
        return "\n".join(lines + [str(loss) for loss in self.losses])


def save(
    cache: PagedKVCache,
    path: str | Path,
    seq_ids: SeqId | Iterable[SeqId] | None = None,
    *,
    model=None,
    tokens: Mapping[SeqId, ArrayLike] | None = None,
    progress: Progress = False,
) -> Report:
    """Write sequences and their pages: to a file, whole or not at all; to a folder, only what it lacks yet.

    Write what you reserved before you save: the tables will say that it is there. Holds the cache's lock.

    Args: path: a `.npz`, a `.h5` (extra hdf5), or a name without suffix: a folder, for checkpoints that are taken
        often; seq_ids: all if None; model: what computes the keys and values, a Llama or words that name it: to
        load them one has to say the same; tokens: per sequence its text, which `recover` needs and the cache knows
        only where it was told by `add` or `commit`; progress: True, or a function that is told how far it is.
    Returns: a Report.
    Raises: SaveFailed (an OSError) if the disk is full or refuses, StalePlan if a sequence changed meanwhile,
        KeyError for an unknown one. What was there before is there still.
    """
    path, manager = Path(path), cache.manager
    write = _writer(path)
    started = manager._clock()
    with cache._lock, counting_failures(manager, "save", started):
        snapshot = cache.snapshot(seq_ids)
        versions = cache.versions(snapshot.seq_ids)
        texts = token_rows(tokens, snapshot.seq_ids)
        tables, blocks = _tables_of(cache, snapshot, model_name(model), texts)
        filled = filled_slots(tables.snapshot, len(blocks))
        with showing(progress, "saving", len(blocks)) as told:

            def fill(records: np.ndarray, first: int) -> None:
                some = slice(first, first + len(records))
                _read_pages(cache.storage, blocks[some], filled[some], records)
                told(first + len(records))
                cache._check_current(snapshot.seq_ids, versions)  # tables and pages of one moment, or nothing

            written, num_bytes = write(path, tables, fill)
    manager._tell("save", started, snapshot.seq_ids, pages=written, bytes=num_bytes)
    return Report(cache, snapshot.seq_ids, len(blocks), num_bytes, written, tokens=tables.known_tokens())


def _writer(path: Path) -> Callable:
    if path.suffix in CONTAINERS:
        return write_file
    if path.suffix and not path.is_dir():
        raise ValueError(f"a snapshot is a file {', '.join(CONTAINERS)} or a folder, got {str(path)!r}")
    return write_folder


def _tables_of(
    cache: PagedKVCache, snapshot: Snapshot, model: str, tokens: dict[SeqId, list[int]]
) -> tuple[Tables, np.ndarray]:
    """The tables with pages in the place of blocks, and the block of each page, in order of first use."""
    indices = snapshot.indices
    there = indices != NOTHING
    used, first, which = np.unique(indices[there], return_index=True, return_inverse=True)
    order = np.argsort(first)  # [pages]
    page_of = np.empty(len(used), np.int32)
    page_of[order] = np.arange(len(used))
    pages = np.full(len(indices), NOTHING, np.int32)
    pages[there] = page_of[which]
    snapshot = replace(snapshot, indices=pages)
    layout = Layout.of(cache.storage, model)
    stem = secrets.token_bytes(STEM_BYTES)
    return Tables(layout, cache.num_blocks, snapshot, tokens, len(used), stem), used[order]


def filled_slots(snapshot: Snapshot, num_pages: int) -> np.ndarray:
    """How many slots of each page hold a token of anybody: int64 [num_pages]."""
    filled = np.zeros(num_pages, np.int64)
    for row, length in enumerate(snapshot.lengths.tolist()):
        pages = part(snapshot.indices, snapshot.indptr, row)
        there = np.flatnonzero(pages != NOTHING)
        tokens = np.minimum(length - there * snapshot.block_size, snapshot.block_size)
        np.maximum.at(filled, pages[there], tokens)
    return filled


def _read_pages(storage: KVStorage, blocks: np.ndarray, filled: np.ndarray, records: np.ndarray) -> None:
    """Copy blocks into records. Slots without a token are zeros there: whatever they held is nobody's business."""
    for name, array in storage.arrays.items():
        pages = records[name]  # [n, num_layers, block_size, …]
        for i, block in enumerate(blocks.tolist()):
            pages[i] = array[:, block]
        for i in np.flatnonzero(filled < storage.block_size):
            pages[i, :, filled[i] :] = 0


# What the three have in common


def model_name(model) -> str:
    """What stands for a model in a snapshot: words as they are, a Llama by a digest of its shape and weights."""
    if model is None or isinstance(model, str):
        return model or ""
    digest = hashlib.sha256(repr(model.config).encode())
    for array in (model.embedding, model.final_norm, *(array for layer in model.layers for array in layer)):
        digest.update(np.ascontiguousarray(array))
    return f"sha256:{digest.hexdigest()[:32]}"


def token_rows(
    tokens: Mapping[SeqId, ArrayLike] | None, seq_ids: tuple[SeqId, ...]
) -> dict[SeqId, list[int]]:
    rows = {}
    for seq_id, row in (tokens or {}).items():
        if seq_id not in seq_ids:
            raise KeyError(f"tokens of {seq_id!r}, which is not among the sequences {list(seq_ids)}")
        rows[seq_id] = whole_numbers(f"tokens of {seq_id!r}", row).ravel().tolist()
    return rows


@contextlib.contextmanager
def counting_failures(manager, kind: str, started: float) -> Iterator[None]:
    try:
        yield
    except (OSError, SnapshotError):
        manager._tell(kind, started, failed=1)
        raise


@contextlib.contextmanager
def showing(progress: Progress, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function to tell how many pages are done."""
    if not progress:
        yield lambda done: None
    elif callable(progress):
        yield lambda done: progress(done, total)
    else:
        try:
            from tqdm.auto import tqdm
        except ImportError:
            raise ImportError('a bar needs tqdm: pip install "pagedkv[bench]"') from None
        with tqdm(total=total, desc=what, unit="page") as bar:
            yield lambda done: bar.update(done - bar.n)
