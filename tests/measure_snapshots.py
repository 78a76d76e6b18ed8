"""Speed and memory of snapshots, beside NumPy's own files of the same bytes, and what metrics cost:

    python tests/measure_snapshots.py [MIB …]

Each round does all of it in turn, in one process; the ratios are of the medians. No test: a clock on a busy machine
proves nothing by itself.
"""

import contextlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from pagedkv import BlockManager, PagedKVCache
from pagedkv.metrics import Metrics
from pagedkv.store import load, save

ROUNDS = 5


def full_cache(mib, num_layers=8, block_size=16, num_kv_heads=8, head_dim=64):
    """A cache of about so many MiB of float16 pages, all in use by one sequence, and its pages in random order."""
    page = 2 * num_layers * block_size * num_kv_heads * head_dim * 2
    num_blocks = (mib << 20) // page
    cache = PagedKVCache(
        num_blocks, block_size, num_kv_heads, head_dim, num_layers=num_layers, dtype="float16"
    )
    words = np.random.default_rng(0).integers(0, 2**16, 1 << 20, np.uint16).view(np.float16)
    for array in cache.storage.arrays.values():
        flat = array.reshape(-1)
        for start in range(0, len(flat), len(words)):
            flat[start : start + len(words)] = words[: len(flat) - start]
    ids = [cache.add() for _ in range(num_blocks)]
    cache.extend(ids, block_size)
    cache.free(np.random.default_rng(0).permutation(ids).tolist())
    cache.add("a")
    cache.extend("a", num_blocks * block_size)
    return cache


@contextlib.contextmanager
def timed(times, what):
    start = time.perf_counter()
    yield
    times[what].append(time.perf_counter() - start)


def speed(mib, folder):
    cache = full_cache(mib)
    into = full_cache(mib)
    plain, ours = folder / "plain.npz", {suffix: folder / f"ours{suffix}" for suffix in (".npz", ".h5")}
    times = defaultdict(list)
    for _ in range(ROUNDS):
        with timed(times, "np.savez + fsync"), open(plain, "wb") as file:
            np.savez(file, **cache.storage.arrays)
            file.flush()
            os.fsync(file.fileno())
        for suffix, path in ours.items():
            with timed(times, f"save {suffix}"):
                save(cache, path)
        with timed(times, "np.load"), np.load(plain) as file:
            arrays = {name: file[name] for name in file.files}
        del arrays
        for suffix, path in ours.items():
            into.free(into.seq_ids)
            with timed(times, f"load {suffix}"):
                assert load(path, into).num_damages == 0
    median = {what: statistics.median(seconds) for what, seconds in times.items()}
    for what, seconds in median.items():
        base = median["np.savez + fsync" if "save" in what else "np.load"]
        print(f"{mib:5d} MiB  {what:18s} {seconds:6.2f} s   {base / seconds:.2f} of NumPy's speed")


PEAK = """
import sys
from measure_snapshots import full_cache, peak
from pagedkv.store import load, save
cache = full_cache(int(sys.argv[1]))
before = peak()
save(cache, sys.argv[2])
saved = peak()
cache.free("a")
load(sys.argv[2], cache)
print(before, saved - before, peak() - saved)
"""


def peak():
    """The most memory that this process ever had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def peaks(mib, path):
    """The memory of a process with a pool of so many MiB, what saving adds to it, and what loading adds to that."""
    tests = str(Path(__file__).parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([tests, os.path.dirname(tests)])}
    command = [sys.executable, "-c", PEAK, str(mib), str(path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    return [int(number) for number in said.split()]


def memory(mib, folder):
    for name in ("s.npz", "s.h5", "folder"):
        pool, saving, loading = peaks(mib, folder / name)
        print(f"{mib:5d} MiB  {name:8s} process {pool} MiB, saving adds {saving}, loading {loading}")


def observers(steps=3000, batch=32):
    """What metrics cost a decode step of the manager: one without and one with, in turn."""
    pools, times = {}, {False: [], True: []}
    for observed in times:
        manager = BlockManager(batch * 100, 16)
        ids = [manager.add() for _ in range(batch)]
        manager.extend(ids, 100)
        pools[observed] = manager, ids, Metrics(manager) if observed else None
    for step in range(steps):
        for observed in (False, True) if step % 2 else (True, False):
            manager, ids, _ = pools[observed]
            if manager.length(ids[0]) >= 1000:
                manager.free(ids)
                ids[:] = [manager.add() for _ in ids]
                manager.extend(ids, 100)
            start = time.perf_counter()
            manager.extend(ids)
            times[observed].append(time.perf_counter() - start)
    off, on = (statistics.median(times[observed]) * 1e6 for observed in (False, True))
    print(
        f"decode step of {batch} sequences: {off:.0f} µs, with metrics {on:.0f} µs, {on / off:.2f} times as long"
    )


if __name__ == "__main__":
    observers()
    for mib in [int(size) for size in sys.argv[1:]] or [256]:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            memory(mib, Path(folder))
            speed(mib, Path(folder))
