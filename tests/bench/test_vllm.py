"""vLLM's kernel runs in another process; with a stand-in where vLLM is not at hand."""

import os
import sys

import pytest

from pagedkv.bench import PEERS, SHAPES, Shape, Workload, compare, vllm_peer
from pagedkv.bench.measure import TOLERANCE, error

SHAPE = Shape("plain", (1, 5, 130), 4, 2, 32, num_layers=2)

STAND_IN = """
import sys, numpy as np
sys.path.insert(0, {folder!r})
import vllm_child

def kernel(query, keys, values, lengths):
    class Out:
        def __init__(self, layer): self.layer = layer
        def numpy(self):
            out = np.empty_like(query)
            for row, n in enumerate(lengths):
                q = query[row].reshape(keys.shape[2], -1, query.shape[2])
                scores = q @ keys[self.layer, row, :, :n].swapaxes(1, 2) * query.shape[2] ** -0.5
                p = np.exp(scores)
                out[row] = (p / p.sum(-1, keepdims=True) @ values[self.layer, row, :, :n]).reshape(query[row].shape)
            return out
    print("a line of log, on standard output")
    return Out

vllm_child.kernel = kernel
vllm_child.main(sys.argv[1], int(sys.argv[2]))
"""


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Another process that speaks like vLLM's and computes with NumPy; needs torch, for its threads."""
    script = tmp_path / "child.py"
    script.write_text(STAND_IN.format(folder=str(vllm_peer.CHILD.parent)), "utf-8")
    monkeypatch.setattr(vllm_peer, "CHILD", script)
    monkeypatch.setenv(vllm_peer.VARIABLE, sys.executable)


@pytest.mark.torch
def test_another_process_gets_the_same_numbers_and_reports_its_own_time(stand_in):
    workload = Workload(SHAPE)
    call = PEERS["vllm"].build(workload)
    assert error(call, *workload.expected()) <= TOLERANCE
    assert 0 < call.timed([0, 1, 0]) < 10
    assert "vllm" not in sys.modules
    process, folder = call.process, call.folder
    del call
    assert process.wait(10) == 0  # it ends with its caller
    assert not folder.exists()


@pytest.mark.torch
def test_it_takes_its_turn_among_the_others(stand_in):
    rows = compare(Workload(SHAPE), ["paged", "vllm"], seconds=0)
    assert [(row.peer, row.correct, len(row.samples) >= 5) for row in rows] == [
        ("paged", True, True),
        ("vllm", True, True),
    ]


def test_its_last_word_is_the_complaint(monkeypatch, tmp_path):
    script = tmp_path / "child.py"
    script.write_text("raise SystemExit('No module named vllm')", "utf-8")
    monkeypatch.setattr(vllm_peer, "CHILD", script)
    monkeypatch.setenv(vllm_peer.VARIABLE, sys.executable)
    with pytest.raises(vllm_peer.PeerFailed, match="gave up: No module named vllm"):
        PEERS["vllm"].build(Workload(SHAPE))


def test_without_a_python_it_is_absent(monkeypatch):
    monkeypatch.delenv(vllm_peer.VARIABLE, raising=False)
    assert "--vllm-python" in PEERS["vllm"].absent
    monkeypatch.setenv(vllm_peer.VARIABLE, sys.executable)
    assert PEERS["vllm"].absent is None


@pytest.mark.skipif(
    vllm_peer.missing() is not None, reason=f"${vllm_peer.VARIABLE} names no Python that has vLLM"
)
@pytest.mark.parametrize("shape", [SHAPE, SHAPES["a"]], ids=lambda shape: shape.name)
def test_the_real_one_is_right(shape):
    assert os.path.isfile(os.environ[vllm_peer.VARIABLE])
    workload = Workload(shape)
    assert error(PEERS["vllm"].build(workload), *workload.expected()) <= TOLERANCE
