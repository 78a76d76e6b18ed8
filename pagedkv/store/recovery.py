"""Recovery: a damaged page is computed again, from the tokens and the pages before it."""

from collections.abc import Iterable, Sequence

import numpy as np

from ..allocator import whole_numbers_below
from ..block_table import NOTHING, SeqId, slots_of
from ..cache import PagedKVCache
from ..decode import AttentionPlan
from .saving import filled_slots
from .tables import Tables, part


def computable(
    tables: Tables, damaged: dict[int, str], known: dict[SeqId, list[int]]
) -> dict[int, tuple[int, int]]:
    """Damaged pages that tokens suffice for: page -> row of a sequence that has it, and its place there.

    In order of place: when a page's turn comes, all pages before it are there.
    """
    snapshot, found = tables.snapshot, {}
    filled, size = filled_slots(snapshot, tables.num_pages), snapshot.block_size
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


def compute_again(
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
