"""`pagedkv cluster-demo`: several processes write texts from one pool; one is killed, the others finish its work."""

import argparse
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass

from ..coordinator import CoordinatorError, embedded_server
from ..coordinator.connection import keys_of
from ..coordinator.requests import RequestQueue, TextRequest
from ..coordinator.worker import shared_cache, text_alone
from ..lm import Llama, WeightsError
from .common import FAILED, MISUSED, complain, number
from .worker import add_pool

OPENING = (
    "ROMEO:\nBut soft! What light through yonder window breaks?\nIt is the east, and Juliet is the sun.\n"
    "Arise, fair sun, and kill the envious moon.\n\n"
)  # the beginning of every prompt: computed once for all workers
SPEAKERS = ("JULIET", "NURSE", "MERCUTIO", "BENVOLIO", "TYBALT", "PARIS", "FRIAR LAURENCE", "LADY CAPULET")
EVERY = 0.1  # seconds between two pictures


def add(commands) -> None:
    parser = commands.add_parser(
        "cluster-demo",
        help="several processes share one pool, one is killed, the others finish (extra redis)",
        description="Starts workers that write texts from one pool of blocks: the prompts begin alike, and that "
        "beginning is computed once for all. One worker is killed (signal 9) in the middle; the others take its "
        "requests and its blocks over. A table shows who owns what, and at the end every text is compared with what "
        "one process alone writes. Without a server it brings its own.",
        epilog="examples: pagedkv cluster-demo   pagedkv cluster-demo --workers 4 --kill 2 --redis redis://127.0.0.1",
    )
    parser.add_argument(
        "--workers", type=number(1), default=3, metavar="N", help="processes (default %(default)s)"
    )
    parser.add_argument(
        "--requests", type=number(1), default=12, metavar="N", help="texts to write (default %(default)s)"
    )
    parser.add_argument(
        "--tokens",
        type=number(1),
        default=80,
        metavar="N",
        help="characters of the longest (default %(default)s)",
    )
    parser.add_argument(
        "--kill",
        type=number(0),
        default=1,
        metavar="N",
        help="workers to kill, fewer than all (default %(default)s)",
    )
    add_pool(parser)
    parser.set_defaults(run=run, batch=2, lease=3.0)


def run(options: argparse.Namespace) -> int:
    if options.kill >= options.workers:
        return complain(
            "cluster-demo", f"--kill {options.kill} leaves nobody of --workers {options.workers}", MISUSED
        )
    try:
        model = Llama.load()
        requests = requests_of(options, model)
        url = options.redis or os.environ.get("REDIS_URL") or embedded_server()
        with Cluster(model, url, options) as cluster:
            cluster.queue.put(requests)
            results = watch(cluster, requests, options.kill)
    except ValueError as error:
        return complain("cluster-demo", error, MISUSED)
    except (CoordinatorError, OSError, WeightsError, ImportError) as error:
        return complain("cluster-demo", error, FAILED)
    return report(model, requests, results)


