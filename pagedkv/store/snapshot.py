"""Save a cache and load it again: what was damaged meanwhile is found, reported, and never handed out."""

import contextlib
import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from ..allocator import whole_numbers, whole_numbers_below
from ..block_table import NOTHING, SeqId, slots_of
from ..cache import PagedKVCache
from ..decode import AttentionPlan
from ..manager import Snapshot
from ..storage import KVStorage
from .files import CONTAINERS, SnapshotFile, locked, write_file
from .folder import SnapshotFolder, write_folder
from .record import Layout
from .tables import SnapshotError, Tables, part, rebuilt

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


# Saving


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
    with cache._lock, _counting_failures(manager, "save", started):
        snapshot = cache.snapshot(seq_ids)
        versions = cache.versions(snapshot.seq_ids)
        texts = _rows_of(tokens, snapshot.seq_ids)
        tables, blocks = _tables_of(cache, snapshot, model_name(model), texts)
        filled = _filled_slots(tables.snapshot, len(blocks))
        with _progress(progress, "saving", len(blocks)) as told:

            def fill(records: np.ndarray, first: int) -> None:
                some = slice(first, first + len(records))
                _read_pages(cache.storage, blocks[some], filled[some], records)
                told(first + len(records))
                cache._check_current(
                    snapshot.seq_ids, versions
                )  # tables and pages are of one moment, or nothing

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


def _filled_slots(snapshot: Snapshot, num_pages: int) -> np.ndarray:
    """How many slots of each page hold a token of anybody: int64 [num_pages]."""
    filled = np.zeros(num_pages, np.int64)
    for row, length in enumerate(snapshot.lengths.tolist()):
        pages = part(snapshot.indices, snapshot.indptr, row)
        there = np.flatnonzero(pages != NOTHING)
        np.maximum.at(
            filled, pages[there], np.minimum(length - there * snapshot.block_size, snapshot.block_size)
        )
    return filled


def _read_pages(storage: KVStorage, blocks: np.ndarray, filled: np.ndarray, records: np.ndarray) -> None:
    """Copy blocks into records. Slots without a token are zeros there: whatever they held is nobody's business."""
    for name, array in storage.arrays.items():
        pages = records[name]  # [n, num_layers, block_size, …]
        for i, block in enumerate(blocks.tolist()):
            pages[i] = array[:, block]
        for i in np.flatnonzero(filled < storage.block_size):
            pages[i, :, filled[i] :] = 0


# Loading


def load(
    path: str | Path,
    into: PagedKVCache | None = None,
    seq_ids: SeqId | Iterable[SeqId] | None = None,
    *,
    model=None,
    progress: Progress = False,
) -> Report:
    """Bring saved sequences back. A sequence ends before its first damaged page; the others are whole.

    Every page is verified before the cache is touched, and again when it is copied.

    Args: path: as for save; into: a cache with pages of the same kind, of any size; None: a new one like that which
        was saved; seq_ids: all if None; model: as for save, the same; progress: as for save.
    Returns: a Report; its `cache` holds the sequences.
    Raises: SnapshotError if there is no readable snapshot or it is of another model or layout, PoolExhausted if
        the pool is too small, KeyError for an unknown sequence, ValueError for one that is there already; the
        cache is as it was.
    """
    return _load(path, into, seq_ids, model, None, None, progress)


def recover(
    path: str | Path,
    into: PagedKVCache | None = None,
    seq_ids: SeqId | Iterable[SeqId] | None = None,
    *,
    model,
    name: str | None = None,
    tokens: Mapping[SeqId, ArrayLike] | None = None,
    progress: Progress = False,
) -> Report:
    """As `load`, but damaged pages are computed again from the tokens, and only these; shared ones once.

    Args: model: a Llama; name: what was said of it to `save`, if that was not the model itself; tokens: per sequence
        its text, where the snapshot does not know it.
    Returns: a Report; `losses` are sequences whose tokens nobody knows.
    Raises: as load; ValueError for tokens that the model does not have.
    """
    return _load(path, into, seq_ids, name or model, model, tokens, progress)


