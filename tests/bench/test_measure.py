"""The measuring itself, on a clock that moves only when told to."""

from types import SimpleNamespace

import numpy as np
import pytest

from pagedkv.bench import Variant, interleave, measure, ratio


class Clock:
    def __init__(self):
        self.now, self.log = 0.0, []

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.log.append("sleep")

    def call(self, name, seconds):
        def run(layer):
            self.now += seconds
            self.log.append((name, layer))

        return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=clock.perf_counter, sleep=clock.sleep))
    return clock


def test_what_a_call_takes_is_what_is_measured(clock):
    samples = interleave([Variant("x", clock.call("x", 0.5)), Variant("y", clock.call("y", 0.25))], seconds=3)
    assert {name: set(taken.tolist()) for name, taken in samples.items()} == {"x": {0.5}, "y": {0.25}}


def test_short_calls_are_repeated_and_each_counts_once(clock):
    samples = interleave([Variant("x", clock.call("x", 0.0001))], seconds=0.5)
    assert samples["x"] == pytest.approx(0.0001)
    assert len(clock.log) > 20 * len(samples["x"])


def test_variants_take_turns_and_all_of_them_lead_sometimes(clock):
    variants = [Variant(name, clock.call(name, 1)) for name in "abc"]
    interleave(variants, seconds=0, min_rounds=20)
    names = [name for name, _ in clock.log[6:]][
        ::2
    ]  # the first of each visit does not count, the second does
    rounds = [names[i : i + 3] for i in range(0, 60, 3)]
    assert all(sorted(turn) == list("abc") for turn in rounds)
    assert {turn[0] for turn in rounds} == set("abc")


def test_the_first_calls_of_a_visit_do_not_count(clock):
    def slow_start(layer):
        clock.now += 5 if getattr(slow_start, "asleep", True) else 1
        slow_start.asleep = False

    def other(layer):
        clock.now += 1
        slow_start.asleep = True

    samples = interleave([Variant("x", slow_start), Variant("y", other)], seconds=50)
    assert set(samples["x"]) == {1.0}


def test_a_slow_variant_is_visited_every_third_round(clock):
    variants = [Variant("fast", clock.call("fast", 1)), Variant("slow", clock.call("slow", 5))]
    samples = interleave(variants, seconds=0, min_rounds=7)
    assert np.isfinite(samples["slow"]).tolist() == [True, False, False, True, False, False, True]
    assert np.isfinite(samples["fast"]).all()


def test_calls_walk_through_the_layers(clock):
    interleave([Variant("x", clock.call("x", 1))], 3, seconds=0, min_rounds=6)
    assert {layer for _, layer in clock.log} == {0, 1, 2}


def test_after_several_threads_there_is_a_pause(clock):
    interleave(
        [Variant("x", clock.call("x", 1), threads=2), Variant("y", clock.call("y", 1))],
        seconds=0,
        min_rounds=4,
    )
    assert clock.log.count("sleep") == 1 + 4
    assert all(clock.log[i - 1][0] == "x" for i, entry in enumerate(clock.log) if entry == "sleep")


def test_a_peer_with_its_own_clock_is_believed(clock):
    call = clock.call("far", 1)
    call.timed = lambda layers: 0.125 * len(layers)
    samples = interleave([Variant("far", call)], seconds=0)
    assert set(samples["far"]) == {0.125}


def test_progress_ends_at_one(clock):
    shares = []
    interleave([Variant("x", clock.call("x", 0.1))], seconds=2, after_round=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_undoing_is_not_measured_and_gets_the_result(clock):
    given = []

    def run():
        clock.now += 1
        return "result"

    def undo(result):
        clock.now += 10
        given.append(result)

    samples = measure.alternate({"x": (run, undo)}, rounds=3)
    assert samples["x"].tolist() == [1, 1, 1]
    assert set(given) == {"result"}


def test_a_ratio_is_taken_round_by_round():
    nan = np.nan
    assert ratio(np.array([2.0, nan, 40.0]), np.array([1.0, 5.0, 20.0])) == 2
    assert ratio(np.array([2.0, 2.0, 30.0]), np.array([1.0, 1.0, 1.0])) == 2
    assert ratio(np.array([2.0, 40.0, 6.0]), np.array([1.0, 20.0, 4.0])) == 2  # the medians alone say 1.5
    assert np.isnan(ratio(np.array([nan, 1.0]), np.array([1.0, nan])))


def test_the_machine_and_its_blas_kernel_are_named():
    facts = measure.machine()
    assert facts["numpy"] == np.__version__
    assert all(facts[key] for key in ("processor", "cores", "blas", "blas_kernel"))


def test_the_read_bandwidth_is_that_of_the_bytes_read(clock, monkeypatch):
    monkeypatch.setattr(measure, "interleave", lambda *args, **kwargs: {"read": np.array([0.5, 0.5])})
    assert measure.read_bandwidth(1 << 20) == (1 << 20) / 0.5
