"""What a step costs: one round trip however many sequences, none for reading what is one's own."""

from importlib import resources

import numpy as np
import pytest
from redis_servers import new_pool, servers  # noqa: F401  a fixture

from pagedkv import coordinator
from pagedkv.coordinator import RedisBlockManager, connection


@pytest.fixture(params=["fake", "real"])
def manager(request, servers):  # noqa: F811
    return RedisBlockManager(
        servers(request.param),
        new_pool(),
        num_blocks=4096,
        block_size=4,
        prefix_cache=True,
        lease_seconds=600,
        timeout=60,
    )


@pytest.fixture
def commands(manager, monkeypatch):
    """What is sent to the server, one entry per command."""
    sent, command = [], manager._scripts._command

    def counted(*arguments):
        sent.append(arguments[0])
        return command(*arguments)

    monkeypatch.setattr(manager._scripts, "_command", counted)
    return sent


def counts(commands, call):
    del commands[:]
    call()
    return len(commands)


def test_a_batch_of_256_takes_one_round_trip_a_call(manager, commands):
    ids = [manager.add(tokens=[n, *range(8)]) for n in range(256)]
    calls = {
        "prefill": lambda: manager.extend(ids, 7),
        "commit": lambda: manager.commit(ids),
        "decode": lambda: manager.extend(ids),
        "match": lambda: manager.match(ids[0]),
        "can_extend": lambda: manager.can_extend(ids),
        "fork": lambda: manager.fork(ids[0], 255),
        "copies": lambda: manager.extend([ids[0], *range(256, 511)]),
        "reorder": lambda: manager.reorder(ids, np.zeros(256, int)),
        "truncate": lambda: manager.truncate(ids[0], 2),
        "hand_over": lambda: manager.hand_over(ids, manager.worker),
        "adopt": lambda: manager.adopt(ids),
        "snapshot and restore": lambda: manager.restore(manager.snapshot([])),
        "free": lambda: manager.free(ids),
        "owners": manager.owners,
        "heartbeat": manager.heartbeat,
    }
    for file in (resources.files(coordinator) / "scripts").iterdir():  # as after some time of use
        connection.connect(manager.url, 10).script_load(connection.script(file.name.removesuffix(".lua"))[0])
    assert {name: counts(commands, call) for name, call in calls.items()} == dict.fromkeys(calls, 1)


def test_reading_ones_own_sequences_asks_nobody(manager, commands):
    manager.extend(manager.add("s"), 9)
    for read in (manager.lengths, manager.versions, manager.block_tables, manager.to_csr, manager.snapshot):
        assert counts(commands, lambda read=read: read(["s"])) == 0
    assert counts(commands, manager.check_lease) == 0 == counts(commands, lambda: manager.seq_ids)
