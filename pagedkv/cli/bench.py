"""`pagedkv bench`: measure paged attention beside its peers, and compare with the goals."""

import argparse
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

from ..storage import FORMATS
from .common import FAILED, MISUSED, complain, number

QUICK = 8  # --quick: so many times shorter sequences
SEED_THREADS = 1  # the first draft's loop has nothing that threads could do


def add(commands) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure paged attention beside NumPy and torch",
        description="Measures one decode step's attention over shuffled pages beside contiguous NumPy and torch, "
        "then what block size, head dim and beam width do to speed and memory, and the bookkeeping. Every kernel is "
        "checked first. Prints a report; a whole run takes some minutes and up to 5 GB.",
        epilog="examples: pagedkv bench --quick   pagedkv bench --shapes b8 --out results   pagedkv bench --check   "
        "pagedkv bench --model",
    )
    parser.add_argument(
        "--shapes", metavar="A,B", help="shapes to measure: a, b8, b32, c, d16, d64 (default all)"
    )
    parser.add_argument("--peers", metavar="P,Q", help="kernels to measure beside ours (default all)")
    for name, default, what in [
        ("--block-sizes", "4,8,16,32,64,128", "tokens in a block"),
        ("--head-dims", "32,64,128,256", "numbers in a key"),
        ("--beam-widths", "1,4,8,16,32", "beams over one prompt"),
    ]:
        parser.add_argument(name, metavar="N,M", help=f"{what}; none leaves it out (default {default})")
    parser.add_argument("--dtypes", metavar="T,U", help="storage types of our pages (default all)")
    parser.add_argument("--threads", metavar="N,M", help="threads that kernels may use (default 1 and 2)")
    parser.add_argument(
        "--seconds",
        type=positive,
        metavar="S",
        help="to measure each shape for (default 6; with --quick 0.2)",
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"sequences {QUICK} times shorter: to see that it works"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write results.json, report.md and charts there"
    )
    parser.add_argument(
        "--model", action="store_true", help="the shipped model over both kinds of cache instead"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare with the goals; 1 is returned on a miss"
    )
    parser.add_argument(
        "--vllm-python",
        metavar="PATH",
        help="a Python that has vLLM, to measure its CPU kernel too (default $PAGEDKV_VLLM_PYTHON)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    for module in ("threadpoolctl", "tqdm", *(["matplotlib"] if options.out else [])):
        if importlib.util.find_spec(module) is None:
            return complain("bench", f'{module} is not installed: pip install "pagedkv[bench]"', FAILED)
    from ..bench.vllm_peer import PeerFailed

    try:
        asked = Asked(options)
    except ValueError as error:
        return complain("bench", error, MISUSED)
    try:
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)  # before minutes of measuring
        results = asked.measured()
    except OSError as error:
        return complain("bench", error, MISUSED)
    except PeerFailed as error:
        return complain("bench", error, FAILED)
    except MemoryError as error:
        return complain(
            "bench", f"{error or 'not enough memory'}; ask for fewer shapes with --shapes", FAILED
        )
    return told(results, options)


def told(results: dict, options: argparse.Namespace) -> int:
    """Print and write what was found; the exit code."""
    from ..bench import report
    from ..bench.goals import judge

    shapes = {row.shape for row in results["rows"]}
    verdicts = [v for v in judge(results) if v.goal.shape in {None, *shapes}] if options.check else []
    print(report.markdown(results, verdicts), end="", flush=True)
    if options.out:
        import matplotlib

        from ..bench import charts

        matplotlib.use("agg")
        report.write(results, verdicts, options.out)
        charts.draw(results, options.out)
    wrong = report.wrong(results)
    missed = [v.goal.name for v in verdicts if v.ok is False]
    for reasons, what in ((wrong, "wrong results"), (missed, "goals missed")):
        if reasons:
            complain("bench", f"{what}: {'; '.join(reasons)}", FAILED)
    return FAILED if wrong or missed else 0


