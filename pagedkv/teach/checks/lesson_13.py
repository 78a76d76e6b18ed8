"""Checks of lesson 13: what their calls do to blocks, rows chosen anew, a crop, a reorder that is skipped."""

from __future__ import annotations

import string
from typing import Any

import numpy as np

from pagedkv.manager import BlockManager
from pagedkv.teach import story

from ._core import Learner, Wrong, call_text, check, expect_refusal, same, seeded, show, sizes

# ---- by hand


def _after_each_call() -> list[tuple[str, int]]:
    """The calls of the exercise, and the blocks in use after each, as the manager has it."""
    manager, found = BlockManager(32, story.BLOCK_SIZE), []

    def then(call: str) -> None:
        found.append((call, manager.num_blocks - manager.num_free))

    manager.add("a")
    manager.extend("a", len(story.NIGHT))
    then("the prompt's update")
    rows = ["a", *manager.fork("a", list("bcd"))]
    then("batch_repeat_interleave(4)")
    manager.extend(rows)
    then("the update at position 10")
    manager.reorder(rows, [0, 0, 1, 1])
    then("reorder_cache([0, 0, 1, 1])")
    manager.extend(rows)
    then("the update at position 11")
    for row in rows:
        manager.truncate(row, manager.length(row) - 4)
    then("crop(-4)")
    manager.free(rows)
    then("reset()")
    return found


ASK = (
    "how many blocks of four do ten tokens take?",
    "what does a row need that shares every block of another?",
    "four rows write into one half-full block: how many of them must move out, and who stays?",
    "which rows does nobody continue, and which blocks did they have for themselves?",
    "two blocks have two readers each, and all four rows write: how many copies are made of each?",
    "how many tokens are left in each row, and who shares the blocks that hold them?",
    "who owns a block when all rows are gone?",
)


@check("blocks after each call", wants="value")
def blocks_after(learner: Learner) -> str:
    """`answer`: seven numbers, the blocks in use after each call that transformers makes."""
    answer, truth = learner.value, _after_each_call()
    whole = isinstance(answer, list | tuple) and len(answer) == len(truth)
    if not whole or not all(isinstance(n, int) and not isinstance(n, bool) for n in answer):
        raise Wrong(f"answer is {show(answer)}; it takes {len(truth)} whole numbers, one for each call.")
    for given, (call, used), question in zip(answer, truth, ASK, strict=True):
        if given != used:
            raise Wrong(f"After {call} you have {given} blocks in use, the manager has {used}.", question)
    return "append, fork, append, fork and free, append, truncate, free: seven calls of theirs, five words of ours."


# ---- select(manager, rows, indices)


def _batch(texts: list[str], block_size: int, num_blocks: int = 96) -> tuple[story.TextPool, list[Any]]:
    """A pool with a row for each text, and the rows."""
    pool, rows = story.TextPool(num_blocks, block_size), []
    for name, text in zip(string.ascii_lowercase, texts, strict=False):
        pool.add(name, text)
        rows.append(name)
    return pool, rows


def _selects(
    learner: Learner, pool: story.TextPool, rows: list[Any], indices: list[int], question: str
) -> list:
    """One call: right texts in the right order, nobody else registered, nothing taken. Returns the new rows."""
    texts = [pool.read(rows[i]) for i in indices]
    said = call_text(learner._name, rows, indices)
    got = learner(pool.manager, rows, indices)
    known = pool.manager.seq_ids
    try:
        got = list(got)
        strangers = [row for row in got if row not in known]
    except TypeError:
        raise Wrong(f"{said} gave {show(got)}, expected a list of {len(indices)} sequences.") from None
    if len(got) != len(indices) or strangers:
        gone = f": {show(strangers[0])} is no sequence of the manager" if strangers else ""
        raise Wrong(
            f"{said} gave {show(got)}{gone}; expected {len(indices)} sequences.",
            "for which place in the new batch is there no sequence yet, and which one is still needed?",
        )
    if len(set(got)) < len(got):
        twice = next(row for row in got if got.count(row) > 1)
        raise Wrong(
            f"{said} gave {show(got)}: {show(twice)} stands there twice.",
            "two rows go on from one: what happens when both write their next token into one sequence?",
            pool.strip(),
        )
    if left := [row for row in known if row not in got]:
        raise Wrong(
            f"After {said} the manager still has {show(left)}.",
            "whom does nobody continue, and who gives his blocks back?",
            pool.strip(),
        )
    if (says := [pool.read(row) for row in got]) != texts:
        raise Wrong(
            f"After {said} the rows say {show(says)}, expected {show(texts)}.", question, pool.strip()
        )
    return got


