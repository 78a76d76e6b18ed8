"""Verdicts on results that were made up."""

import pytest

from pagedkv.bench.compare import Row
from pagedkv.bench.goals import GOALS, Goal, Verdict, against, judge, two_threads


def row(peer, seconds, *, shape="b8", dtype="float32", threads=1, round_of=None, num_bytes=1e9):
    return Row(
        shape,
        peer,
        dtype,
        threads,
        round_of or threads,
        16,
        8,
        1000,
        num_bytes,
        0.0,
        10e9,
        samples=[seconds] * 3,
    )


def results(*rows, kernel="Haswell", bookkeeping=()):
    return {"machine": {"blas_kernel": kernel}, "rows": list(rows), "bookkeeping": list(bookkeeping)}


def verdict(found, name):
    return next(v for v in judge(found) if v.goal.name == name)


@pytest.mark.parametrize(
    ("peer_takes", "kernel", "ok"),
    [(1.0, "Haswell", True), (0.86, "Zen", True), (0.84, "Haswell", False), (1.0, "SkylakeX", False)],
)
def test_a_ratio_is_judged_with_slack_by_the_column_of_the_blas_kernel(peer_takes, kernel, ok):
    found = results(row("paged", 1.0), row("numpy-padded", peer_takes), kernel=kernel)
    judged = verdict(found, "b8: padded contiguous NumPy")
    assert judged.measured == pytest.approx(peer_takes)
    assert judged.ok is ok


def test_what_was_not_measured_is_not_judged():
    assert {v.ok for v in judge(results())} == {None}
    assert {v.measured for v in judge(results(row("paged", 1.0, shape="a")))} == {None}


def test_a_variant_that_was_wrong_is_not_judged():
    wrong = row("numpy-padded", 1.0)
    wrong.samples = []
    assert verdict(results(row("paged", 1.0), wrong), "b8: padded contiguous NumPy").ok is None


def test_threads_are_compared_within_their_own_rounds():
    rows = [row("paged", 100.0), row("paged", 1.6, round_of=2), row("paged", 1.0, threads=2)]
    assert two_threads("b8")(results(*rows)) == pytest.approx(1.6)
    assert two_threads("b8")(results(rows[0], rows[2])) is None


def test_other_dtypes_and_threads_do_not_stand_in():
    rows = [row("paged", 1.0, dtype="int8"), row("paged", 1.0, threads=2), row("numpy-padded", 3.0)]
    assert against("b8", "numpy-padded")(results(*rows)) is None


def test_bandwidth_memory_and_narrow_types():
    found = results(row("paged", 0.5), row("paged", 0.5, dtype="int8", num_bytes=0.26e9))
    assert verdict(found, "b8: share of a core's read bandwidth").measured == pytest.approx(0.2)
    assert verdict(found, "b8: share of a core's read bandwidth").ok is False
    assert verdict(found, "b8: int8, memory of float32").ok is True
    assert verdict(found, "b8: int8, speed of float32").ok is True
    assert verdict(found, "b8: bfloat16, speed of float32").ok is None


@pytest.mark.parametrize(("seconds", "ok"), [(11e-6, True), (12e-6, False)])
def test_microseconds_are_upper_limits(seconds, ok):
    found = results(bookkeeping=[{"name": "fork 4096 tokens into 8", "seconds": seconds}])
    assert verdict(found, "fork 4096 tokens into 8").ok is ok


def test_bookkeeping_goals_name_rows_that_exist():
    from pagedkv.bench import bookkeeping

    rows = bookkeeping.rows(rounds=1)
    judged = {v.goal.name for v in judge(results(bookkeeping=rows)) if v.measured is not None}
    assert judged == {g.name for g in GOALS if g.shape is None}


def test_no_goal_for_a_kernel_is_no_miss():
    assert Verdict(Goal("x", lambda r: 1.0, 2.0, None), 1.0, None).ok is None
