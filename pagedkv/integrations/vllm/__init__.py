"""vLLM: its own block manager beside ours, and our page store as its external KV cache.

What stands here needs NumPy only. `oracle` and `connector` are for a Python that has vLLM (written for 0.32), where
pagedkv is installed too.
"""

from .trace import STORY, Outcome, Step, Trace, differences, first_difference, read_trace, replay

__all__ = [
    "Trace",
    "Step",
    "Outcome",
    "STORY",
    "read_trace",
    "replay",
    "differences",
    "first_difference",
]