@check("select")
def select(learner: Learner) -> str:
    """`select(manager, rows, indices)`: the new rows; the i-th goes on from rows[indices[i]]."""
    one = "row i of the new batch goes on from row indices[i] of the old one: which way does the arrow point?"
    pool, rows = _batch(["Good night", "Good day", "Good morrow"], 4)
    rows = _selects(learner, pool, rows, [2, 0, 1], one)
    rows = _selects(learner, pool, rows, [0, 0, 2], one)
    rows = _selects(learner, pool, rows, [1, 1, 1], one)
    more = "a batch may grow and shrink: how long is the new list?"
    for indices in ([0], [0, 0, 0, 0], [3, 1], [0, 1], [1, 1, 0, 0], [2, 3, 0]):
        rows = _selects(learner, pool, rows, indices, more)
    rng, steps = seeded(13), 0
    for block_size in sizes(1, 2, 4, 16):
        for _ in range(10):
            size = int(rng.integers(1, 6))
            pool, rows = _batch(
                ["Good night, good night"[: rng.integers(1, 23)] for _ in range(size)], block_size
            )
            for _ in range(4):
                indices = rng.integers(0, len(rows), int(rng.integers(1, 6))).tolist()
                rows = _selects(learner, pool, rows, indices, one)
                letters = "".join(rng.choice(list("abcdefgh"), len(rows)))
                pool.append(dict(zip(rows, letters, strict=True)))
                steps += 1
    return f"Moved, doubled, dropped, grown and shrunk; {steps} random steps."


# ---- crop(manager, rows, tokens_to_remove)


def _crops(learner: Learner, pool: story.TextPool, rows: list[Any], n: int, question: str, text: str) -> None:
    before = {row: pool.read(row) for row in rows}
    held = len(before[rows[0]])
    free = pool.num_free
    said = f"{call_text(learner._name, rows, n)} on rows of {held} tokens"
    got = learner(pool.manager, rows, n)
    if gone := [row for row in rows if row not in pool.manager.seq_ids]:
        raise Wrong(
            f"After {said} the manager does not know {show(gone)} any more.",
            "the next forward pass writes into these rows: are they empty, or gone?",
        )
    says = {row: pool.read(row) for row in rows}
    expected = {row: old[: max(held + n, 0)] for row, old in before.items()}
    if says != expected:
        wrong = next(row for row in rows if says[row] != expected[row])
        raise Wrong(
            f"After {said} row {show(wrong)} says {show(says[wrong])}, expected {show(expected[wrong])}{text}.",
            question,
            pool.strip(),
        )
    if not same(got, pool.num_free - free) or isinstance(got, bool):
        raise Wrong(
            f"{said} gave {show(got)}; {pool.num_free - free} blocks became free.",
            "a block left a table: does nobody else read it?",
            pool.strip(),
        )


@check("crop")
def crop(learner: Learner) -> str:
    """`crop(manager, rows, tokens_to_remove)`: every row loses its last −n tokens; returns the blocks freed."""
    keep = "is the number what goes, or what stays?"
    none = "nothing is to be removed: what is `held + 0`, and what is `text[:-0]`?"
    over = "more is removed than there is: how long can a row be at least?"
    for n, question in ((-1, keep), (-3, keep), (0, none), (-5, over), (-4, over)):
        pool, rows = _batch(["Goo"], 4)
        _crops(learner, pool, rows, n, question, "")
    for n in (1, 2):
        pool, rows = _batch(["Goo", "Goo"], 4)
        expect_refusal(
            learner,
            pool.manager,
            rows,
            n,
            question="since 5.24 a positive number means nothing: who is to know?",
        )
        if [pool.read(row) for row in rows] != ["Goo", "Goo"]:
            raise Wrong(
                f"crop({n}) was refused, but the rows have changed.", "when do you look at the number?"
            )

    every = "speculation rejects tokens of the whole batch: which rows are cut?"
    pool, rows = _batch(["Good night", "Good queen", "Good uncle"], 4)
    _crops(learner, pool, rows, -3, every, "")
    pool, rows = _batch(["Good ni"], 4)
    rows += pool.fork("a", ["b"])
    _crops(
        learner, pool, rows, -2, every, ""
    )  # conformance D10: the tail is shared, and nothing becomes free
    copies = [len(pool.append({row: letter}).copies) for row, letter in zip(rows, "xy", strict=True)]
    if copies != [1, 0]:
        raise Wrong(f"The next writes copied {copies} blocks, expected [1, 0].", "who shares the tail?")

    rng, cases = seeded(13), 0
    for block_size in sizes(1, 2, 4, 16):
        for length in (1, block_size, 2 * block_size - 1, 2 * block_size, 2 * block_size + 1):
            pool, rows = _batch(["Good night, good night, good night, "[:length]], block_size)
            rows += pool.fork("a", 2)
            pool.append(dict(zip(rows, rng.choice(list("xyz"), 3).tolist(), strict=True)))
            for n in (0, -1, -block_size, -int(rng.integers(0, length + 3))):
                _crops(learner, pool, rows, n, keep, "")
                cases += 1
    return f"0, some and too many; shared tails; blocks counted when they are free; {cases} cases."


# ---- find the bug


@check("the skipped reorder", wants="value")
def skipped_reorder(learner: Learner) -> str:
    """The number of the line because of which beams are not reordered."""
    answer = learner.value
    if not isinstance(answer, int | np.integer) or isinstance(answer, bool) or not 1 <= answer <= 7:
        raise Wrong(f"answer is {show(answer)}; it takes the number of one line, 1 to 7.")
    ask = {
        1: "the function takes whatever it is given: is anything lost here?",
        2: "the model found its cache, under whatever name: is it in `outputs`?",
        3: "which tokens win has been decided from right logits: what must follow?",
        4: "one line per winner: does it name the parents?",
        6: "this line is right, when it runs. When does it?",
        7: "the caller gets its arguments back: what should have happened to one of them?",
    }
    if answer != 5:
        raise Wrong(f"Line {answer} does what it says.", ask[int(answer)])
    return "A name decides whether a cache is reordered, and a cache under another name is never asked for."
