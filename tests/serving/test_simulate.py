"""Serving on a simulated clock."""

import json

import numpy as np
import pytest
from needs import STRESS

from pagedkv import BlockManager
from pagedkv.serving import Request, StepTime, simulate
from pagedkv.serving.simulate import Simulation


def test_one_request_by_hand():
    """A prompt of 100 tokens and five new ones: one step with the prompt, four more."""
    result = simulate([Request("a", num_tokens=100, max_new_tokens=5, arrival=2.0)], BlockManager(10, 16))
    assert result.ttft == pytest.approx([0.0245 + 100 * 94e-6])
    assert result.tpot == pytest.approx([0.0245])
    assert result.latency == pytest.approx(result.ttft + 4 * 0.0245)
    assert (result.steps, result.events, result.prefill_tokens, result.decode_tokens) == (5, 2, 100, 4)


def test_a_preempted_request_by_hand():
    """Three fill the pool; the last gives way after its first token and goes on when the others have finished."""
    requests = [Request(name, num_tokens=8, max_new_tokens=5) for name in "abc"]
    result = simulate(requests, BlockManager(6, 4), StepTime(1.0, 0.0), watermark=0.0)
    assert result.ids == ["a", "b", "c"]
    assert result.ttft.tolist() == [1, 1, 1]
    assert result.latency.tolist() == [5, 5, 9]
    assert result.tpot.tolist() == [1, 1, 2]
    assert result.preemptions.tolist() == [0, 0, 1]
    assert (result.prefill_tokens, result.recomputed_tokens, result.decode_tokens) == (24 + 9, 8, 4 + 4 + 3)


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


def test_skipping_to_the_next_event_changes_nothing():
    """Every step on its own gives the same times as many at once."""
    random = np.random.default_rng(3)
    lengths, arrivals = (
        random.integers(1, 60, (80, 2)).tolist(),
        random.exponential(0.5, 80).cumsum().tolist(),
    )
    requests = [
        Request(i, num_tokens=n, max_new_tokens=new, arrival=arrival, num_samples=1 + i % 2)
        for i, ((n, new), arrival) in enumerate(zip(lengths, arrivals, strict=True))
    ]
    step_time = StepTime(0.02, 0.001, 0.0005)
    results = []
    for most in (None, 1):
        simulation = Simulation(requests, BlockManager(60, 4), step_time, token_budget=64)
        if most is not None:
            simulation.scheduler.repeat = lambda step, times: step
        results.append(simulation.run())
    skipping, stepping = results
    assert skipping.ids == stepping.ids
    for name in ("ttft", "latency", "tpot", "preemptions"):
        np.testing.assert_allclose(getattr(skipping, name), getattr(stepping, name))
    assert skipping.preemptions.sum() > 10
    assert skipping.steps == stepping.steps == stepping.events > 1.2 * skipping.events
    assert skipping.means()["blocks"] == pytest.approx(stepping.means()["blocks"], rel=0.02)


# --- against a measured run: Llama 3.1 8B in vLLM 0.19 on an RTX 4090


@pytest.fixture(scope="module")
def measured(shared_traces):
    """A run that others measured: per-request times and what the server told about itself every second."""
    folder = shared_traces / "vllm_rtx4090"
    rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text("utf-8").splitlines()]
    first = np.array([row["first_token_ts"] for row in rows])
    last = np.array([row["last_token_ts"] for row in rows])
    queued = np.array([row["queued_ts"] for row in rows])
    return {
        "ttft": np.mean(first - queued),
        "latency": np.mean(last - queued),
        "tpot": np.mean((last - first) / (np.array([row["output_toks"] for row in rows]) - 1)),
        "series": np.genfromtxt(folder / "timeseries.csv", delimiter=",", names=True),
    }


def simulated(folder, prefix_cache):
    """The same requests on the simulated clock: the server's pool, its scheduler's settings, its step time."""
    lines = (folder / "vllm_rtx4090" / "workload_blocks16.jsonl").read_text("utf-8").splitlines()
    requests = [
        Request(
            row["request_id"],
            num_tokens=row["input_length"],
            max_new_tokens=row["output_length"],
            arrival=row["timestamp"],
            block_hashes=row["hash_ids"],
        )
        for row in map(json.loads, lines)
    ]
    manager = BlockManager(2587, 16, prefix_cache=prefix_cache)  # of 2,588 one is reserved
    options = {"max_batch": 256, "token_budget": 2048, "watermark": 0.0}
    result = simulate(requests, manager, StepTime(24.5e-3, 94e-6), **options)
    assert manager.num_free == manager.num_blocks and len(result.ids) == 300
    return result


def errors(result, measured):
    """How far a simulation is off: shares of the mean times, and mean distances second by second."""
    means, series, observed = result.means(), result.series.means(), measured["series"]
    off = {name: abs(means[name] / measured[name] - 1) for name in ("ttft", "latency", "tpot")}
    seconds = np.arange(len(observed))
    running, blocks = (
        np.interp(seconds, series["time"], series[name], right=0) for name in ("running", "blocks")
    )
    off["running"] = np.abs(running - observed["running"]).mean()
    off["blocks"] = np.abs(100 * blocks / 2587 - observed["kv_cache_pct"]).mean()
    return off


def test_a_measured_run_is_met_without_fitting_and_worse_without_prefix_caching(shared_traces, measured):
    off = errors(simulated(shared_traces, True), measured)
    assert max(off["ttft"], off["latency"], off["tpot"]) < 0.03
    assert off["running"] < 2
    assert off["blocks"] < 4  # points of 100
    without = errors(simulated(shared_traces, False), measured)
    assert {name for name in off if without[name] <= off[name]} == set()


# --- a long trace


def conversations(folder, n):
    """The first requests of the Mooncake conversation trace, read as they are asked for."""
    with open(folder / "mooncake" / "conversation_trace.jsonl", encoding="utf-8") as lines:
        for i, row in zip(range(n), map(json.loads, lines), strict=False):
            yield Request(
                i,
                num_tokens=row["input_length"],
                max_new_tokens=row["output_length"],
                arrival=row["timestamp"] / 1000,
                block_hashes=row["hash_ids"][: row["input_length"] // 512],
            )


def test_a_long_trace_in_bounded_memory_and_at_a_flat_cost(shared_traces):
    """A tenth of 12,031 requests of 12,000 tokens (all under PAGEDKV_STRESS=1), on a server that keeps up."""
    n = 12_031 if STRESS else 1_203
    events = []  # so far, whenever another fifth of the requests has arrived

    def arriving():
        for i, request in enumerate(conversations(shared_traces, n)):
            if i and i % (n // 5) == 0:
                events.append(simulation._counts["events"])
            yield request

    manager = BlockManager(10_000, 512, prefix_cache=True)
    simulation = Simulation(arriving(), manager, StepTime(24.5e-3, 1e-5), token_budget=8192)
    result = simulation.run()
    assert len(result.ids) == n and result.refused == []
    assert simulation.scheduler.unfinished == 0 and manager.num_free == manager.num_blocks
    assert len(manager.prefix_index) <= manager.num_blocks
    assert result.steps > 3 * result.events, "most steps are skipped over"
    first, *others = np.diff(events)
    assert max(others) < 1.3 * first, "no more events per request as the trace grows"
