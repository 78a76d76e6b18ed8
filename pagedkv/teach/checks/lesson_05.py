"""Checks of lesson 05: attention over one table, merging parts, grouped heads, a ragged batch, and the plan."""

import tracemalloc
import warnings
from typing import Any

import numpy as np

from pagedkv import attention
from pagedkv.decode import AttentionPlan
from pagedkv.storage import KVStorage

from ._core import Learner, Wrong, check, seeded, show, sizes

NIGHT, DAY, MORROW = [6, 1, 3], [0, 5], [7, 2, 4]
STORY_TABLES, STORY_LENGTHS = np.array([NIGHT, [*DAY, -1], MORROW]), np.array([10, 8, 11])
LOG_SUMS = {"ln 8": np.log(8.0), "ln 2": np.log(2.0), "ln 10": np.log(10.0)}
LENGTHS = [0, 1, 3, 4, 5, 8]  # tokens; in blocks of 4
TOLERANCE = 1e-5
SCALE = "what are scores divided by before the softmax, and why with the square root of head_dim?"


def _reference(q: np.ndarray, K: np.ndarray, V: np.ndarray) -> np.ndarray:
    """Attention of one query over keys in a row: q [heads, head_dim], K, V [length, kv_heads, head_dim]."""
    group = len(q) // K.shape[1]
    out = np.zeros((len(q), V.shape[-1]))
    for head in range(len(q)) if len(K) else ():
        scores = K[:, head // group] @ q[head] / q.shape[-1] ** 0.5  # [length]
        weights = np.exp(scores - scores.max())
        out[head] = weights @ V[:, head // group] / weights.sum()
    return out


def _numbers(got: Any, shape: tuple[int, ...], said: str) -> np.ndarray:
    """What the learner gave, as numbers of this shape, or Wrong."""
    try:
        array = np.asarray(got, np.float64)
    except (TypeError, ValueError):
        array = None
    if array is None or got is None or array.shape != shape:
        given = f"an array of shape {array.shape}" if isinstance(got, np.ndarray) else show(got)
        raise Wrong(f"{said} gave {given}, expected numbers of shape {shape}.", "which axes has the answer?")
    return array


def _near(got: Any, expected: Any) -> bool:
    return bool(np.allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE))


ALL = (attention.paged_attention, attention.dense_attention, attention.attend, AttentionPlan)


def _pages(rows: np.ndarray, table: list[int], num_blocks: int, block_size: int, idle: float = np.nan):
    """Pages [num_blocks, block_size, …] that hold `rows` through `table`; every other slot holds `idle`."""
    pages = np.full((num_blocks, block_size, *rows.shape[1:]), idle)
    for position, row in enumerate(rows):
        pages[table[position // block_size], position % block_size] = row
    return pages


# ---- attend_one(q, K, V, table, length)


@check("attend_one", forbidden=ALL)
def attend_one(learner: Learner) -> str:
    """`attend_one(q, K, V, table, length)`: one query of one head over the pages that a table names."""
    letters = np.arange(1.0, 11.0)[:, None]  # [10, 1]
    for idle in (0.0, np.nan):
        V, K = (_pages(rows, NIGHT, 8, 4, idle) for rows in (letters, 0 * letters))
        said = f"attend_one(q, K, V, {NIGHT}, 10), V = 1 … 10, equal scores, {show(idle)} in the idle slots,"
        got = _numbers(learner(np.ones(1), K, V, NIGHT, 10), (1,), said)
        if not _near(got, 5.5):
            raise Wrong(f"{said} gave {show(got)}, expected [5.5].", _story_question(got[0]))
    rng, cases = seeded(5), 0
    for block_size in sizes(1, 2, 4, 16):
        for length in sorted({1, block_size - 1, block_size, block_size + 1, 2 * block_size + 1} - {0}):
            for times in (1, 2000):  # exp of such scores overflows
                d = int(rng.integers(2, 6))
                q, k, v = (
                    rng.normal(size=d),
                    rng.normal(size=(length, d)) * times,
                    rng.normal(size=(length, d)),
                )
                table = rng.permutation(8)[: -(-length // block_size)].tolist()
                K, V = _pages(k, table, 8, block_size), _pages(v, table, 8, block_size)
                said = f"attend_one(q, K, V, {table}, {length}), blocks of {block_size}, head_dim {d},"
                got = _numbers(learner(q, K, V, table, length), (d,), said)
                expected = _reference(q[None], k[:, None], v[:, None])[0]
                if not _near(got, expected):
                    raise Wrong(f"{said} gave {show(got)}, expected {show(expected)}.", _why(got, q, k, v))
                cases += 1
    return f"The story, and {cases} cases at the block edges, as dense attention has them."


def _story_question(got: float) -> str:
    if np.isnan(got):
        return "night has 10 tokens: which slots did you read, and what is 0 · NaN?"
    if _near(got, 55 / 12):
        return "night has 10 tokens: by how many weights did you divide?"
    if _near(got, 55):
        return "what do the weights of a softmax sum to?"
    return "which rows of V belong to night, and where in its table does the half-filled block stand?"


def _why(got: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> str:
    """The question for a wrong result of one head over the rows k, v."""
    d = len(q)
    if _near(got, _reference(q[None], k[:, None] * d**0.5, v[:, None])[0]):
        return SCALE
    if np.isnan(got).any() and np.abs(k @ q).max() / d**0.5 > 300:
        return "how large may a score be before exp() gives infinity, and what may be taken off every score?"
    if np.isnan(got).any():
        return "is the last block full? And which slots are not this sequence's at all?"
    return "which weight meets which row of V?"


# ---- merge(a, lse_a, b, lse_b)


@check("merge", own=(attention.merge,))
def merge(learner: Learner) -> str:
    """`merge(a, lse_a, b, lse_b)`: attention over two sets of keys from the attention over each."""
    ln8, ln2, empty = LOG_SUMS["ln 8"], LOG_SUMS["ln 2"], np.float64(-np.inf)
    zero = np.zeros(1)
    _merges(learner, ([4.5], ln8, [9.5], ln2), [5.5], np.log(10.0), "[4.5], ln 8, [9.5], ln 2")
    _merges(learner, ([9.5], ln2, [4.5], ln8), [5.5], np.log(10.0), "[9.5], ln 2, [4.5], ln 8")
    expected = [1.8068243], 1.3132617
    _merges(learner, ([1.0], np.float64(1), [4.0], np.float64(0)), *expected, "[1], 1, [4], 0")
    for said, case, out, lse in [
        ("[0], −inf, [7], 2", (zero, empty, [7.0], np.float64(2)), [7.0], 2.0),
        ("[7], 2, [0], −inf", ([7.0], np.float64(2), zero, empty), [7.0], 2.0),
        ("[0], −inf, [0], −inf", (zero, empty, zero, empty), [0.0], -np.inf),
        ("[1], 1000, [3], 1000", ([1.0], np.float64(1e3), [3.0], np.float64(1e3)), [2.0], 1e3 + np.log(2)),
        (
            "[1], −1000, [3], −1000",
            ([1.0], np.float64(-1e3), [3.0], np.float64(-1e3)),
            [2.0],
            np.log(2) - 1e3,
        ),
    ]:
        _merges(learner, case, out, lse, said)
    rng = seeded(6)
    for _ in range(20):
        heads, length, d = 3, int(rng.integers(2, 12)), 4
        scores, v = rng.normal(size=(heads, length)) * 5, rng.normal(size=(length, d))
        cut = int(rng.integers(0, length + 1))
        parts = [x for part in (slice(0, cut), slice(cut, None)) for x in _part(scores[:, part], v[part])]
        said = f"the first {cut} and the other {length - cut} of {length} keys, {heads} heads"
        _merges(learner, tuple(parts), *_part(scores, v), said)
    return "Parts, empty ones included, give what all keys together give."


def _part(scores: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Result [heads, d] and log-sum-exp [heads] over some keys, (0, −inf) over none."""
    if not len(v):
        return np.zeros((len(scores), v.shape[1])), np.full(len(scores), -np.inf)
    peak = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=1, keepdims=True)
    return weights / total @ v, (np.log(total) + peak)[:, 0]


def _merges(learner: Learner, case: tuple, out: Any, lse: Any, words: str) -> None:
    a, lse_a, b, lse_b = (np.asarray(x, np.float64) if isinstance(x, list) else x for x in case)
    said = f"merge({words})"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = learner(a, lse_a, b, lse_b)
    if not isinstance(got, tuple | list) or len(got) != 2:
        raise Wrong(f"{said} gave {show(got)}, expected a pair: the result and its log-sum-exp.")
    got_out = _numbers(got[0], np.shape(out), f"{said}, the result,")
    got_lse = _numbers(got[1], np.shape(lse), f"{said}, the log-sum-exp,")
    if not _near(got_out, out) or not _near(got_lse, lse):
        values = show(got_out), show(got_lse), show(np.asarray(out)), show(np.asarray(lse))
        told = "{} gave {} and {}, expected {} and {}.".format(said, *values)
        raise Wrong(told, _merge_question(case, got_out, got_lse, out))
    if caught:
        raise Wrong(f"{said} warned: {caught[0].message}.", "what is −inf − (−inf), and who asks for it?")


def _merge_question(case: tuple, out: np.ndarray, lse: np.ndarray, expected: Any) -> str:
    a, lse_a, b, lse_b = case
    if np.isneginf([lse_a, lse_b]).any():
        return "a part without keys: what does it weigh? And two of them: what is −inf − (−inf)?"
    if np.ndim(lse_a) == 0 and abs(lse_a) >= 1000:
        return "exp(1000) is infinite and exp(−1000) is 0: what may be taken off both before exp()?"
    if _near(out, (np.asarray(a) + np.asarray(b)) / 2):
        return "one part speaks for more keys than the other: which number tells how much each weighs?"
    two = np.exp2(lse_a - np.logaddexp2(lse_a, lse_b))[..., None]
    if _near(out, two * np.asarray(a) + (1 - two) * np.asarray(b)):
        return "which logarithm was taken, the natural one or the one of base 2, and which power undoes it?"
    if _near(out, expected):
        return "what do the exponentials of both parts sum to, and what is the logarithm of that?"
    return "a share is the part's sum of exponentials by the sum of both: do your two shares sum to 1?"


# ---- gqa(q, K, V)


@check("gqa", forbidden=ALL)
def gqa(learner: Learner) -> str:
    """`gqa(q, K, V)`: several query heads on fewer KV heads, without a copy of K or V per query head."""
    V = np.broadcast_to(np.arange(2.0)[:, None], (5, 2, 3)).copy()  # V of head h is h
    K, q = np.zeros((5, 2, 3)), np.ones((4, 3))
    said = "gqa(q, K, V), 4 query heads on 2 KV heads, V of KV head h is h,"
    got = _numbers(learner(q, K, V), (4, 3), said)
    if not _near(got, [[0] * 3, [0] * 3, [1] * 3, [1] * 3]):
        reads = show(np.round(got[:, 0], 3))
        question = "which query heads share KV head 0: neighbours, or every second one?"
        raise Wrong(f"{said} read {reads}, expected [0, 0, 1, 1].", question)
    rng, cases = seeded(7), 0
    for heads, kv_heads in [(1, 1), (4, 4), (4, 2), (4, 1), (6, 3), (6, 2)]:
        for length in (1, 4, 9):
            q, K, V = (rng.normal(size=s) for s in ((heads, 5), (length, kv_heads, 5), (length, kv_heads, 5)))
            said = f"gqa(q, K, V), {heads} query heads on {kv_heads} KV heads, {length} keys, head_dim 5,"
            got, expected = _numbers(learner(q, K, V), (heads, 5), said), _reference(q, K, V)
            wrong = [head for head in range(heads) if not _near(got[head], expected[head])]
            if wrong:
                h = wrong[0]
                k, v = K[:, h * kv_heads // heads], V[:, h * kv_heads // heads]
                told = f"{said} gave {show(got[h])} for query head {h}, expected {show(expected[h])}."
                raise Wrong(told, _why(got[h], q[h], k, v))
            cases += 1
    K, V, q = (np.ones(shape, np.float32) for shape in ((4096, 2, 32), (4096, 2, 32), (32, 32)))
    repeated = 16 * K.nbytes
    tracemalloc.start()
    try:
        learner.value(q, K, V)  # not through the proxy, which copies arguments to see whether they change
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if peak > repeated / 2:
        told = f"gqa took {peak / 2**20:.0f} MiB beside K and V, which hold {2 * K.nbytes / 2**20:.0f} MiB together."
        raise Wrong(told, "16 query heads ask each KV head: can they ask it in one product, as 16 rows?")
    return f"{cases} shapes, and no copy of K or V per query head."


# ---- attend_batch(q, K, V, tables, lengths)


@check("attend_batch", own=(attention.paged_attention,), forbidden=ALL)
def attend_batch(learner: Learner) -> str:
    """`attend_batch(q, K, V, tables, lengths)`: a ragged batch over pages, each row as if it were alone."""
    rng = seeded(8)
    batches = [(STORY_LENGTHS.tolist(), 4, 1, 1), (LENGTHS[1:], 4, 2, 1), (LENGTHS, 4, 4, 2)]
    for block_size in sizes(1, 2, 4, 16):
        edges = [1, 0, block_size - 1, 2 * block_size, block_size + 1, 2 * block_size - 1, block_size]
        batches.append((edges, block_size, 4, int(rng.choice([1, 2, 4]))))
    for lengths, block_size, heads, kv_heads in batches:
        case = _batch(rng, lengths, block_size, heads, kv_heads)
        _attends_each(learner, *case, block_size)
    return (
        f"{sum(len(batch[0]) for batch in batches)} rows in {len(batches)} batches, each as if it were alone."
    )


def _batch(rng, lengths: list[int], block_size: int, heads: int, kv_heads: int, d: int = 4) -> tuple:
    """q, pages of K and V with NaN in every idle slot, padded tables, lengths, and what each row should give."""
    needs = [-(-n // block_size) for n in lengths]
    num_blocks = sum(needs) + 2
    ids = rng.permutation(num_blocks - 1)  # the last block stays idle: a padded −1 would read it
    tables = np.full((len(lengths), max(needs)), -1)
    K, V = np.full((2, num_blocks, block_size, kv_heads, d), np.nan)
    q, expected = rng.normal(size=(len(lengths), heads, d)), []
    for i, (n, blocks) in enumerate(zip(lengths, needs, strict=True)):
        tables[i, :blocks], ids = ids[:blocks], ids[blocks:]
        k, v = rng.normal(size=(2, n, kv_heads, d))
        for position in range(n):
            slot = tables[i, position // block_size], position % block_size
            K[slot], V[slot] = k[position], v[position]
        expected.append(_reference(q[i], k, v))
    return q, K, V, tables, np.array(lengths), np.array(expected)


def _attends_each(learner: Learner, q, K, V, tables, lengths, expected, block_size: int) -> None:
    said = f"attend_batch, lengths {lengths.tolist()}, blocks of {block_size}, {q.shape[1]} on {K.shape[2]} heads,"
    got = _numbers(learner(q, K, V, tables, lengths), q.shape, said)
    for i, n in enumerate(lengths.tolist()):
        wrong = [head for head in range(q.shape[1]) if not _near(got[i, head], expected[i, head])]
        if wrong:
            head = wrong[0]
            told = (
                f"{said}\ngave {show(got[i, head])} for row {i} of length {n}, head {head}; "
                f"alone it gives {show(expected[i, head])}."
            )
            raise Wrong(told, _row_question(got[i], n, len(wrong)))


def _row_question(got: np.ndarray, length: int, wrong: int) -> str:
    if length == 0:
        return "a row without keys should give zeros: what is its largest score, and what is −inf − (−inf)?"
    if np.isnan(got).any():
        return "a hidden slot has weight 0 and its V is NaN: what is their product, and what would a select give?"
    if wrong < len(got):
        return "some heads of this row are right: which query head reads which KV head?"
    return "does this row know its own length? And do its weights sum to 1 after you hid the others?"


# ---- MyPlan(tables, lengths, block_size).run(layer, q, storage)


class _Counting(KVStorage):
    """A storage that counts the rows that are read."""

    rows = 0

    def __repr__(self) -> str:
        return "storage"

    def read(self, layer, slots):
        self.rows += np.size(slots)
        return super().read(layer, slots)


@check("plan", own=(AttentionPlan,), wants="class")
def plan(learner: Learner) -> str:
    """`MyPlan(tables, lengths, block_size)` and `.run(layer, q, storage)`, as gathered in lesson 05."""
    rng, runs = seeded(9), 0
    cases = [(STORY_TABLES, STORY_LENGTHS, 4, 2, 1)]
    for block_size in sizes(1, 2, 4, 16):
        lengths = [2 * block_size, 0, 1, block_size - 1, block_size, block_size + 1]
        q, _, _, tables, lengths, _ = _batch(rng, lengths, block_size, 4, 2)
        cases.append((tables, lengths, block_size, 4, int(rng.choice([1, 2, 4]))))
    for tables, lengths, block_size, heads, kv_heads in cases:
        storage = _Counting(2, int(tables.max()) + 2, block_size, kv_heads, 4, poison=True)
        said = f"MyPlan(tables, {lengths.tolist()}, {block_size})"
        planned = learner(tables, lengths, block_size)
        for layer in (0, 1, 0):  # layer 0 once more, with other numbers in the same slots
            q, expected = _fill(rng, storage, layer, tables, lengths, heads)
            storage.rows = 0
            got = _numbers(planned.run(layer, q, storage), q.shape, f"{said}.run({layer}, q, storage)")
            for i, n in enumerate(lengths.tolist()):
                if not _near(got[i], expected[i]):
                    told = (
                        f"{said}.run({layer}, …) gave {show(got[i][0])} for row {i} of length {n}, "
                        f"dense attention gives {show(expected[i][0])}."
                    )
                    raise Wrong(told, _plan_question(got[i], n, runs))
            if storage.rows > lengths.sum():
                told = f"{said}.run read {storage.rows} rows of K, the batch has {lengths.sum()} tokens."
                raise Wrong(told, "who wants the rows behind a sequence's end?")
            runs += 1
    return (
        f"{runs} runs of {len(cases)} plans, over two layers, as dense attention has them; no row too many."
    )


def _fill(rng, storage: KVStorage, layer: int, tables, lengths, heads: int):
    """Write new keys and values of every sequence into one layer: the queries and what each should give."""
    shape, q, expected = (storage.num_kv_heads, 4), [], []
    for table, n in zip(tables, lengths.tolist(), strict=True):
        k, v = rng.normal(size=(2, n, *shape)).astype(np.float32)
        slots = [
            int(table[p // storage.block_size]) * storage.block_size + p % storage.block_size
            for p in range(n)
        ]
        storage.write(layer, slots, k, v)
        q.append(rng.normal(size=(heads, 4)).astype(np.float32))
        expected.append(_reference(q[-1], k, v))
    return np.array(q), np.array(expected)


def _plan_question(got: np.ndarray, length: int, runs: int) -> str:
    if length == 0:
        return "a sequence without tokens: which rows are its, and what should it give?"
    if np.isnan(got).any():
        return "NaN stands in every slot without a token: which of them did the plan name?"
    if runs % 3:
        return "what is the same in all layers, the places or what stands there?"
    return "which of the rows that were read are this sequence's?"
