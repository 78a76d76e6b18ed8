"""`pagedkv bench`: measure paged attention beside its peers, and compare with the goals."""

import argparse
import importlib.util
import math
import os
import sys
from pathlib import Path

from ..bench import PEERS, SHAPES, charts, report
from ..bench.goals import judge
from ..bench.suite import Suite
from ..bench.vllm_peer import VARIABLE, PeerFailed
from ..storage import FORMATS
from .common import FAILED, MISUSED, complain, number

QUICK = 8  # --quick: so many times shorter sequences


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
    parser.add_argument("--shapes", metavar="A,B", help=f"of {', '.join(SHAPES)} (default all)")
    parser.add_argument("--peers", metavar="P,Q", help=f"of {', '.join(PEERS)} (default all)")
    for name, default, what in [
        ("--block-sizes", "4,8,16,32,64,128", "tokens in a block"),
        ("--head-dims", "32,64,128,256", "numbers in a key"),
        ("--beam-widths", "1,4,8,16,32", "beams over one prompt"),
    ]:
        parser.add_argument(name, metavar="N,M", help=f"{what}; none leaves it out (default {default})")
    parser.add_argument(
        "--dtypes", metavar="T,U", help=f"storage types of our pages, of {', '.join(FORMATS)} (default all)"
    )
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
    try:
        suite = asked(options)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)  # before minutes of measuring
        results = measured(suite)
    except (ValueError, OSError) as error:
        return complain("bench", error, MISUSED)
    except PeerFailed as error:
        return complain("bench", error, FAILED)
    except MemoryError as error:
        return complain(
            "bench", f"{error or 'not enough memory'}; ask for fewer shapes with --shapes", FAILED
        )
    return told(results, options)


def asked(options: argparse.Namespace) -> Suite:
    """The suite that the options mean; ValueError names what is wrong with them."""
    if options.check and options.quick:
        raise ValueError("--check needs the shapes in full; leave --quick out")
    if options.vllm_python:
        if not Path(options.vllm_python).is_file():
            raise ValueError(f"--vllm-python: there is no {options.vllm_python}")
        os.environ[VARIABLE] = options.vllm_python
    cores, quick = os.cpu_count() or 1, options.quick
    kernels = options.check or not options.model
    varied = kernels and not options.check
    suite = Suite(
        shapes=chosen("--shapes", options.shapes, SHAPES),
        peers=first("paged", chosen("--peers", options.peers, PEERS)),
        dtypes=first("float32", chosen("--dtypes", options.dtypes, FORMATS)),
        threads=numbers("--threads", options.threads, "1,2" if cores > 1 and not quick else "1", cores),
        block_sizes=numbers("--block-sizes", options.block_sizes, "4,8,16,32,64,128", 1024),
        head_dims=numbers("--head-dims", options.head_dims, "32,64,128,256", 1024),
        beam_widths=numbers("--beam-widths", options.beam_widths, "1,4,8,16,32", 256),
        scaling=varied,
        books=kernels,
        models=[] if not options.model else [1, 4] if quick else [1, 8, 32],
        seconds=options.seconds or (0.2 if quick else 6.0),
        shrink=QUICK if quick else 1,
    )
    if not kernels:
        suite.shapes = []
    if not varied:
        suite.block_sizes, suite.head_dims, suite.beam_widths = [], [], []
    return suite


def measured(suite: Suite) -> dict:
    """The results, with a bar on standard error while they are made."""
    from tqdm import tqdm

    with tqdm(total=1, disable=None, bar_format="{desc:<24} {bar} {elapsed}<{remaining}") as bar:

        def progress(name: str, done: float) -> None:
            bar.set_description_str(name, refresh=False)
            bar.update(done - bar.n)

        return suite.run(lambda reason: tqdm.write(reason, file=sys.stderr), progress)


def told(results: dict, options: argparse.Namespace) -> int:
    """Print and write what was found; the exit code."""
    shapes = {row.shape for row in results["rows"]}
    verdicts = [v for v in judge(results) if v.goal.shape in {None, *shapes}] if options.check else []
    print(report.markdown(results, verdicts), end="", flush=True)
    if options.out:
        import matplotlib

        matplotlib.use("agg")
        report.write(results, verdicts, options.out)
        charts.draw(results, options.out)
    wrong = report.wrong(results)
    missed = [v.goal.name for v in verdicts if v.ok is False]
    for reasons, what in ((wrong, "wrong results"), (missed, "goals missed")):
        if reasons:
            complain("bench", f"{what}: {'; '.join(reasons)}", FAILED)
    return FAILED if wrong or missed else 0


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


def first(name: str, names: list[str]) -> list[str]:
    """The names with one of them in front, asked for or not: what the others are compared with."""
    return [name, *(other for other in names if other != name)]


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
