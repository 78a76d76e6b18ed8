"""The pretended computer of lesson 12, and the measured results that it shows."""

import json
from importlib.resources import files

import numpy as np
import pytest

from pagedkv.bench import SHAPES
from pagedkv.bench.measure import TOLERANCE
from pagedkv.teach.machine import Machine, neighbour_from, spells


def took(pc, call, *args):
    started = pc.clock()
    call(*args)
    return pc.clock() - started


def test_a_call_is_cold_after_another_kernel_and_after_a_pause():
    pc = Machine(cold=30)
    a, b = pc.kernel("a", 10), pc.kernel("b", 12)
    assert [took(pc, call) for call in (a, a, b, b, a)] == [40, 10, 42, 12, 40]
    pc.sleep(5)
    assert took(pc, a) == 40


def test_memory_costs_extra_when_it_is_first_written_to():
    pc = Machine(fault=40)
    a, room = pc.kernel("a", 10, np.arange(3)), np.empty(3)
    assert [took(pc, a, room), took(pc, a, room)] == [50, 10]
    assert room.tolist() == [0, 1, 2]
    assert [took(pc, a, np.empty(3)) for _ in range(5)] == [50] * 5  # also where an address could come again


def test_a_neighbour_slows_down_what_begins_after_he_came():
    pc = Machine(load=neighbour_from(15, factor=2))
    a = pc.kernel("a", 10)
    assert [took(pc, a) for _ in range(3)] == [10, 10, 20]
    assert [(name, ms) for name, ms in pc.log if name == "a"] == [("a", 10), ("a", 10), ("a", 20)]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_spells_are_slow_for_about_their_share_and_the_same_every_time(share):
    load, again = spells(share, seed=4), spells(share, seed=4)
    speeds = [load(now) for now in range(0, 100_000, 50)]
    assert speeds == [again(now) for now in range(0, 100_000, 50)]
    assert set(speeds) <= {1, 3}
    assert abs(speeds.count(3) / len(speeds) - share) < 0.04


def test_the_stored_results_are_right_and_of_the_shapes_that_the_package_has():
    stored = json.loads(files("pagedkv.teach").joinpath("measured.json").read_text("utf-8"))
    assert {row["shape"] for row in stored["rows"]} == {"b8", "c"}
    for row in stored["rows"]:
        assert row["error"] <= TOLERANCE
        assert row["num_tokens"] == sum(SHAPES[row["shape"]].lengths)
        assert row["p20"] <= row["seconds"] <= row["p80"]
    assert {"processor", "blas_kernel", "load", "numpy"} <= set(stored["machine"])
    assert {"lengths", "batches", "block_sizes", "beam_widths"} <= set(stored["sweeps"])
