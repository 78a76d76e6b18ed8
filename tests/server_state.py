"""The whole state of a pool as it stands on the server, and what must hold of it at any moment."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from pagedkv.coordinator.connection import PARTS, connect, keys_of


def ints(data):
    return np.frombuffer(data, "<i4").tolist()


@dataclass
class State:
    pool: dict
    workers: dict  # name -> (token, end, length of the lease)
    seqs: dict  # key -> (token, length, tail, version)
    tables: dict  # key -> blocks
    owners: dict  # block -> count
    plain: list
    cached: list
    sealed: dict  # block -> digest
    holders: dict  # digest -> blocks
    copying: dict  # token -> blocks
    parcels: dict

    @property
    def queue(self):
        return self.plain + self.cached


def read(client, pool):
    """Everything in one transaction."""
    keys = dict(zip(PARTS.split(), keys_of(pool), strict=True))
    with client.pipeline(transaction=True) as pipe:
        for name, key in keys.items():
            if name == "plain":
                pipe.lrange(key, 0, -1)
            elif name == "cached":
                pipe.zrange(key, 0, -1)
            else:
                pipe.hgetall(key)
        found = dict(zip(keys, pipe.execute(), strict=True))
    numbers = lambda text: tuple(map(int, text.split()))  # noqa: E731
    return State(
        pool=found["pool"],
        workers={
            name: numbers(b" ".join(lease.split(b" ", 3)[:3])) for name, lease in found["workers"].items()
        },
        seqs={key: numbers(text) for key, text in found["seqs"].items()},
        tables={key: ints(data) for key, data in found["tables"].items()},
        owners={int(block): int(count) for block, count in found["owners"].items()},
        plain=list(map(int, found["plain"])),
        cached=list(map(int, found["cached"])),
        sealed={int(block): digest for block, digest in found["sealed"].items()},
        holders={digest: ints(blocks) for digest, blocks in found["holders"].items()},
        copying={int(token): ints(blocks) for token, blocks in found["copying"].items()},
        parcels=found["parcels"],
    )


def expire(client, pool, worker):
    """Let a worker's lease end now, as if it had been silent for so long."""
    key = f"{{pagedkv:{pool}}}:v1:workers"
    token, _, rest = client.hget(key, worker).split(b" ", 2)
    client.hset(key, worker, b"%s 1 %s" % (token, rest))


def check(state):
    """The invariants of a pool: every owner is a table entry or a copy that is under way, and so on."""
    size, blocks = int(state.pool[b"block_size"]), range(int(state.pool[b"num_blocks"]))
    owners = Counter(block for table in state.tables.values() for block in table if block >= 0)
    owners.update(block for sources in state.copying.values() for block in sources)
    assert state.owners == dict(owners), "owners are table entries and copies under way"
    assert sorted(state.queue) == [block for block in blocks if not owners[block]], "free exactly once"
    assert {block for block in state.queue if block in state.sealed} == set(state.cached)
    by_digest = {block: digest for digest, held in state.holders.items() for block in held}
    assert by_digest == state.sealed and all(state.holders.values())
    for key, (_, length, tail, _) in state.seqs.items():
        table = state.tables.get(key, [])
        held = [block for block in table if block >= 0]
        assert len(table) == -(-length // size) and len(set(held)) == len(held)
        assert table == [-1] * (len(table) - len(held)) + held, "blocks are left behind in front only"
        assert tail == (table[-1] if table else -1)
    assert set(state.tables) <= set(state.seqs) and set(state.parcels) <= set(state.seqs)
    assert all(version <= int(state.pool[b"changes"]) for *_, version in state.seqs.values())


def state_of(url, pool):
    """The state of a pool, whole and right."""
    client = connect(url, 10)
    state = read(client, pool)
    client.close()
    check(state)
    return state
