"""A BlockManager and a RedisBlockManager as one: every call goes to both, and everything must be equal afterwards."""

import dataclasses

import numpy as np
import server_state
from redis_servers import new_pool

from pagedkv import BlockManager, PoolExhausted, Reservation, Snapshot
from pagedkv.coordinator import RedisBlockManager
from pagedkv.coordinator.connection import connect
from pagedkv.coordinator.manager import _key_of

CALLS = (
    "add match extend commit fork reorder truncate release_before free restore snapshot reset_prefix_cache"
)
READS = "length lengths block_tables to_csr blocks_needed can_extend is_cached"


def same(a, b):
    """Whether two results are equal; versions may be other numbers."""
    if isinstance(a, Reservation | Snapshot):
        names = [f.name for f in dataclasses.fields(a) if f.name != "versions"]
        return type(a) is type(b) and all(same(getattr(a, name), getattr(b, name)) for name in names)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.shape == b.shape and np.array_equal(a, b)
    if isinstance(a, np.generic):
        return a == b
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Exception):
        return type(a) is type(b) and str(a) == str(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


def outcome(call, *args, **kwargs):
    try:
        return call(*args, **kwargs)
    except (ValueError, KeyError, PoolExhausted) as error:
        return error


class Twin:
    """Behaves as its plain manager does, whose parts can be looked into; the shared one must agree step by step."""

    def __init__(self, url, num_blocks, block_size, *, observers=(), **options):
        told = {"plain": [], "shared": []}
        self.told = told
        self.plain = BlockManager(
            num_blocks, block_size, observers=[*observers, told["plain"].append], **options
        )
        self.shared = RedisBlockManager(
            url,
            new_pool(),
            num_blocks=num_blocks,
            block_size=block_size,
            lease_seconds=3600,
            timeout=60,
            observers=[told["shared"].append],
            **options,
        )
        self.client = connect(url, 60)
        self.versions_before = {}

    def close(self):
        self.shared._scripts.close()
        self.client.close()

    def __getattr__(self, name):
        return getattr(self.plain, name)

    def both(self, name, *args, **kwargs):
        expected = outcome(getattr(self.plain, name), *args, **kwargs)
        got = outcome(getattr(self.shared, name), *args, **kwargs)
        assert same(expected, got), f"{name}{args}: {expected!r} is expected, the shared one says {got!r}"
        if name in CALLS.split():
            if isinstance(got, Reservation) and len(got.copies):
                assert self.shared.allocator.ref_counts[got.copies[:, 0]].min() >= 1
                self.shared.confirm(got)
            self.compare(name)
        if isinstance(expected, Exception):
            raise expected
        return expected

    def compare(self, name):
        plain, shared = self.plain, self.shared
        expected, got = ([self.event(e) for e in self.told[who]] for who in ("plain", "shared"))
        assert same(expected, [e for e in got if e[0] != "confirm"]), f"events of {name}: {expected} {got}"
        for events in self.told.values():
            events.clear()
        state = server_state.read(self.client, shared.pool)
        server_state.check(state)
        allocator, index = plain.allocator, plain.prefix_index
        assert state.queue == allocator.queue() and len(state.cached) == allocator.num_cached
        assert state.owners == {b: n for b, n in enumerate(allocator.ref_counts.tolist()) if n}
        assert state.holders == {digest: list(blocks) for digest, blocks in index._blocks.items()}
        assert int(state.pool[b"next_id"]) == plain._next_id
        assert set(state.seqs) == {_key_of(seq) for seq in plain.seq_ids} and shared.seq_ids == plain.seq_ids
        for seq in plain.seq_ids:
            row = plain.block_tables([seq])[0].tolist()
            key = _key_of(seq)
            assert state.tables.get(key, []) == row == shared.block_tables([seq])[0].tolist()
            assert state.seqs[key][1] == plain.length(seq) == shared.length(seq)
            assert self.text(plain._texts[seq]) == self.text(shared._texts[seq])
            assert shared.versions([seq])[0] == state.seqs[key][3]
        assert vars(plain.prefix_stats) == vars(shared.prefix_stats)
        self.compare_versions()

    def compare_versions(self):
        """A version changes for both or for neither."""
        now = {s: (self.plain.versions([s])[0], self.shared.versions([s])[0]) for s in self.plain.seq_ids}
        for seq, (a, b) in now.items():
            was = self.versions_before.get(seq)
            assert was is None or (was[0] == a) == (was[1] == b), f"versions of {seq}: {was}, now {(a, b)}"
        self.versions_before = now

    @staticmethod
    def event(event):
        return event.kind, event.seq_ids, event.blocks, event.counts

    @staticmethod
    def text(text):
        links = [(link.digest, link.tokens) for link in text.links()]
        return (
            text.root.digest,
            links,
            text.committed,
            text.rest,
            text.prompt,
            text.prompt_length,
            list(text.digests),
        )


def _both(name):
    return lambda self, *args, **kwargs: self.both(name, *args, **kwargs)


for _name in [*CALLS.split(), *READS.split()]:
    setattr(Twin, _name, _both(_name))