class Asked:
    """The request, checked: which parts to measure, of what, for how long. ValueError names what is wrong."""

    def __init__(self, options: argparse.Namespace):
        from ..bench import PEERS, SHAPES
        from ..bench.vllm_peer import VARIABLE

        if options.check and options.quick:
            raise ValueError("--check needs the shapes in full; leave --quick out")
        cores = os.cpu_count() or 1
        kernels = options.check or not options.model
        sweeps = kernels and not options.check
        quick = options.quick
        self.shapes = chosen("--shapes", options.shapes, SHAPES) if kernels else []
        self.peers = ["paged", *chosen("--peers", options.peers, PEERS)]
        self.peers = list(dict.fromkeys(self.peers))
        self.dtypes = ["float32", *chosen("--dtypes", options.dtypes, FORMATS)]
        self.dtypes = list(dict.fromkeys(self.dtypes))
        self.threads = numbers("--threads", options.threads, "1,2" if cores > 1 and not quick else "1", cores)
        self.block_sizes = (
            numbers("--block-sizes", options.block_sizes, "4,8,16,32,64,128", 1024) if sweeps else []
        )
        self.head_dims = numbers("--head-dims", options.head_dims, "32,64,128,256", 1024) if sweeps else []
        self.beam_widths = numbers("--beam-widths", options.beam_widths, "1,4,8,16,32", 256) if sweeps else []
        self.sweeps, self.kernels, self.model = sweeps, kernels, options.model
        self.seconds = options.seconds or (0.2 if quick else 6.0)
        self.shrink = QUICK if quick else 1
        if options.vllm_python:
            if not Path(options.vllm_python).is_file():
                raise ValueError(f"--vllm-python: there is no {options.vllm_python}")
            os.environ[VARIABLE] = options.vllm_python

    def measured(self) -> dict:
        """Everything, part after part, with a bar on standard error."""
        from tqdm import tqdm

        from ..bench import PEERS, machine, read_bandwidth

        gone = [reason for peer in self.peers if (reason := PEERS[peer].absent)]
        for reason in gone:
            print(reason, file=sys.stderr)
        self.peers = [peer for peer in self.peers if not PEERS[peer].absent]
        results = {
            "machine": machine(),
            "read_bandwidth": read_bandwidth(rounds=3 if self.shrink > 1 else 9),
            "rows": [],
            "sweeps": {},
            "bookkeeping": [],
            "model": [],
            "absent": gone,
        }
        self.read_bandwidth, stages = results["read_bandwidth"], self.stages()
        with tqdm(
            total=len(stages), disable=None, bar_format="{desc:<24} {bar} {elapsed}<{remaining}"
        ) as bar:
            for i, (name, stage) in enumerate(stages):
                bar.set_description_str(name)
                stage(results, lambda share, i=i: (setattr(bar, "n", i + share), bar.refresh()))
                bar.n = i + 1
        return results

    def stages(self) -> list[tuple[str, Callable]]:
        """Name and work of every part; the work is given the results to add to and whom to tell how far it is."""
        found = [(f"shape {name}", self._shape(name)) for name in self.shapes]
        found += [("bookkeeping", self._bookkeeping)] if self.kernels else []
        found += self._sweeps() if self.sweeps else []
        return found + ([("model", self._model)] if self.model else [])

    def _shape(self, name: str):
        from ..bench import SHAPES, Workload, compare

        def stage(results, after_round):
            shape = SHAPES[name]
            workload = Workload(shape.smaller(self.shrink) if self.shrink > 1 else shape)
            for i, threads in enumerate(self.threads):
                peers = [p for p in self.peers if p != "seed" or threads == SEED_THREADS]
                peers = [p for p in peers if p != "paged-ungrouped" or shape.prefix]
                results["rows"] += compare(
                    workload,
                    peers,
                    threads=threads,
                    dtypes=self.dtypes,
                    seconds=self.seconds,
                    bandwidth=self.read_bandwidth,
                    after_round=lambda share, i=i: after_round((i + share) / len(self.threads)),
                )

        return stage

    def _bookkeeping(self, results, after_round):
        from ..bench import bookkeeping

        rounds = 2 if self.shrink > 1 else 12
        results["bookkeeping"] = bookkeeping.rows(rounds)

    def _sweeps(self):
        from ..bench import SHAPES, bookkeeping, sweeps

        shape = SHAPES["b8"].smaller(self.shrink) if self.shrink > 1 else SHAPES["b8"]
        even = shape.__class__("even", (1024 // self.shrink,) * 4, 32, 8, 128)
        beams = [p for p in ("paged", "paged-ungrouped", "torch-rows") if p in self.peers]

        def work(name, sweep, *args, **options):
            def stage(results, after_round):
                results["sweeps"][name] = sweep(
                    *args, seconds=self.seconds, after_round=after_round, **options
                )

            return (TITLES[name], stage)

        def books(results, after_round):
            batches = [1, 4, 16, 64, 256] if self.shrink > 1 else [1, 64, 128, 256, 512, 1024]
            results["sweeps"]["bookkeeping"] = bookkeeping.per_batch(batches, 2 if self.shrink > 1 else 12)

        long = [n // self.shrink for n in (512, 1024, 2048, 3072, 4096)]
        found = [work("lengths", sweeps.lengths, long)]
        found += [work("batches", sweeps.batches, [1, 2, 4, 8, 16], length=1024 // self.shrink)]
        if self.block_sizes:
            found.append(work("block_sizes", sweeps.block_sizes, shape, self.block_sizes))
        if self.head_dims:
            found.append(work("head_dims", sweeps.head_dims, even, self.head_dims))
        if self.beam_widths:
            prefix = 2048 // self.shrink
            found.append(work("beam_widths", sweeps.beam_widths, self.beam_widths, beams, prefix=prefix))
        return [*found, (TITLES["bookkeeping"], books)]

    def _model(self, results, after_round):
        from ..bench.model import compare_caches

        quick = self.shrink > 1
        for i, batch in enumerate((1, 4) if quick else (1, 8, 32)):
            results["model"].append(
                compare_caches(
                    batch,
                    steps=4 if quick else 48,
                    rounds=1 if quick else 4,
                    after_round=lambda share, i=i: after_round((i + share) / 3),
                )
            )


TITLES = {
    "lengths": "lengths",
    "batches": "batches",
    "block_sizes": "block sizes",
    "head_dims": "head dims",
    "beam_widths": "beam widths",
    "bookkeeping": "bookkeeping by batch",
}


# --- what options may say


def chosen(option: str, text: str | None, known) -> list[str]:
    """Names from a list with commas; all of `known` without one, none for "none"."""
    if text is None:
        return list(known)
    if text == "none":
        return []
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(f"{option}: there is no {name!r}; there are {', '.join(known)}")
    return list(dict.fromkeys(names))


def numbers(option: str, text: str | None, default: str, largest: int) -> list[int]:
    """Whole numbers of 1 … largest from a list with commas, smallest first; none for "none"."""
    text = default if text is None else text
    if text == "none":
        return []
    try:
        found = sorted({number(1)(part.strip()) for part in text.split(",")})
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{option}: {error}") from None
    if found[-1] > largest:
        raise ValueError(f"{option}: {found[-1]} is more than {largest}")
    return found


def positive(text: str) -> float:
    """An argparse type: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"a number above 0 is needed, not {text!r}")
    return value
