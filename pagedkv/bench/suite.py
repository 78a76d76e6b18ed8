"""The whole suite: which parts to measure, of what, for how long; `pagedkv bench` is options for this."""

from collections.abc import Callable
from dataclasses import dataclass

from . import bookkeeping, sweeps
from .compare import compare
from .measure import machine, read_bandwidth
from .model import MIXES, compare_caches
from .peers import PEERS
from .shapes import SHAPES, Shape, Workload

Told = Callable[[float], object]  # told how much of a part is done, 0 … 1


@dataclass
class Suite:
    """What to measure. An empty list leaves a part out.

    Args: shapes, peers: names in SHAPES and PEERS; dtypes: of our pages; threads: one comparison for each;
        block_sizes, head_dims, beam_widths: to vary; scaling: whether to vary length and batch; books: whether to
        measure the bookkeeping; models: batches of the shipped model; seconds: for each comparison; shrink: divides
        lengths.
    """

    shapes: list[str]
    peers: list[str]
    dtypes: list[str]
    threads: list[int]
    block_sizes: list[int]
    head_dims: list[int]
    beam_widths: list[int]
    scaling: bool
    books: bool
    models: list[int]
    seconds: float
    shrink: int = 1

    def run(self, absent: Callable[[str], object], progress: Callable[[str, float], object]) -> dict:
        """Measure everything.

        Args: absent: told of each peer that cannot run here; progress: told the part's name and the share of all
            parts that is done.
        Returns: {machine, read_bandwidth, rows, sweeps, bookkeeping, model, absent}; rows are Rows, the rest plain.
        Raises: PeerFailed if a peer that should run does not.
        """
        gone = [reason for peer in self.peers if (reason := PEERS[peer].absent)]
        for reason in gone:
            absent(reason)
        self.peers = [peer for peer in self.peers if not PEERS[peer].absent]
        results = {"machine": machine(), "read_bandwidth": read_bandwidth(rounds=3 if self.quick else 9)}
        results |= {"rows": [], "sweeps": {}, "bookkeeping": [], "model": [], "absent": gone}
        parts = self.parts()
        for i, (name, work) in enumerate(parts):
            progress(name, i / len(parts))
            work(results, lambda done, n=name, i=i: progress(n, (i + done) / len(parts)))
        progress("done", 1.0)
        return results

    @property
    def quick(self) -> bool:
        return self.shrink > 1

    def parts(self) -> list[tuple[str, Callable[[dict, Told], None]]]:
        """Every part's name and work; the work is given the results to add to, and whom to tell how far it is."""
        parts = [(f"shape {name}", self._compared(name)) for name in self.shapes]
        if self.books:
            parts.append(("bookkeeping", self._bookkeeping))
        if self.scaling:
            long = [n // self.shrink for n in (512, 1024, 2048, 3072, 4096)]
            each = 1024 // self.shrink
            parts.append(self._swept("lengths", sweeps.lengths, long))
            parts.append(self._swept("batches", sweeps.batches, [1, 2, 4, 8, 16], length=each))
            parts.append(("bookkeeping by batch", self._bookkeeping_by_batch))
        if self.block_sizes:
            parts.append(
                self._swept("block_sizes", sweeps.block_sizes, self._sized(SHAPES["b8"]), self.block_sizes)
            )
        if self.head_dims:
            even = self._sized(Shape("even", (1024,) * 4, 32, 8, 128))
            parts.append(self._swept("head_dims", sweeps.head_dims, even, self.head_dims))
        if self.beam_widths:
            peers = [p for p in ("paged", "paged-ungrouped", "torch-rows") if p in self.peers]
            prefix = 2048 // self.shrink
            parts.append(
                self._swept("beam_widths", sweeps.beam_widths, self.beam_widths, peers, prefix=prefix)
            )
        if self.models:
            parts.append(("model", self._models))
        return parts

    def _sized(self, shape: Shape) -> Shape:
        return shape.smaller(self.shrink) if self.quick else shape

    def _compared(self, name: str):
        def work(results: dict, told: Told) -> None:
            workload = Workload(self._sized(SHAPES[name]))
            for i, threads in enumerate(self.threads):
                results["rows"] += compare(
                    workload,
                    [peer for peer in self.peers if _has_a_part(peer, workload.shape, threads)],
                    threads=threads,
                    dtypes=self.dtypes,
                    seconds=self.seconds,
                    bandwidth=results["read_bandwidth"],
                    after_round=lambda done, i=i: told((i + done) / len(self.threads)),
                )

        return work

    def _swept(self, name: str, sweep: Callable, *args, **options):
        def work(results: dict, told: Told) -> None:
            results["sweeps"][name] = sweep(*args, seconds=self.seconds, after_round=told, **options)

        return name.replace("_", " "), work

    def _bookkeeping(self, results: dict, told: Told) -> None:
        results["bookkeeping"] = bookkeeping.rows(2 if self.quick else 12)

    def _bookkeeping_by_batch(self, results: dict, told: Told) -> None:
        batches = [1, 16, 64] if self.quick else [1, 64, 128, 256, 512, 1024]
        results["sweeps"]["bookkeeping"] = bookkeeping.per_batch(batches, 2 if self.quick else 12)

    def _models(self, results: dict, told: Told) -> None:
        size = {"steps": 4, "rounds": 1} if self.quick else {"steps": 48, "rounds": 4}
        wanted = [(batch, mix) for batch in self.models for mix in (MIXES if batch > 1 else ["uniform"])]
        for i, (batch, mix) in enumerate(wanted):
            part = compare_caches(
                batch, mix, **size, after_round=lambda done, i=i: told((i + done) / len(wanted))
            )
            results["model"].append(part)


def _has_a_part(peer: str, shape: Shape, threads: int) -> bool:
    """Whether a peer has something of its own to show: the seed's loop no threads, grouping no lone sequences."""
    return (peer != "seed" or threads == 1) and (peer != "paged-ungrouped" or shape.prefix > 0)
