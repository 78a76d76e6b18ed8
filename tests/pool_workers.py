"""Worker processes for stress and fault tests: random operations on a shared pool, each of them written down."""

import contextlib
import json
import multiprocessing
import os
import random
import signal

from pagedkv import PoolExhausted
from pagedkv.coordinator import LeaseLost, PoolLost, RedisBlockManager, Unreachable

SIZES = {"num_blocks": 24, "block_size": 4, "prefix_cache": True}
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9, 9], [1, 2, 3, 4, 5, 6, 7, 8]]


class Process:
    """A process that works on a pool; its diary, a file of JSON lines, tells every change that was acknowledged."""

    def __init__(self, folder, url, pool, name, seed, operations, **options):
        self.name, self.diary = name, folder / f"{name}.jsonl"
        context = multiprocessing.get_context("fork")  # quick: nothing is imported again
        self.process = context.Process(
            target=work, args=(self.diary, url, pool, name, seed, operations, options), daemon=True
        )
        self.process.start()

    def signal(self, number):
        os.kill(self.process.pid, number)

    def kill(self):
        self.signal(signal.SIGKILL)
        self.process.join()

    def join(self, seconds=120):
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"{self.name} neither ends nor recovers"
        return self.process.exitcode

    def lines(self):
        if not self.diary.exists():
            return []
        return [
            json.loads(line) for line in self.diary.read_text().split("\n")[:-1]
        ]  # the last may be cut off

    @property
    def last(self):
        return self.lines()[-1]["kind"]


def work(diary, url, pool, name, seed, operations, options):
    draw = random.Random(seed)
    with diary.open("a", buffering=1) as file:

        def write(kind, version=0, **blocks):
            told = {role: ids.tolist() for role, ids in blocks.items() if len(ids)}
            file.write(json.dumps({"kind": kind, "version": version, "blocks": told}) + "\n")

        def observe(event):
            if event.kind in ("fence", "conflict") or (event.kind != "reclaim" and event.blocks):
                write(event.kind, manager.tables.now, **event.blocks)

        try:
            manager = RedisBlockManager(url, pool, worker=name, **options)
            manager.observers.append(observe)
            write("begin")
            for n in range(operations):
                try:
                    step(manager, draw)
                except (PoolExhausted, ValueError):
                    if manager.seq_ids:
                        manager.free(manager.seq_ids[:1])
                if n % 25 == 24:
                    found = manager.reap()
                    if len(found.freed):
                        write("reclaim", found.version, freed=found.freed)
            write("end")
            write("leave", freed=manager.free(manager.seq_ids)[:0])
            manager.leave()
        except (LeaseLost, PoolLost, Unreachable) as error:
            write(type(error).__name__)
    with contextlib.suppress(BaseException):
        os._exit(0)  # without the parent's exit handlers


def step(manager, draw):
    """One random operation; a refusal is part of life."""
    ids = manager.seq_ids
    what = draw.choice(["add", "extend", "extend", "extend", "fork", "truncate", "window", "free", "reorder"])
    if what == "add" or not ids:
        if len(ids) > 6:
            return manager.free(draw.sample(ids, 2))
        seq = manager.add(tokens=draw.choice(PROMPTS))
        manager.extend(seq, None)
        return manager.commit(seq)
    seq = draw.choice(ids)
    some = draw.sample(ids, draw.randint(1, len(ids)))
    if what == "extend":
        reservation = manager.extend(some, 1)
        manager.confirm(reservation)
        return manager.commit(some, [[draw.randrange(3)]] * len(some)) if draw.random() < 0.5 else None
    if what == "fork":
        return manager.fork(seq) if len(ids) < 8 else manager.free(seq)
    if what == "truncate":
        return manager.truncate(seq, draw.randint(max(0, manager.length(seq) - 3), manager.length(seq)))
    if what == "window":
        return manager.release_before(seq, draw.randint(0, manager.length(seq)))
    if what == "free":
        return manager.free(seq)
    return manager.reorder(some, [draw.randrange(len(some)) for _ in some])


def check_history(num_blocks, diaries):
    """All diaries in the order of their versions are one history, in which every block has one writer at a time."""
    history = sorted(
        (line for lines in diaries for line in lines if line["blocks"]), key=lambda e: e["version"]
    )
    changes = [line["version"] for line in history if line["kind"] != "commit"]
    assert len(set(changes)) == len(changes), "two changes have one version"
    used, cached = set(), set()
    for line in history:
        blocks, what = line["blocks"], f"version {line['version']}, {line['kind']}"
        hits = set(blocks.get("hits", []))
        assert hits <= used | cached, f"{what}: found a block that holds nothing"
        used |= hits
        taken = blocks.get("new", []) + [copy[1] for copy in blocks.get("copies", [])]
        assert not set(taken) & used and len(set(taken)) == len(taken), f"{what}: took a block in use"
        used |= set(taken)
        cached -= used
        freed = set(blocks.get("freed", []))
        assert freed <= used, f"{what}: gave back a block that nobody held"
        used -= freed
        cached |= freed  # whether it can really be found, the invariants say
    return len(history)


def all_calls(manager):
    """Every kind of change, each with what it returns or refuses."""
    yield manager.add("a", tokens=range(10))
    yield manager.extend("a", None)
    yield manager.commit("a")
    yield manager.fork("a", ["b", "c"])
    yield manager.extend(["a", "b", "c"])
    yield manager.confirm()
    yield manager.extend(["a", "b", "c"])
    yield manager.reorder(["a", "b", "c"], [1, 1, 2])
    yield manager.truncate("b", 6)
    yield manager.release_before("a", 5)
    try:
        yield manager.extend("a", 999)
    except PoolExhausted as refusal:
        yield str(refusal)
    snapshot = manager.snapshot()
    yield manager.free(["a", "b", "c"])
    yield manager.restore(snapshot)
    yield manager.hand_over("a", manager.worker)
    yield manager.adopt()
    yield manager.heartbeat()
    yield manager.free(["a", "b", "c"])
    yield manager.reset_prefix_cache()
