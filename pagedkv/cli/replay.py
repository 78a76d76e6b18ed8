"""`pagedkv replay`: how many blocks, and of which size, recorded traffic needs."""

import argparse
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from ..serving import replay as replays
from ..serving.replay import LRUReplay, ManagerReplay, SessionRates, Traffic, Unique
from ..serving.report import Findings, report, write
from ..serving.simulate import StepTime
from ..serving.traces import FORMATS, Trace, TraceError, TraceRequest, check_block_size
from .common import FAILED, MISUSED, complain, number

EACH_PASS = "{desc}: {percentage:3.0f}%|{bar}| {elapsed} so far, {remaining} to go"


def add(commands) -> None:
    parser = commands.add_parser(
        "replay",
        help="say how many blocks, and of which size, recorded traffic needs",
        description="Replays TRACE, a file of requests that somebody recorded, in pools of several sizes: what each "
        "pool would remember of earlier prompts, and, on a clock of its own, who would have waited. No model runs. "
        "The report goes to standard output.",
        epilog="formats: mooncake and vllm (JSON lines with hash_ids), agentic (JSON, a session a line), azure and "
        "sharegpt (CSV), lengths (JSON lines or CSV of any lengths); gzip as well. "
        "example: pagedkv replay conversation_trace.jsonl --num-blocks 1024,4096,16384 --out report",
    )
    parser.add_argument("trace", metavar="TRACE", help="the file; it is read line by line")
    reading = parser.add_argument_group("the trace")
    reading.add_argument("--format", choices=FORMATS, help="default: told from the first lines")
    reading.add_argument("--skip-bad", action="store_true", help="leave damaged lines out and count them")
    reading.add_argument("--limit", type=number(0), metavar="N", help="read N requests only")
    reading.add_argument(
        "--id-tokens", type=number(1), metavar="N", help="tokens per hash id, if the lines do not tell"
    )
    pools = parser.add_argument_group("the pools")
    pools.add_argument(
        "--block-size",
        type=listed(number(1)),
        metavar="B,…",
        help="tokens in a block (default: the trace's, or 16)",
    )
    pools.add_argument(
        "--num-blocks",
        type=listed(size_of_pool),
        metavar="M,…",
        help="blocks in the pool; N%% means that share of the trace's different blocks, which are counted in memory "
        "first (default: doublings from the longest request on; of those the clock takes every second)",
    )
    pools.add_argument(
        "--policy",
        choices=("manager", "lru"),
        default="manager",
        help="manager: the engine's block manager; lru: a plain list of blocks, touched head first, to compare with",
    )
    pools.add_argument(
        "--count",
        choices=replays.COUNTS,
        help="tokens: full blocks only, as an engine does; ids: every id is a block, as published tables count "
        "(default: tokens; lru: ids)",
    )
    clock = parser.add_argument_group("the clock")
    clock.add_argument("--hits-only", action="store_true", help="no clock: hits and waste only, much quicker")
    clock.add_argument(
        "--preempt", choices=("recompute", "swap"), default="recompute", help="who gives way …"
    )
    clock.add_argument(
        "--rate", type=positive, metavar="R", help="requests per second, in place of the trace's own times"
    )
    clock.add_argument(
        "--step-ms",
        type=positive,
        default=24.5,
        metavar="T",
        help="milliseconds of a step (default %(default)s)",
    )
    clock.add_argument(
        "--prefill-us",
        type=positive,
        default=94.0,
        metavar="T",
        help="microseconds more per token of a prompt (default %(default)s: Llama 3.1 8B on an RTX 4090)",
    )
    clock.add_argument(
        "--max-batch", type=number(1), default=256, metavar="N", help="sequences at once (default 256)"
    )
    clock.add_argument(
        "--token-budget", type=number(1), default=2048, metavar="N", help="tokens a step (default 2048)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write report.txt, results.json and charts there"
    )
    parser.set_defaults(run=run)


def listed(one):
    """An argparse type: values of type `one` with commas between them, each once."""

    def values(text: str) -> list:
        return list(dict.fromkeys(one(part.strip()) for part in text.split(",")))

    return values


def size_of_pool(text: str) -> int | str:
    """Blocks, or a percentage of the trace's different blocks."""
    if not text.endswith("%"):
        return number(1)(text)
    share = positive(text[:-1])
    if share > 100:
        raise argparse.ArgumentTypeError(f"a share of the trace's blocks is at most 100%, not {text}")
    return text


def positive(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"a number above 0 is needed, not {text!r}")
    return value


