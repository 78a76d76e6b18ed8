"""Every peer gives the float64 answer, and one that does not is reported and left out."""

import numpy as np
import pytest

from pagedkv import PagedKVCache
from pagedkv.bench import PEERS, Shape, Workload, compare, peers
from pagedkv.bench.measure import TOLERANCE, error

SHAPES = [
    Shape("plain", (1, 5, 16, 33), 4, 2, 8, num_layers=2, block_size=4),
    Shape("alone", (7,), 3, 1, 16, block_size=16),
    Shape("beams", (19, 18, 17), 4, 4, 8, prefix=16, block_size=4),
]
RUNNING = [
    pytest.param(name, marks=[pytest.mark.torch] if name.startswith("torch") else [])
    for name in PEERS
    if name != "vllm"  # test_vllm.py
]


@pytest.mark.parametrize("name", RUNNING)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_peer_is_right_on_every_layer(name, shape):
    workload = Workload(shape)
    call = PEERS[name].build(workload)
    assert error(call, *workload.expected()) <= TOLERANCE
    assert error(call, *workload.expected()) <= TOLERANCE  # and again: a buffer is used twice


def test_the_repaired_first_draft_does_not_read_behind_a_tail_or_the_blocks_of_others():
    workload = Workload(SHAPES[0])
    expected = workload.expected()
    call = PEERS["seed"].build(workload)
    cache = workload.cache()
    tables, lengths = cache.block_tables(workload.seq_ids), workload.lengths
    for pages in cache.storage.arrays.values():
        unused = np.setdiff1d(np.arange(cache.num_blocks), tables)
        pages[:, unused] = np.nan
        for table, length in zip(tables, lengths, strict=True):
            if length % 4:
                pages[:, table[length // 4], length % 4 :] = np.nan
    assert error(call, *expected) <= TOLERANCE


def test_an_absent_peer_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert PEERS["torch-rows"].absent == 'torch-rows: torch is not installed: pip install "pagedkv[train]"'
    assert PEERS["seed"].absent is None


def test_the_ungrouped_kernel_reads_a_shared_prefix_for_each(monkeypatch):
    plans, plan = [], PagedKVCache.plan
    monkeypatch.setattr(PagedKVCache, "plan", lambda *a, **k: plans.append(plan(*a, **k)) or plans[-1])
    workload = Workload(Shape("beams", (300, 290, 280), 4, 4, 8, prefix=256))
    for name in ("paged", "paged-ungrouped"):
        PEERS[name].build(workload)
    assert [plan.share for plan in plans] == [True, False]


# --- compare


def test_a_wrong_variant_is_reported_and_not_measured(monkeypatch):
    def wrong(workload, threads=1):
        right = peers.numpy_padded(workload)
        return lambda layer: right(layer) + np.float32(1e-3)

    monkeypatch.setitem(PEERS, "wrong", peers.Peer("wrong", "off by a little", wrong))
    rows = {row.peer: row for row in compare(Workload(SHAPES[0]), ["paged", "wrong"], seconds=0)}
    assert rows["paged"].correct
    assert len(rows["paged"].samples) >= 5
    assert not rows["wrong"].correct
    assert rows["wrong"].samples == []


@pytest.mark.parametrize(
    "spoiled",
    [lambda out: out * np.nan, lambda out: out[:-1], lambda out: np.where(out == out[0, 0, 0], np.nan, out)],
)
def test_nan_and_a_wrong_shape_are_wrong(spoiled):
    workload = Workload(SHAPES[0])
    right = PEERS["numpy-padded"].build(workload)
    assert not error(lambda layer: spoiled(right(layer)), *workload.expected()) <= TOLERANCE


def test_only_the_last_layer_wrong_is_wrong():
    workload = Workload(SHAPES[0])
    right = PEERS["numpy-padded"].build(workload)
    assert not error(lambda layer: right(0), *workload.expected()) <= TOLERANCE


def test_figures_follow_from_the_times():
    workload = Workload(SHAPES[0])
    (row,) = compare(workload, ["paged"], seconds=0, bandwidth=1e9)
    row.samples = [0.5, 1.0, None, 2.0]
    assert (row.seconds, row.tokens_per_second, row.ns_per_token) == pytest.approx((1.0, 4.0, 1e9 / 55))
    assert row.num_bytes == 55 * 2 * 8 * 4 * 2  # tokens, heads, head_dim, bytes, keys and values
    assert row.bandwidth_share == pytest.approx(row.num_bytes / 1e9)


def test_float16_is_measured_against_what_it_stores():
    rows = compare(Workload(SHAPES[0]), ["paged"], dtypes=["float32", "float16"], seconds=0)
    assert [row.dtype for row in rows if row.correct] == ["float32", "float16"]
    assert rows[1].num_bytes == rows[0].num_bytes / 2


def test_with_two_threads_ours_is_also_measured_with_one_in_the_same_rounds():
    rows = compare(Workload(SHAPES[0]), ["paged", "numpy-padded"], threads=2, seconds=0)
    assert [(r.peer, r.threads, r.round_of) for r in rows] == [
        ("paged", 1, 2),
        ("paged", 2, 2),
        ("numpy-padded", 2, 2),
    ]
