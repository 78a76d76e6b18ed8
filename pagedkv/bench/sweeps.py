"""One thing varied, the rest held: block size, head dim, beams, length, batch. Each returns a list of plain dicts."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..cache import PagedKVCache
from .compare import bytes_per_vector_pair
from .measure import TOLERANCE, Variant, error, interleave
from .peers import PEERS
from .shapes import Shape, Workload, beams

Told = Callable[[float], object]


def block_sizes(shape: Shape, sizes: Sequence[int], *, seconds=2.0, after_round: Told = lambda _: None):
    """Speed and memory against block size: {block_size, …}.

    Large blocks are fewer and longer copies; each sequence wastes half of one on average.
    """
    workload = Workload(shape)
    calls = {size: PEERS["paged"].build(workload, block_size=size) for size in sizes}
    points = _measured({s: (workload, c) for s, c in calls.items()}, seconds, after_round)
    return [
        {"block_size": size, **point, **memory(workload.cache(block_size=size), shape)}
        for size, point in points.items()
    ]


def head_dims(shape: Shape, dims: Sequence[int], *, seconds=2.0, after_round: Told = lambda _: None):
    """Speed and memory against head dim: {head_dim, …}."""
    workloads = {dim: Workload(replace(shape, head_dim=dim)) for dim in dims}
    points = _measured(_paged(workloads), seconds, after_round)
    return [
        {"head_dim": dim, **point, **memory(workloads[dim].cache(), workloads[dim].shape)}
        for dim, point in points.items()
    ]


def lengths(values: Sequence[int], *, batch=4, seconds=2.0, after_round: Told = lambda _: None):
    """Cost against the length of every sequence: {length, …}."""
    workloads = {n: Workload(Shape("length", (n,) * batch, 32, 8, 128)) for n in values}
    points = _measured(_paged(workloads), seconds, after_round)
    return [{"length": n, "batch": batch, **point} for n, point in points.items()]


def batches(values: Sequence[int], *, length=1024, seconds=2.0, after_round: Told = lambda _: None):
    """Cost against the batch: {batch, …}."""
    workloads = {n: Workload(Shape("batch", (length,) * n, 32, 8, 128)) for n in values}
    points = _measured(_paged(workloads), seconds, after_round)
    return [{"batch": n, "length": length, **point} for n, point in points.items()]


def beam_widths(
    widths: Sequence[int],
    peers: Sequence[str] = ("paged",),
    *,
    prefix: int = 2048,
    seconds=2.0,
    after_round: Told = lambda _: None,
):
    """Beams over a shared prefix: {width, peer, …}, each width with every peer, and the blocks that sharing saves."""
    points = []
    for i, width in enumerate(widths):
        shape = beams(width, prefix)
        workload = Workload(shape)
        calls = {peer: (workload, PEERS[peer].build(workload)) for peer in peers}
        done = _measured(calls, seconds / len(widths), lambda s, i=i: after_round((i + s) / len(widths)))
        kept = memory(workload.cache(), shape)
        points += [{"width": width, "peer": peer, **point, **kept} for peer, point in done.items()]
    return points


def memory(cache: PagedKVCache, shape: Shape) -> dict[str, float]:
    """Blocks in use and without sharing, the share of their slots that hold a token, and the rest: internal waste."""
    used, size = cache.num_blocks - cache.num_free, cache.block_size
    unshared = sum(-(-length // size) for length in shape.lengths)
    tables = cache.block_tables(cache.seq_ids)
    filled = np.clip(np.array(shape.lengths)[:, None] - np.arange(tables.shape[1]) * size, 0, size)
    tokens = np.zeros(cache.num_blocks, np.int64)  # a shared block counts once
    tokens[tables[tables >= 0]] = filled[tables >= 0]
    utilisation = float(tokens.sum() / (used * size))
    return {"blocks": used, "blocks_unshared": unshared, "utilisation": utilisation, "waste": 1 - utilisation}


def _paged(workloads: dict[int, Workload]) -> dict:
    return {value: (workload, PEERS["paged"].build(workload)) for value, workload in workloads.items()}


def _measured(calls: dict, seconds: float, after_round: Told) -> dict:
    """Check and measure calls in turns: value -> {seconds, p20, p80, ns_per_token, bytes_per_second, correct}."""
    points = {}
    for value, (workload, call) in calls.items():
        points[value] = {"correct": error(call, *workload.expected()) <= TOLERANCE}
    right = [
        Variant(str(value), _layers(call, workload.shape.num_layers))
        for value, (workload, call) in calls.items()
        if points[value]["correct"]
    ]
    samples = interleave(right, 1, seconds=seconds, after_round=after_round) if right else {}
    for value, (workload, _) in calls.items():
        if not points[value]["correct"]:
            continue
        shape = workload.shape
        taken = samples[str(value)][np.isfinite(samples[str(value)])] / shape.num_layers
        middle, low, high = (float(np.percentile(taken, p)) for p in (50, 20, 80))
        points[value] |= {
            "seconds": middle,
            "p20": low,
            "p80": high,
            "ns_per_token": middle / shape.num_tokens * 1e9,
            "bytes_per_second": shape.num_bytes(bytes_per_vector_pair(workload, "float32")) / middle,
        }
    return points


def _layers(call, num_layers: int):
    """One call that walks through all layers."""

    def all_layers(_):
        for layer in range(num_layers):
            call(layer)

    return all_layers