def run(options: argparse.Namespace) -> int:
    if options.out is not None and importlib.util.find_spec("matplotlib") is None:
        return complain("replay", 'charts need matplotlib: pip install "pagedkv[bench]"', FAILED)
    if options.policy == "lru" and options.count == "tokens":
        return complain("replay", "--policy lru counts ids: it knows no tokens", MISUSED)
    try:
        trace = Trace(
            options.trace,
            options.format,
            skip_bad=options.skip_bad,
            limit=options.limit,
            id_tokens=options.id_tokens,
        )
        found = found_in(trace, options)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
    except TraceError as error:
        one_line = ", line " in str(error) and not options.skip_bad
        hint = " (--skip-bad leaves damaged lines out)" if one_line else ""
        return complain("replay", f"{error}{hint}", FAILED)
    except OSError as error:
        return complain("replay", f"{error.filename}: {error.strerror}", FAILED)
    except ValueError as error:
        return complain("replay", error, MISUSED)
    print(report(found))
    if options.out is not None:
        write(found, options.out)
    return 0


# ---- the work -------------------------------------------------------------------------------------------------


def found_in(trace: Trace, options: argparse.Namespace) -> Findings:
    """Read the trace once to know it, once for the hits, and once for each pool on the clock."""
    first = Traffic()
    replays.feed_all(watched(trace, "reading"), [first])
    if not first.requests:
        raise TraceError(f"{trace.path.name} holds no requests")
    id_tokens = max(first.id_tokens)
    sizes = options.block_size or [id_tokens if id_tokens > 1 else 16]
    for size in sizes:
        for tokens in first.id_tokens:
            check_block_size(size, tokens)
    if options.policy == "lru" and not id_tokens:
        raise ValueError(
            "the trace does not tell which blocks its prompts share: there is nothing to look up"
        )
    pools = {size: pools_of(size, trace, first, options) for size in sizes}
    traffic = Traffic(sizes)
    found = Findings(trace, traffic)
    hits = []
    if id_tokens:
        hits = [replay_in(size, blocks, options) for size in sizes for blocks in pools[size]]
    sessions = [SessionRates()] if trace.format == "agentic" else []
    replays.feed_all(watched(trace, "hits" if hits else "waste"), [traffic, *hits, *sessions])
    found.hits = [replay.hits for replay in hits]
    found.sessions = sessions[0].rates() if sessions else {}
    found.silent = why_silent(traffic, options)
    if not found.silent:
        step_time = StepTime(options.step_ms / 1e3, options.prefill_us / 1e6)
        found.served = [
            replays.serve(
                watched(trace, f"{blocks} blocks of {size}"),
                size,
                blocks,
                rate=options.rate,
                swap=options.preempt == "swap",
                step_time=step_time,
                max_batch=options.max_batch,
                token_budget=options.token_budget,
            )
            for size in sizes
            for blocks in (pools[size] if options.num_blocks else pools[size][::2])
        ]
    return found


def why_silent(traffic: Traffic, options: argparse.Namespace) -> str:
    """Why there is nothing to say about time; empty if there is."""
    if options.hits_only or options.policy == "lru":
        return "Not asked for."
    if traffic.last is None and options.rate is None:
        return "The trace does not tell when requests arrived; --rate R lets R of them come per second."
    return ""


def pools_of(block_size: int, trace: Trace, traffic: Traffic, options: argparse.Namespace) -> list[int]:
    """The numbers of blocks to try, smallest first."""
    if options.num_blocks is None:
        total = traffic.prompt + traffic.output
        return replays.ladder(traffic.longest, total, block_size)
    shares = [size for size in options.num_blocks if isinstance(size, str)]
    unique = 0
    if shares:
        counter = Unique(block_size)
        replays.feed_all(watched(trace, "different blocks"), [counter])
        unique = len(counter)
        if not unique:
            raise ValueError(
                f"the trace does not tell blocks apart, so {shares[0]} of them cannot be counted"
            )
    blocks = {
        max(1, int(unique * float(size[:-1]) / 100)) if isinstance(size, str) else size
        for size in options.num_blocks
    }
    return sorted(blocks)


def replay_in(block_size: int, num_blocks: int, options: argparse.Namespace) -> LRUReplay | ManagerReplay:
    if options.policy == "lru":
        return LRUReplay(block_size, num_blocks)
    return ManagerReplay(block_size, num_blocks, count=options.count or "tokens")


def watched(trace: Trace, title: str) -> Iterator[TraceRequest]:
    """The requests of a trace, with a progress bar where somebody is looking."""
    try:
        from tqdm import tqdm
    except ImportError:  # a bar is a comfort
        yield from trace
        return
    with tqdm(total=trace.size, desc=title, bar_format=EACH_PASS, disable=None, leave=False) as bar:
        for request in trace:
            yield request
            bar.update(trace.position - bar.n)