def requests_of(options: argparse.Namespace, model: Llama) -> list[TextRequest]:
    """Prompts that begin alike, and texts of different lengths."""
    found = []
    for i in range(options.requests):
        prompt = f"{OPENING}{SPEAKERS[i % len(SPEAKERS)]}:\n"
        tokens = max(1, options.tokens * (1 + (i + 1) % 3) // 3)
        found.append(TextRequest(f"r{i:0{len(str(options.requests - 1))}}", prompt, tokens, seed=i))
    longest = max(len(request.prompt) + request.tokens for request in found)
    if longest > model.config.context:
        raise ValueError(
            f"--tokens: a text of {longest} characters is beyond the model's {model.config.context}"
        )
    return found


@dataclass
class Row:
    """One worker in a picture of the cluster."""

    name: str
    pid: int
    state: str
    texts: list[str]
    tokens: int
    blocks: int
    shared: int

    def __str__(self) -> str:
        numbers = f"{self.tokens:>6} {self.blocks:>7} {self.shared:>7}"
        return f"{self.name:<10} {self.pid:>7}  {self.state:<12} {numbers}  {' '.join(self.texts)}"


HEAD = f"{'worker':<10} {'pid':>7}  {'lease':<12} {'tokens':>6} {'blocks':>7} {'shared':>7}  texts"


class Cluster:
    """Worker processes over a pool of their own, which is gone when the block ends."""

    def __init__(self, model: Llama, url: str, options: argparse.Namespace):
        self.pool, self.options = f"demo-{secrets.token_hex(4)}", options
        how = {
            "num_blocks": options.num_blocks,
            "block_size": options.block_size,
            "lease_seconds": options.lease,
        }
        self.cache = shared_cache(model, url, self.pool, worker="cluster-demo", **how)
        self.queue = RequestQueue(url, self.pool)
        self.url, self.killed = url, set()
        self.folder = tempfile.TemporaryDirectory(prefix="pagedkv-")
        self.processes: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "Cluster":
        try:
            for i in range(self.options.workers):
                self.start(f"worker-{i + 1}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self, name: str) -> None:
        o = self.options
        command = [
            sys.executable,
            "-m",
            "pagedkv.cli",
            "worker",
            "--pool",
            self.pool,
            "--name",
            name,
            "--until-done",
        ]
        settings = {
            "num-blocks": o.num_blocks,
            "block-size": o.block_size,
            "batch": o.batch,
            "lease": o.lease,
        }
        command += [text for key, value in settings.items() for text in (f"--{key}", str(value))]
        threads = {
            f"{library}_NUM_THREADS": "1" for library in ("OPENBLAS", "OMP", "MKL")
        }  # processes are enough
        with open(self.complaints(name), "wb") as file:
            self.processes[name] = subprocess.Popen(
                command,
                env=threads
                | os.environ
                | {"REDIS_URL": self.url},  # not in the command: it may hold a password
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
            )

    def complaints(self, name: str) -> str:
        return os.path.join(self.folder.name, name)

    def kill(self, name: str) -> None:
        """As the system kills: nothing can be tidied up."""
        self.processes[name].kill()
        self.processes[name].wait()
        self.killed.add(name)

    def picture(self) -> tuple[list[Row], str]:
        """Who owns what, and how far it has come."""
        owners = {worker.name: worker for worker in self.cache.manager.owners()}
        claims, results = self.queue.claims(), self.queue.results()
        holders = Counter(
            b for worker in owners.values() for table in worker.sequences.values() for b in set(table)
        )
        rows = []
        for name, process in self.processes.items():
            worker = owners.get(name)
            held = {block for table in worker.sequences.values() for block in table} if worker else set()
            rows.append(
                Row(
                    name,
                    process.pid,
                    self.state(name, worker),
                    sorted(request for request, owner in claims.items() if owner == name),
                    sum(worker.lengths.values()) if worker else 0,
                    len(held),
                    sum(holders[block] > 1 for block in held),
                )
            )
        shared = sum(count > 1 for count in holders.values())
        return rows, (
            f"{len(results)} of {self.options.requests} texts; {len(holders)} of {self.options.num_blocks} blocks in "
            f"use, {shared} of them by several texts"
        )

    def state(self, name: str, worker) -> str:
        """How a worker is, in few words."""
        code = self.processes[name].poll()
        if code is not None and worker is None:
            return "killed, over" if name in self.killed else "finished" if code == 0 else f"failed ({code})"
        if worker is None:
            return "starting"
        return f"killed {worker.lease_left:+.1f} s" if code is not None else f"{worker.lease_left:.1f} s"

    @property
    def alive(self) -> list[str]:
        return [name for name, process in self.processes.items() if process.poll() is None]

    def last_words(self) -> str:
        """What a worker that failed complained about."""
        for name in self.processes:
            with open(self.complaints(name), encoding="utf-8", errors="replace") as file:
                lines = file.read().splitlines()
            if lines:
                return f"{name}: {lines[-1]}"
        return "they said nothing"

    def __exit__(self, *_) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.cache.storage.close(unlink=True)
        self.folder.cleanup()
        self.queue.forget(keys_of(self.pool))
        self.queue.close()


class Screen:
    """A table that is drawn over itself on a terminal; elsewhere a line whenever something has changed."""

    def __init__(self, file=None):
        self.file = file or sys.stdout
        self.redraws = self.file.isatty() and os.environ.get("TERM") != "dumb"
        self.lines, self.said = 0, None

    def show(self, rows: list[Row], summary: str) -> None:
        if self.redraws:
            width = shutil.get_terminal_size().columns - 1  # a line that wraps would be two
            lines = [line[:width] for line in (HEAD, *map(str, rows), summary)]
            self._write(self._back() + "".join(line + "\n" for line in lines))
            self.lines = len(lines)
            return
        who = "; ".join(f"{row.name} " + (" ".join(row.texts) or "-") for row in rows)
        if (summary.partition(";")[0], who) != self.said:
            self.said = summary.partition(";")[0], who
            self._write(f"{summary}: {who}\n")

    def say(self, line: str) -> None:
        """A line that stays."""
        self._write(self._back() + line + "\n")
        self.lines = 0

    def _back(self) -> str:
        return f"\x1b[{self.lines}A\x1b[J" if self.lines else ""

    def _write(self, text: str) -> None:
        self.file.write(text)
        self.file.flush()


def watch(cluster: Cluster, requests: list[TextRequest], kills: int) -> dict[str, dict]:
    """Show the cluster until every request has its answer; kill some workers in the middle of their texts."""
    screen, lengths = Screen(), {request.id: len(request.prompt) for request in requests}
    mourned: set[str] = set()
    while True:
        rows, summary = cluster.picture()
        screen.show(rows, summary)
        for row in rows:
            if row.name in cluster.killed - mourned and not row.blocks and not row.texts:
                mourned.add(row.name)
                screen.say(f"what {row.name} held is free or with others again")
        if cluster.queue.done and mourned == cluster.killed:
            return cluster.queue.results()
        if not cluster.alive:  # the others may be through before the lease of a killed one is over
            cluster.cache.manager.reap()
        victim = max(rows, key=lambda row: len(row.texts) * (row.name in cluster.alive))
        if len(cluster.killed) < kills and in_the_middle(victim, lengths):
            cluster.kill(victim.name)
            left = next(row for row in cluster.picture()[0] if row.name == victim.name)  # it wrote until then
            screen.say(
                f"{left.name} is killed (signal 9, pid {left.pid}) with {' '.join(left.texts) or 'nothing'} on "
                f"{left.blocks} blocks; its lease of {cluster.options.lease:g} s runs on"
            )
        elif not cluster.alive and not cluster.queue.done:
            raise CoordinatorError(f"no worker is left; {cluster.last_words()}")
        time.sleep(EVERY)


def in_the_middle(row: Row, lengths: dict[str, int]) -> bool:
    """Whether a worker has written some of its texts and not all."""
    return bool(row.texts) and row.tokens > sum(lengths[request] + 5 for request in row.texts)


def report(model: Llama, requests: list[TextRequest], results: dict[str, dict]) -> int:
    """Every text with who wrote it, and whether it is what one process alone writes."""
    wrong = []
    print()
    for request in requests:
        result = results[request.id]
        if result.get("text") != text_alone(model, request):
            wrong.append(request.id)
        how = result.get("error") or f"{result['text']!r}"
        found = f"{result.get('hits') or 0} of {len(request.prompt)} found"
        print(f"{request.id}  {result.get('worker', 'nobody'):<10} {found:<16} {how[:60]}")
    if wrong:
        return complain("cluster-demo", f"not what one process writes: {' '.join(wrong)}", FAILED)
    writers = Counter(result["worker"] for result in results.values())
    shares = ", ".join(f"{name} {count}" for name, count in sorted(writers.items()))
    print(f"\n{len(requests)} texts, each as one process alone writes it ({shares})")
    return 0
