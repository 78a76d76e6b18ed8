"""vLLM's CPU kernel as a peer: it runs in its own Python, gets the same numbers, and takes its turn in every round.

vLLM wants a torch of its own, so it is no extra of this package. Whoever has it in some environment names that
environment's Python in PAGEDKV_VLLM_PYTHON (`pagedkv bench --vllm-python`). Only the kernel is timed, by the
process that runs it.
"""

import os
import subprocess
import tempfile
import weakref
from pathlib import Path

import numpy as np

from .shapes import Workload

VARIABLE = "PAGEDKV_VLLM_PYTHON"
CHILD = Path(__file__).with_name("vllm_child.py")


class PeerFailed(RuntimeError):
    """A peer that should be there does not run; the message is its last word."""


def missing() -> str | None:
    """Why there is no vLLM to ask, or None."""
    return (
        None if os.environ.get(VARIABLE) else f"name a Python that has it with --vllm-python or ${VARIABLE}"
    )


class VllmKernel:
    """A call for one layer, carried out by another process; `timed` tells what the calls took there."""

    def __init__(self, workload: Workload, threads: int = 1):
        self._folder = tempfile.TemporaryDirectory(prefix="pagedkv-vllm-")
        self.folder = Path(self._folder.name)
        for name in ("query", "keys", "values", "lengths"):
            np.save(self.folder / f"{name}.npy", getattr(workload, name))
        with open(self.folder / "log", "wb") as log:
            self.process = subprocess.Popen(
                [os.environ[VARIABLE], str(CHILD), str(self.folder), str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},  # it has packages of its own
            )
        weakref.finalize(self, _end, self.process)
        self._answer()

    def __call__(self, layer: int) -> np.ndarray:
        self._ask(f"run {layer}")
        return np.load(self.folder / "out.npy")

    def timed(self, layers: list[int]) -> float:
        """Seconds for calls of these layers."""
        return float(self._ask("time " + " ".join(map(str, layers))))

    def _ask(self, line: str) -> str:
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended; its log says why
        return self._answer()

    def _answer(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            lines = (self.folder / "log").read_text("utf-8", errors="replace").strip().splitlines()
            raise PeerFailed(
                f"vllm: {os.environ[VARIABLE]} gave up: {lines[-1] if lines else 'without a word'}"
            )
        return line


def _end(process: subprocess.Popen) -> None:
    process.stdin.close()  # it reads until the end
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
    process.stdout.close()
