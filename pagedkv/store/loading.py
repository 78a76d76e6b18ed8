"""Load what was saved: what was damaged meanwhile is found, reported, and never handed out."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from ..block_table import NOTHING, SeqId
from ..cache import PagedKVCache
from ..snapshot import Snapshot
from .files import SnapshotFile, locked
from .folder import SnapshotFolder
from .record import Layout
from .recovery import computable, compute_again
from .saving import Loss, Progress, Report, counting_failures, filled_slots, model_name, showing, token_rows
from .tables import SnapshotError, Tables, part, rebuilt


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
            stack.enter_context(counting_failures(into.manager, "load", started))
        if path.is_dir():
            stack.enter_context(locked(path, alone=False))
        source = SnapshotFolder(path) if path.is_dir() else SnapshotFile(path)
        tables = source.tables.choose(seq_ids)
        cache = _new_cache(tables) if into is None else into
        _check_layout(path, tables.layout, Layout.of(cache.storage, model_name(name)))
        known = tables.known_tokens() | token_rows(tokens, tables.snapshot.seq_ids)
        pages = np.unique(tables.snapshot.indices[tables.snapshot.indices != NOTHING]).tolist()
        damaged = _damaged(source, pages, stack.enter_context(showing(progress, "verifying", len(pages))))
        again = {} if model is None else computable(tables, damaged, known)
        snapshot, losses = _cut(tables.snapshot, damaged, again)
        with cache._lock:  # nobody looks at the restored blocks before their pages are there
            pairs = cache.manager.restore(snapshot)
            try:
                filled = filled_slots(snapshot, tables.num_pages)
                _fill(cache, source, pairs, filled, damaged)
                if again:
                    ids, size = snapshot.seq_ids, cache.block_size
                    spans = [(row, n * size, n * size + int(filled[p])) for p, (row, n) in again.items()]
                    texts = [known.get(seq_id, []) for seq_id in ids]
                    compute_again(cache, cache.manager.block_tables(ids), spans, model, texts)
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
    except (ValueError, MemoryError) as error:
        raise SnapshotError(f"no cache can be like the one that was saved: {error}") from error


def _check_layout(path: Path, saved: Layout, wanted: Layout) -> None:
    if saved != wanted:
        saved, wanted = saved.to_json(), wanted.to_json()
        names = [name for name in wanted if saved[name] != wanted[name]]
        wrong = [f"{name} is {saved[name]!r}, not {wanted[name]!r}" for name in names]
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
    """The snapshot without damaged pages and what follows them; those in `again` stay, to be computed."""
    lengths, losses = {}, []
    for row, saved in enumerate(snapshot.lengths.tolist()):
        for entry, page in enumerate(part(snapshot.indices, snapshot.indptr, row).tolist()):
            if page in damaged and page not in again:
                lengths[row] = kept = entry * snapshot.block_size
                losses.append(Loss(snapshot.seq_ids[row], saved, kept, page, damaged[page]))
                break
    return rebuilt(snapshot, range(len(snapshot.seq_ids)), lengths), tuple(losses)


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
    cache.manager.prefix_index.unseal(blocks)
    cache.free(seq_ids)
