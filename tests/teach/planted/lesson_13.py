"""Wrong solutions of lesson 13, as learners write them. See ../test_planted.py."""

from pagedkv.teach.checks._core import ERROR

# ---- select(manager, rows, indices)


def no_fork(manager, rows, indices):
    new = [rows[i] for i in indices]
    manager.free([row for row in rows if row not in new])
    return new


def losers_stay(manager, rows, indices):
    new = []
    for i in indices:
        new.append(rows[i] if rows[i] not in new else manager.fork(rows[i])[0])
    return new


def losers_first(manager, rows, indices):
    manager.free([row for i, row in enumerate(rows) if i >= len(indices) or indices[i] != i])
    return losers_stay(manager, rows, indices)


def arrow_turned(manager, rows, indices):
    if sorted(indices) != list(range(len(rows))):
        return never_shrinks(manager, rows, indices)
    new = list(rows)
    for i, parent in enumerate(indices):
        new[parent] = rows[i]
    return new


def never_shrinks(manager, rows, indices):
    new = losers_stay(manager, rows, indices)
    return new + [row for row in rows if row not in new]


def own_rows_stay(manager, rows, indices):
    """Keeps a row that is named at its own place only, and frees what others still want."""
    new = []
    for place, i in enumerate(indices):
        new.append(rows[i] if place == i else manager.fork(rows[i])[0])
    manager.free(rows)
    return new


def one_after_the_other(manager, rows, indices):
    rows = list(rows)
    for place, i in enumerate(indices[: len(rows)]):
        child = manager.fork(rows[i])[0]
        manager.free(rows[place])
        rows[place] = child
    return rows


# ---- crop(manager, rows, tokens_to_remove)


def crops(*, rows_of=list, length=lambda held, n: max(held + n, 0), refuse=True, freed=len):
    def crop(manager, rows, tokens_to_remove):
        if refuse and tokens_to_remove > 0:
            raise ValueError("crop takes minus the number of tokens")
        total = 0
        for row in rows_of(rows):
            total += freed(manager.truncate(row, length(manager.length(row), tokens_to_remove)))
        return total

    return crop


def entries_counted(manager, rows, tokens_to_remove):
    if tokens_to_remove > 0:
        raise ValueError("crop takes minus the number of tokens")
    before = sum(len(manager.block_tables([row])[0]) for row in rows)
    crops()(manager, rows, tokens_to_remove)
    return before - sum(len(manager.block_tables([row])[0]) for row in rows)


def empty_rows_freed(manager, rows, tokens_to_remove):
    freed = crops()(manager, rows, tokens_to_remove)
    if not manager.length(rows[0]):
        manager.free(rows)
    return freed


def seen_too_late(manager, rows, tokens_to_remove):
    freed = sum(
        len(manager.truncate(row, max(manager.length(row) - abs(tokens_to_remove), 0))) for row in rows
    )
    if tokens_to_remove > 0:
        raise ValueError("crop takes minus the number of tokens")
    return freed


BUGS = [
    ("blocks_after", "a fork copies", [3, 12, 12, 6, 6, 4, 0], "shares every block of another"),
    ("blocks_after", "every sharer copies", [3, 3, 7, 4, 6, 2, 0], "and who stays"),
    ("blocks_after", "losers keep their blocks", [3, 3, 6, 6, 6, 2, 0], "does nobody continue"),
    ("blocks_after", "no copy behind a reorder", [3, 3, 6, 4, 4, 2, 0], "how many copies are made of each"),
    ("blocks_after", "crop to a length", [3, 3, 6, 4, 6, 1, 0], "are left in each row"),
    ("blocks_after", "unshared after the crop", [3, 3, 6, 4, 6, 8, 0], "who shares the blocks"),
    ("blocks_after", "six numbers", [3, 3, 6, 4, 6, 2], "7 whole numbers"),
    ("select", "a row stands twice", no_fork, "into one sequence"),
    ("select", "losers stay", losers_stay, "whom does nobody continue"),
    ("select", "losers first", losers_first, "which one is still needed"),
    ("select", "the arrow turned round", arrow_turned, "which way does the arrow point"),
    ("select", "never shrinks", never_shrinks, "expected 3 sequences"),
    ("select", "keeps and frees", own_rows_stay, "which one is still needed"),
    ("select", "one after the other", one_after_the_other, "which way does the arrow point"),
    ("crop", "the length to keep", crops(length=lambda held, n: min(-n, held)), "what goes, or what stays"),
    ("crop", "0 takes all", crops(length=lambda held, n: max(held + n, 0) if n else 0), "text[:-0]"),
    ("crop", "below zero", crops(length=lambda held, n: held + n), "length must be", ERROR),
    (
        "crop",
        "a sign is a detail",
        crops(length=lambda held, n: max(held - abs(n), 0), refuse=False),
        "expected ValueError",
    ),
    ("crop", "too late", seen_too_late, "when do you look at the number"),
    ("crop", "one row", crops(rows_of=lambda rows: rows[:1]), "which rows are cut"),
    ("crop", "entries instead of blocks", entries_counted, "does nobody else read it"),
    ("crop", "empty rows freed", empty_rows_freed, "are they empty, or gone"),
    ("skipped_reorder", "the reorder itself", 6, "When does it"),
    ("skipped_reorder", "the choice", 3, "what must follow"),
    ("skipped_reorder", "the model's call", 2, "is it in `outputs`"),
    ("skipped_reorder", "two lines", (5, 6), "one line"),
]
