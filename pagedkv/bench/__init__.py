"""The benchmark suite: paged attention beside its peers, measured so that the figures can be believed.

`pagedkv bench` runs it; a notebook can call the parts:

    from pagedkv.bench import SHAPES, Workload, compare
    rows = compare(Workload(SHAPES["a"]), ["paged", "numpy-padded"], seconds=0.5)   # one Row per kernel
    rows[0].seconds, rows[0].ns_per_token, rows[0].correct

    from pagedkv.bench import sweeps, charts
    points = sweeps.block_sizes(SHAPES["c"], [4, 16, 64], seconds=0.5)              # a list of plain dicts
    charts.block_sizes(points)                                                      # a matplotlib Figure

Anything else is measured with `interleave([Variant(name, call), …])` and compared with `ratio`. The modules, in
reading order: shapes, peers, measure, compare, sweeps, bookkeeping, model, suite, goals, report, charts. Needs
the extra `bench` (or `course`).
"""

from .compare import Row, compare
from .measure import Variant, interleave, machine, ratio, read_bandwidth
from .peers import PEERS
from .shapes import SHAPES, Shape, Workload

__all__ = [
    "SHAPES",
    "Shape",
    "Workload",
    "PEERS",
    "Variant",
    "interleave",
    "ratio",
    "read_bandwidth",
    "machine",
    "Row",
    "compare",
]
