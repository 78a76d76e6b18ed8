"""`pagedkv worker`: one of several processes that write texts over one pool of blocks."""

import argparse
import os
import signal
import socket

from ..coordinator import CoordinatorError
from ..coordinator.pages import SharedCache
from ..coordinator.requests import RequestQueue
from ..coordinator.shared_memory import remove_leftovers
from ..coordinator.worker import TextWorker, shared_cache
from ..lm import Llama, WeightsError
from .common import FAILED, MISUSED, complain, number


def add(commands) -> None:
    parser = commands.add_parser(
        "worker",
        help="write texts over a pool that several processes share (extra redis)",
        description="Takes requests from a Redis server and writes their texts with the model that ships with the "
        "package. All workers of a pool share its blocks: a prompt's beginning is computed once for all of them, and "
        "what a worker that dies leaves behind goes to the others. On one machine pages lie in shared memory.",
        epilog="Requests: pagedkv.coordinator.RequestQueue(URL, POOL).put([TextRequest(...)]); to see it all at "
        "work: pagedkv cluster-demo",
    )
    add_pool(parser)
    parser.add_argument(
        "--pool", default="default", metavar="NAME", help="the pool to join (default %(default)s)"
    )
    parser.add_argument(
        "--name", metavar="NAME", help="of this worker; no other may have it (default: made up)"
    )
    parser.add_argument(
        "--until-done",
        action="store_true",
        help="end when every request has its answer (default: wait for more)",
    )
    parser.add_argument(
        "--store-pages",
        action="store_true",
        help="put finished pages into Redis too, for workers on other machines",
    )
    parser.add_argument(
        "--clean", action="store_true", help="only remove shared memory that no process has open any more"
    )
    parser.set_defaults(run=run)


def add_pool(parser: argparse.ArgumentParser) -> None:
    """The options that say which pool, and how it is made."""
    parser.add_argument(
        "--redis", metavar="URL", help="the server, redis://[:PASSWORD@]HOST:PORT/DB (default: $REDIS_URL)"
    )
    parser.add_argument(
        "--num-blocks",
        type=number(1),
        default=128,
        metavar="M",
        help="blocks of the pool (default %(default)s)",
    )
    parser.add_argument(
        "--block-size",
        type=number(1),
        default=16,
        metavar="B",
        help="tokens in a block (default %(default)s)",
    )
    parser.add_argument(
        "--batch", type=number(1), default=4, metavar="N", help="texts side by side (default %(default)s)"
    )
    parser.add_argument(
        "--lease",
        type=seconds,
        default=10.0,
        metavar="S",
        help="seconds without a sign of life after which a worker counts as dead (default %(default)s)",
    )


def seconds(text: str) -> float:
    """An argparse type: seconds, at least a tenth."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"seconds of at least 0.1 are needed, not {text!r}")
    return value


def run(options: argparse.Namespace) -> int:
    if options.clean:
        for found in remove_leftovers():
            print(f"removed {found.name}, {found.num_bytes / 2**20:.1f} MiB of pool {found.pool!r}")
        return 0
    url = options.redis or os.environ.get("REDIS_URL")
    if not url:
        return complain("worker", "which server? say --redis URL or set REDIS_URL", MISUSED)
    asked = []  # to end
    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, lambda *_: asked.append(True))
    try:
        worker = new_worker(Llama.load(), url, options)
        worker.run(options.until_done, lambda: bool(asked))
    except (CoordinatorError, OSError, WeightsError, ImportError) as error:
        return complain("worker", error, FAILED)
    except ValueError as error:
        return complain("worker", error, MISUSED)
    return 0


def new_worker(model: Llama, url: str, options: argparse.Namespace) -> TextWorker:
    """A worker as the options describe it."""
    name = options.name or f"{socket.gethostname()}-{os.getpid()}"
    how = {"num_blocks": options.num_blocks, "block_size": options.block_size, "lease_seconds": options.lease}

    def join() -> SharedCache:
        return shared_cache(model, url, options.pool, worker=name, store_pages=options.store_pages, **how)

    queue = RequestQueue(url, options.pool, worker=name, lease_seconds=options.lease)
    return TextWorker(model, join, queue, max_batch=options.batch)
