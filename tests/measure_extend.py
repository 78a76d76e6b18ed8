"""What a step of one sequence costs, beside the least that a script can cost: a bare EVAL that returns 1:

    python tests/measure_extend.py [ROUNDS] [--redis URL]

In turn, in one process; the ratio is the median of the rounds'. No test: a clock on a busy machine proves nothing.
"""

import argparse
import contextlib
import secrets
import statistics
import tempfile
import time
from pathlib import Path

import redis
from redis_servers import real_server

from pagedkv.coordinator import RedisBlockManager

CALLS = 100  # of each kind in a round


def seconds(call):
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS


def measure(url, rounds):
    """Seconds of a call: kind -> one number a round."""
    pool = f"measure-{secrets.token_hex(4)}"
    manager = RedisBlockManager(
        url, pool, num_blocks=1 + rounds * CALLS // 16, block_size=16, prefix_cache=True, lease_seconds=600
    )
    manager.extend(manager.add("s"))
    client = redis.Redis.from_url(url, protocol=2)
    keys = manager._scripts._keys
    sent = [*manager._caller(1), "run", 16, "", "1", "", "ss"]
    calls = {
        "bare EVAL": lambda: client.eval("return 1", 0),
        "EVAL with the same keys and arguments": lambda: client.eval("return 1", len(keys), *keys, *sent),
        "extend": lambda: manager.extend("s"),
    }
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call))
    manager.leave()
    client.delete(*keys)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", nargs="?", type=int, default=50)
    parser.add_argument("--redis", help="a server; default: one that is started for this")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        times = measure(options.redis or stack.enter_context(real_server(folder)), options.rounds)
    print(f"medians of {options.rounds} rounds of {CALLS} calls each")
    for name, taken in times.items():
        ratio = statistics.median(t / e for t, e in zip(taken, times["extend"], strict=True))
        said = "" if name == "extend" else f"  extends come at {ratio:.2f} of its rate"
        print(f"    {name:<38} {statistics.median(taken) * 1e6:6.0f} µs{said}")


if __name__ == "__main__":
    main()