def _load(path, into, seq_ids, name, model, tokens, progress) -> Report:
    path = Path(path)
    with contextlib.ExitStack() as stack:
        started = 0.0
        if into is not None:
            started = into.manager._clock()
            stack.enter_context(_counting_failures(into.manager, "load", started))
        if path.is_dir():
            stack.enter_context(locked(path, alone=False))
        source = SnapshotFolder(path) if path.is_dir() else SnapshotFile(path)
        tables = source.tables.choose(seq_ids)
        cache = _new_cache(tables) if into is None else into
        _check_layout(path, tables.layout, Layout.of(cache.storage, model_name(name)))
        known = tables.known_tokens() | _rows_of(tokens, tables.snapshot.seq_ids)
        pages = np.unique(tables.snapshot.indices[tables.snapshot.indices != NOTHING]).tolist()
        damaged = _damaged(source, pages, stack.enter_context(_progress(progress, "verifying", len(pages))))
        again = {} if model is None else _computable(tables, damaged, known)
        snapshot, losses = _cut(tables.snapshot, damaged, again)
        with cache._lock:
            pairs = cache.manager.restore(snapshot)
            try:
                filled = _filled_slots(snapshot, tables.num_pages)
                _fill(cache, source, pairs, filled, damaged)
                if again:
                    ids, size = snapshot.seq_ids, cache.block_size
                    spans = [(row, n * size, n * size + int(filled[p])) for p, (row, n) in again.items()]
                    texts = [known.get(seq_id, []) for seq_id in ids]
                    _compute_again(cache, cache.manager.block_tables(ids), spans, model, texts)
                    _commit_again(cache, tables.snapshot, snapshot)
            except BaseException:
                _give_back(cache, snapshot.seq_ids, pairs[:, 1])
                raise
    num_bytes = len(pages) * tables.layout.record.itemsize
    counts = {"pages": len(pages), "bytes": num_bytes, "damaged": len(damaged) + len(source.damages)}
    cache.manager._tell("load", started, snapshot.seq_ids, **counts)
    return Report(
        cache,
        snapshot.seq_ids,
        len(pages),
        num_bytes,
        damaged=damaged,
        losses=losses,
        recomputed=tuple(again),
        elsewhere=tuple(source.damages),
        tokens=known,
    )


def _new_cache(tables: Tables) -> PagedKVCache:
    kept = tables.layout
    try:
        return PagedKVCache(
            tables.num_blocks,
            kept.block_size,
            kept.num_kv_heads,
            kept.head_dim,
            num_layers=kept.num_layers,
            dtype=kept.dtype,
        )
    except ValueError as error:
        raise SnapshotError(f"no cache can be like the one that was saved: {error}") from error


def _check_layout(path: Path, saved: Layout, wanted: Layout) -> None:
    if saved != wanted:
        saved, wanted = saved.to_json(), wanted.to_json()
        wrong = [
            f"{name} is {saved[name]!r}, not {wanted[name]!r}"
            for name in wanted
            if saved[name] != wanted[name]
        ]
        raise SnapshotError(f"{path} is of another model or layout: {'; '.join(wrong)}")


def _damaged(source, pages: list[int], told: Callable[[int], None]) -> dict[int, str]:
    """The pages that are not what was saved, and why."""
    damaged = {}
    for done, page in enumerate(pages, start=1):
        _, reason = source.read(page)
        if reason is not None:
            damaged[page] = reason
        told(done)
        source.forget(page)
    return damaged


def _cut(snapshot: Snapshot, damaged: dict[int, str], again: Mapping) -> tuple[Snapshot, tuple[Loss, ...]]:
    """The snapshot without damaged pages and what follows them; those in `again` may stay, but count as new."""
    lengths, trusted, losses = {}, {}, []
    for row, saved in enumerate(snapshot.lengths.tolist()):
        for entry, page in enumerate(part(snapshot.indices, snapshot.indptr, row).tolist()):
            if page in damaged:
                trusted.setdefault(row, entry * snapshot.block_size)
                if page not in again:
                    lengths[row] = kept = entry * snapshot.block_size
                    losses.append(Loss(snapshot.seq_ids[row], saved, kept, page, damaged[page]))
                    break
    return rebuilt(snapshot, range(len(snapshot.seq_ids)), lengths, trusted), tuple(losses)


def _fill(
    cache: PagedKVCache, source, pairs: np.ndarray, filled: np.ndarray, damaged: dict[int, str]
) -> None:
    """Copy the intact pages into the blocks that they got."""
    storage = cache.storage
    for page, block in pairs.tolist():
        if page not in damaged:
            record, reason = source.read(page)
            if reason is not None:
                raise SnapshotError(f"page {page} was damaged while it was being read: {reason}")
            for name, array in storage.arrays.items():
                array[:, block] = record[name]
            source.forget(page)
        if storage.poisoned and filled[page] < storage.block_size:
            storage.poison([block], start=int(filled[page]))


