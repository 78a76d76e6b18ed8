"""Serving on a simulated clock."""

import numpy as np
import pytest

from pagedkv import BlockManager
from pagedkv.serving import Request, StepTime, simulate


def test_one_request_by_hand():
    """A prompt of 100 tokens and five new ones: one step with the prompt, four more."""
    result = simulate([Request("a", num_tokens=100, max_new_tokens=5, arrival=2.0)], BlockManager(10, 16))
    assert result.ttft == pytest.approx([0.0245 + 100 * 94e-6])
    assert result.tpot == pytest.approx([0.0245])
    assert result.latency == pytest.approx(result.ttft + 4 * 0.0245)
    assert (result.steps, result.events, result.prefill_tokens, result.decode_tokens) == (5, 2, 100, 4)


def test_a_request_that_could_never_fit_is_refused_and_counted():
    requests = [Request("big", num_tokens=100), Request("small", num_tokens=10)]
    result = simulate(requests, BlockManager(4, 4), StepTime())
    assert (result.ids, result.refused) == (["small"], ["big"])


def test_requests_out_of_order_are_refused():
    requests = [Request("a", num_tokens=1, arrival=2.0), Request("b", num_tokens=1, arrival=1.0)]
    with pytest.raises(ValueError, match="'b' arrives at 1"):
        simulate(requests, BlockManager(4, 4))


def test_the_series_covers_the_whole_time_in_bounded_memory():
    requests = [Request(i, num_tokens=8, max_new_tokens=8, arrival=100.0 * i) for i in range(100)]
    result = simulate(requests, BlockManager(8, 4))
    series = result.series.means()
    assert len(series["time"]) <= 2048 and series["time"][-1] < result.seconds
    share_of_time = 100 * result.latency[0] / result.seconds
    assert result.means()["running"] == pytest.approx(share_of_time)
    assert np.mean(series["running"][:-1]) == pytest.approx(share_of_time, rel=0.05)
