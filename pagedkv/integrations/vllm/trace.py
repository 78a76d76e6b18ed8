"""What vLLM's block manager did, step by step, and the same steps on ours.

A trace is a text file of JSON lines (`.jsonl`, or `.jsonl.gz`). The first describes the pool, each other one a step:
what was asked (`Step`) and all that could be seen of vLLM's pool afterwards (`Outcome`). `oracle` writes them.

vLLM never hands out its block 0 (the null block), so its blocks 1, 2, … are our 0, 1, …; and its hashes are other
numbers than our digests. `replay` speaks of ours in vLLM's terms: equal outcomes are equal Python values.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from ...allocator import PoolExhausted
from ...manager import BlockManager

FORMAT = "pagedkv-vllm-trace-1"
STORY = Path(__file__).with_name("story.jsonl")  # a short trace to read: every rule of the queue comes up
OPS = ("start", "extend", "free", "reset")
NULL_BLOCKS = 1  # vLLM's block 0


@dataclass(frozen=True)
class Outcome:
    """All that can be seen of a pool after a step, in plain data; block ids are vLLM's."""

    granted: bool  # False: too few free blocks (reset: some are in use), and nothing changed
    hit: int  # tokens of the prompt that were found in the cache
    new: list[int]  # blocks that the step took
    tables: dict[str, list[int]]  # of every sequence
    queue: list[int]  # free blocks in the order in which they will be handed out
    owners: list[int]  # of blocks 1, 2, …
    hashes: dict[int, str]  # of the blocks that can be found: eight hex digits


@dataclass(frozen=True)
class Step:
    """One call, and what vLLM made of it.

    `start` looks a prompt up and makes room for `count` tokens behind its hit; `extend` makes room for `tokens`, the
    next ones of the prompt or sampled ones; what there is room for counts as computed. `free` forgets a sequence,
    `reset` the prefix cache.
    """

    op: str
    seq: str | None
    tokens: list[int]
    count: int
    salt: str | None
    outcome: Outcome


@dataclass(frozen=True)
class Trace:
    """The steps of one pool; `num_blocks` is vLLM's number, the null block included."""

    num_blocks: int
    block_size: int
    steps: list[Step]
    vllm: str = ""  # the version that made it


# Files


def read_trace(path: str | Path = STORY) -> Trace:
    """Read a trace. ValueError, which names the file and line, if it is none."""
    path, number = Path(path), 1
    try:
        data = path.read_bytes()
        lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode().splitlines() or [""]
        head, steps = json.loads(lines[0]), []
        if head.get("format") != FORMAT:
            raise ValueError(f"format {head.get('format')!r}; known is {FORMAT!r}")
        for line in lines[1:]:
            number += 1
            steps.append(_step(json.loads(line)))
        return Trace(head["num_blocks"], head["block_size"], steps, head["vllm"])
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}, line {number}: no trace of vLLM ({error})") from error


def write_trace(path: str | Path, trace: Trace) -> None:
    """Write a trace; the same trace gives the same bytes."""
    head = {"format": FORMAT, "vllm": trace.vllm}
    head |= {"num_blocks": trace.num_blocks, "block_size": trace.block_size}
    lines = [json.dumps(line) for line in (head, *map(asdict, trace.steps))]
    data = "\n".join([*lines, ""]).encode()
    path = Path(path)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _step(line: dict) -> Step:
    outcome = Outcome(**line.pop("outcome"))
    hashes = {int(block): digest for block, digest in outcome.hashes.items()}  # JSON knows strings only
    step = Step(**line, outcome=Outcome(**(vars(outcome) | {"hashes": hashes})))
    if step.op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {step.op!r}")
    return step


# Ours beside vLLM's


