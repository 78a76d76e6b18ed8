"""Real threads on one cache: each finds its own sequences as it left them, whatever the others do.

The pool is small, so that a freed block has a new owner at once; with poison, a copy that comes too late
finds NaN. Threads hand forks to each other, so that the owners of one tail are different threads.
"""

import queue
import sys
import threading

import numpy as np
import pytest
from needs import STRESS
from pools import HEAD_DIM, HEADS, LAYERS, all_layers, check_invariants, new_cache, vectors

from pagedkv import PoolExhausted, StalePlan

THREADS, ROUNDS = 4, 3000 if STRESS else 300


@pytest.fixture(autouse=True)
def _switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_all(workers):
    """Run functions in threads of their own; the first error of any of them is raised here."""
    errors = []

    def guarded(worker):
        try:
            worker()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=[worker]) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Worker:
    """One thread: its sequences with their tokens, and an inbox for forks that others hand to it."""

    def __init__(self, cache, seed, everyone):
        self.cache, self.everyone, self.random = cache, everyone, np.random.default_rng(seed)
        self.tokens, self.inbox, self.refused, self.stale = {}, queue.SimpleQueue(), 0, 0

    def __call__(self):
        for _ in range(ROUNDS):
            while not self.inbox.empty():
                seq, tokens = self.inbox.get()
                self.tokens[seq] = tokens
            action = self.random.choice(
                [self.grow, self.grow, self.fork, self.hand_over, self.cut, self.look, self.leave]
            )
            if not self.tokens:
                action = self.begin
            try:
                action()
            except PoolExhausted:
                self.refused += 1
                self.leave()
            for seq in self.tokens:
                self.check(seq)

    def check(self, seq):
        layer = int(self.random.integers(LAYERS))
        assert np.array_equal(self.cache.gather(layer, seq), vectors(layer, self.tokens[seq])), (
            "not what I wrote"
        )

    def one(self):
        return list(self.tokens)[self.random.integers(len(self.tokens))]

    def begin(self):
        seq = self.cache.add()
        self.tokens[seq] = []
        self.append([seq], int(self.random.integers(1, 8)))

    def append(self, seqs, n):
        new = self.random.integers(1, 100, len(seqs) * n).tolist()
        self.cache.append(seqs, *all_layers(new), n)
        for i, seq in enumerate(seqs):
            self.tokens[seq] = self.tokens[seq] + new[i * n : (i + 1) * n]

    def grow(self):
        self.append(list(self.tokens)[:3], 1)

    def fork(self):
        parent = self.one()
        (child,) = self.cache.fork(parent)
        self.tokens[child] = self.tokens[parent]

    def hand_over(self):
        """Fork, and let another thread own the child: both will write into the tail that they share."""
        parent = self.one()
        (child,) = self.cache.fork(parent)
        self.everyone[self.random.integers(len(self.everyone))].inbox.put((child, self.tokens[parent]))

    def cut(self):
        seq = self.one()
        length = int(self.random.integers(len(self.tokens[seq]) + 1))
        self.cache.truncate(seq, length)
        self.tokens[seq] = self.tokens[seq][:length]

    def look(self):
        """Attend over all sequences there are, of every thread: right, or stale, or gone."""
        seqs = self.cache.seq_ids[-4:]
        query = np.zeros((len(seqs), HEADS, HEAD_DIM), np.float32)
        try:
            plan = self.cache.plan(seqs)
            out = self.cache.attend(1, query, plan)
        except (StalePlan, KeyError, ValueError) as error:  # ValueError: shrunk to nothing, nobody to ask
            assert not isinstance(error, ValueError) or "queries" in str(error), error
            self.stale += 1
        else:
            assert np.isfinite(out).all(), "a page was read that nobody had written"
        mine = [seq for seq, tokens in self.tokens.items() if tokens]
        if mine:
            out = self.cache.attend(1, query[:1], self.cache.plan(mine[0]))
            expected = vectors(1, self.tokens[mine[0]])[1].mean(axis=0)
            np.testing.assert_allclose(out[0], expected, rtol=1e-5)

    def leave(self):
        if self.tokens:
            seq = self.one()
            self.cache.free(seq)
            del self.tokens[seq]


def test_threads_find_their_own_sequences_as_they_left_them():
    cache, everyone = new_cache(24, 4), []
    everyone += [Worker(cache, seed, everyone) for seed in range(THREADS)]
    run_all(everyone)
    check_invariants(cache)
    for worker in everyone:
        while not worker.inbox.empty():
            seq, worker.tokens[seq] = worker.inbox.get()
        for seq in list(worker.tokens):
            worker.check(seq)
            cache.free(seq)
    assert cache.num_free == 24 and cache.seq_ids == []
    check_invariants(cache)
    assert sum(worker.refused for worker in everyone) > 0, "the pool was never full: the test is too mild"


@pytest.mark.parametrize("call", ["extend", "append", "restore", "free", "truncate"])
def test_the_lock_covers_the_pages_that_a_call_changes(call, monkeypatch):
    """While pages are copied, written or poisoned, no other thread gets in."""
    cache = new_cache(8, 4)
    cache.add("a")
    cache.append("a", *all_layers([1, 2, 3]), 3)
    cache.fork("a", ["b"])
    host = new_cache(8, 4)
    entered = []

    def from_another_thread():
        got_in = cache._lock.acquire(blocking=False)
        if got_in:
            cache._lock.release()
        entered.append(got_in)

    def watched(method):
        def moving(*args, **kwargs):
            run_all([from_another_thread])
            return method(*args, **kwargs)

        return moving

    snapshot = cache.snapshot(["a"])
    if call == "restore":
        cache, host = host, cache
    for name in ("copy_blocks", "put", "poison"):
        monkeypatch.setattr(cache.storage, name, watched(getattr(cache.storage, name)))
    {
        "extend": lambda: cache.extend("b"),
        "append": lambda: cache.append("b", *all_layers([4])),
        "restore": lambda: cache.restore(snapshot, host),
        "free": lambda: cache.free(["a", "b"]),
        "truncate": lambda: cache.truncate("b", 1),
    }[call]()
    assert entered and not any(entered)