def _give_back(cache: PagedKVCache, seq_ids: tuple[SeqId, ...], blocks: np.ndarray) -> None:
    """Undo a restore whose pages did not come: nobody may find these blocks."""
    cache.manager.prefix_index.unseal(blocks.tolist())
    cache.free(seq_ids)


# Recovery: a damaged page is computed again, from the tokens and the pages before it


def _computable(
    tables: Tables, damaged: dict[int, str], known: dict[SeqId, list[int]]
) -> dict[int, tuple[int, int]]:
    """Damaged pages that tokens suffice for: page -> row of a sequence that has it, and its place there.

    In order of place: when a page's turn comes, all pages before it are there.
    """
    snapshot, found = tables.snapshot, {}
    filled, size = _filled_slots(snapshot, tables.num_pages), snapshot.block_size
    rows = [part(snapshot.indices, snapshot.indptr, row).tolist() for row in range(len(snapshot.seq_ids))]
    for place in range(max(map(len, rows), default=0)):
        for row, pages in enumerate(rows):
            page = pages[place] if place < len(pages) else NOTHING
            if page not in damaged or page in found:
                continue
            end = place * size + int(filled[page])
            told = min(int(snapshot.lengths[row]), len(known.get(snapshot.seq_ids[row], ())))
            before = all(p != NOTHING and (p not in damaged or p in found) for p in pages[:place])
            if end <= told and before:
                found[page] = (row, place)
    return found


def _compute_again(
    cache: PagedKVCache,
    tables: np.ndarray,
    rows: Iterable[tuple[int, int, int]],
    model,
    tokens: Sequence[list[int]],
) -> None:
    """Let the model write the places of damaged pages.

    Args: tables: block tables [batch, max_blocks]; rows: (row, first position, position behind the last) of
        every page; tokens: of every row.
    """
    for row, start, stop in rows:
        positions = np.arange(start, stop)
        text = whole_numbers_below("token", tokens[row][start:stop], model.config.vocabulary_size)
        slots = slots_of(tables[row], positions, cache.block_size)
        plan = AttentionPlan(tables[row : row + 1], [stop], cache.block_size, stop - start)

        def attend(layer, q, k, v, slots=slots, plan=plan):
            cache.storage.write(layer, slots, k, v)
            return plan.run(layer, q, cache.storage)

        model.decode(text, positions, attend)


def _commit_again(cache: PagedKVCache, before: Snapshot, now: Snapshot) -> None:
    """What had been final before damage and recovery is final again."""
    if before.committed is None:
        return
    for row, seq_id in enumerate(now.seq_ids):
        start, stop = int(now.committed[row]), min(int(before.committed[row]), int(now.lengths[row]))
        tokens = part(before.tokens, before.token_indptr, row)[start:stop]
        if start < stop and len(tokens) == stop - start:
            cache.manager.commit(seq_id, tokens)


# What callers may say


def model_name(model) -> str:
    """What stands for a model in a snapshot: words as they are, a Llama by a digest of its shape and weights."""
    if model is None or isinstance(model, str):
        return model or ""
    digest = hashlib.sha256(repr(model.config).encode())
    for array in (model.embedding, model.final_norm, *(array for layer in model.layers for array in layer)):
        digest.update(np.ascontiguousarray(array))
    return f"sha256:{digest.hexdigest()[:32]}"


def _rows_of(tokens: Mapping[SeqId, ArrayLike] | None, seq_ids: tuple[SeqId, ...]) -> dict[SeqId, list[int]]:
    rows = {}
    for seq_id, row in (tokens or {}).items():
        if seq_id not in seq_ids:
            raise KeyError(f"tokens of {seq_id!r}, which is not among the sequences {list(seq_ids)}")
        rows[seq_id] = whole_numbers(f"tokens of {seq_id!r}", row).ravel().tolist()
    return rows


@contextlib.contextmanager
def _counting_failures(manager, kind: str, started: float) -> Iterator[None]:
    try:
        yield
    except (OSError, SnapshotError):
        manager._tell(kind, started, failed=1)
        raise


@contextlib.contextmanager
def _progress(progress: Progress, what: str, total: int) -> Iterator[Callable[[int], None]]:
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
