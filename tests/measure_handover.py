"""What a hand-over of one long sequence costs: through shared memory, and with its pages sent through Redis:

    python tests/measure_handover.py [TOKENS] [--redis URL]

Both in turn, in one process; the ratio is of the medians. No test: a clock on a busy machine proves nothing.
"""

import argparse
import contextlib
import secrets
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from redis_servers import real_server

from pagedkv.coordinator import RedisBlockManager
from pagedkv.coordinator.pages import SharedCache
from pagedkv.coordinator.shared_memory import SharedStorage
from pagedkv.store import Layout, RedisPageStore

ROUNDS = 7
SIZE = 16  # tokens in a block
MODELS = {  # layers, KV heads, head_dim, dtype
    "the shipped model": (4, 2, 32, "float32"),
    "one of a thousand million weights": (16, 4, 64, "float16"),
}


def worker(stack, url, pool, machine, blocks, name, model):
    layers, kv_heads, head_dim, dtype = model
    manager = RedisBlockManager(
        url, pool, num_blocks=blocks, block_size=SIZE, prefix_cache=True, worker=name, lease_seconds=600
    )
    storage = SharedStorage(f"{pool} {machine}", layers, blocks, SIZE, kv_heads, head_dim, dtype)
    stack.callback(storage.close, unlink=True)
    store = RedisPageStore(url, Layout.of(storage, "measure"), pool=pool)
    return SharedCache(manager, storage, store=store)


def measure(url, tokens, model):
    """Seconds of each round: shared memory, sending, fetching."""
    pool, times = f"measure-{secrets.token_hex(4)}", {"shared memory": [], "put": [], "get": []}
    blocks = 2 * -(-tokens // SIZE)
    with contextlib.ExitStack() as stack:
        here, there, far = (
            worker(stack, url, pool, machine, blocks, name, model)
            for machine, name in (("one", "here"), ("one", "there"), ("two", "far"))
        )
        random = np.random.default_rng(0)
        for array in here.storage.arrays.values():
            array[...] = random.normal(size=array.shape)
        text = random.integers(0, 50_000, tokens)
        here.add("a", tokens=text)
        here.extend("a", None)
        here.manager.commit("a", text)
        digests, table = here._digests("a"), here.block_tables(["a"])[0]
        here.storage.remember(table, digests)
        giver, taker = here, there
        for _ in range(ROUNDS):
            start = time.perf_counter()
            memory = giver.hand_over("a", taker.manager.worker)
            taker.adopt("a", memory)
            times["shared memory"].append(time.perf_counter() - start)
            assert not taker._lost
            giver, taker = taker, giver
            start = time.perf_counter()
            pages = ((digest, here.storage.page(block)) for digest, block in zip(digests, table, strict=True))
            assert here.store.put_many(pages) == len(digests)
            times["put"].append(time.perf_counter() - start)
            start = time.perf_counter()
            assert not far._fetch(table, digests, list(range(len(digests))))
            times["get"].append(time.perf_counter() - start)
            assert all(
                np.array_equal(far.storage.arrays[n][:, table], a[:, table])
                for n, a in here.storage.arrays.items()
            )
            for digest in digests:
                here.store.delete(digest)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokens", nargs="?", type=int, default=4096)
    parser.add_argument("--redis", help="a server; default: one that is started for this")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = options.redis or stack.enter_context(real_server(folder))
        for name, model in MODELS.items():
            times = measure(url, options.tokens, model)
            median = {what: statistics.median(seconds) for what, seconds in times.items()}
            layers, kv_heads, head_dim, dtype = model
            page = 2 * layers * SIZE * kv_heads * head_dim * np.dtype(dtype).itemsize
            pages = f"{options.tokens // SIZE} pages of {page >> 10} KiB"
            print(f"{name}: {options.tokens} tokens, {pages}; medians of {ROUNDS}")
            for what, seconds in median.items():
                print(f"    {what:<14} {seconds * 1e3:8.2f} ms")
            ratio = (median["put"] + median["get"]) / median["shared memory"]
            print(f"    sending its pages takes {ratio:.0f} times as long as handing it over")


if __name__ == "__main__":
    main()