def replay(trace: Trace, manager: BlockManager | None = None) -> Iterator[tuple[Step, Outcome]]:
    """Do the steps of a trace on a manager of ours, one after the other.

    Args: manager: an empty one with a prefix cache and one block less than the trace; None makes one.
    Yields: each step, and what ours made of it: compare with `step.outcome`.
    """
    if manager is None:
        manager = BlockManager(trace.num_blocks - NULL_BLOCKS, trace.block_size, prefix_cache=True)
    if (manager.num_blocks, manager.block_size) != (trace.num_blocks - NULL_BLOCKS, trace.block_size):
        raise ValueError(
            f"the trace is of {trace.num_blocks - NULL_BLOCKS} blocks of {trace.block_size}, "
            f"the manager has {manager.num_blocks} of {manager.block_size}"
        )
    names: dict[str, str] = {}
    before: dict[str, list[int]] = {}
    for step in trace.steps:
        granted, hit = _carry_out(manager, step)
        tables = _tables(manager)
        known = len(before.get(step.seq, ())) + hit // manager.block_size
        new = tables.get(step.seq, [])[known:] if granted else []
        queue = [block + NULL_BLOCKS for block in manager.allocator.queue()]
        owners = manager.allocator.ref_counts.tolist()
        hashes = _named(_digests(manager), step.outcome.hashes, names)
        yield step, Outcome(granted, hit, new, tables, queue, owners, hashes)
        before = tables


def differences(theirs: Outcome, ours: Outcome) -> list[str]:
    """What of two outcomes is not equal, as sentences."""
    pairs = [(f.name, getattr(theirs, f.name), getattr(ours, f.name)) for f in fields(Outcome)]
    return [f"{name}: vLLM's {a}, ours {b}" for name, a, b in pairs if a != b]


def first_difference(trace: Trace, manager: BlockManager | None = None) -> str | None:
    """The first step in which ours and vLLM's are not equal, with what is not; None if there is none."""
    number = 0
    try:
        for number, (step, ours) in enumerate(replay(trace, manager), 1):
            wrong = differences(step.outcome, ours)
            if wrong:
                return f"step {number}, {step.op} {step.seq}: {'; '.join(wrong)}"
    except (KeyError, ValueError) as error:
        if number == 0:
            raise
        return f"step {number + 1}: ours will not do it: {error}"
    return None


def _carry_out(manager: BlockManager, step: Step) -> tuple[bool, int]:
    """Do one step; returns whether it was granted, and how many tokens were found."""
    if step.op == "reset":
        return manager.reset_prefix_cache(), 0
    if step.op == "free":
        manager.free([step.seq])
        return True, 0
    hit, count = 0, len(step.tokens)
    if step.op == "start":
        manager.add(step.seq, tokens=step.tokens, cache_salt=step.salt)
        hit, count = manager.match(step.seq), step.count
    try:
        manager.extend([step.seq], count)
    except PoolExhausted:
        if step.op == "start":
            manager.free([step.seq])
        return False, hit
    # vLLM lets a block be found in the step that makes room for its last token
    manager.commit(step.seq, None if step.op == "start" else step.tokens)
    return True, hit


def _tables(manager: BlockManager) -> dict[str, list[int]]:
    """The blocks of every sequence, by vLLM's ids."""
    ids = manager.seq_ids
    indptr, blocks, _ = manager.to_csr(ids)
    blocks, ends = (blocks + NULL_BLOCKS).tolist(), indptr.tolist()
    return {seq: blocks[start:end] for seq, start, end in zip(ids, ends, ends[1:], strict=False)}


def _digests(manager: BlockManager) -> dict[int, str]:
    """The digest of every block that can be found, by vLLM's ids."""
    found = np.flatnonzero(manager.is_cached(np.arange(manager.num_blocks))).tolist()
    return {block + NULL_BLOCKS: manager.prefix_index.link(block).digest.hex() for block in found}


def _named(digests: dict[int, str], theirs: dict[int, str], names: dict[str, str]) -> dict[int, str]:
    """Our digests by vLLM's names for them.

    A digest gets the name of the hash that vLLM has where it first comes up, unless that is the name of another:
    so all hashes are equal only if each digest stands for one hash and each hash for one digest.
    """
    for block, digest in digests.items():
        name = theirs.get(block)
        if digest not in names and name is not None and name not in names.values():
            names[digest] = name
    return {block: names.get(digest, f"ours {digest[:8]}") for block, digest in digests.items()}
