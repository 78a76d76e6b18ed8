"""Four processes on one pool: at any moment the invariants hold, and all that they did is one history."""

import time

import pytest
import server_state
from needs import STRESS
from pool_workers import Process, check_history
from redis_servers import new_pool, servers  # noqa: F401  a fixture

from pagedkv.coordinator import RedisBlockManager
from pagedkv.coordinator.connection import connect

OPERATIONS, BLOCKS, STOPS = 2000 if STRESS else 400, 40, 20


def test_four_processes_work_on_one_pool(servers, tmp_path):  # noqa: F811
    url, pool = servers("real"), new_pool()
    judge = RedisBlockManager(
        url, pool, num_blocks=BLOCKS, block_size=4, prefix_cache=True, lease_seconds=3600
    )
    processes = [
        Process(tmp_path, url, pool, f"w{n}", n, OPERATIONS, lease_seconds=600.0, timeout=60.0)
        for n in range(4)
    ]
    client, stops, versions = connect(url, 30), 0, []
    while stops < STOPS or any(p.process.is_alive() for p in processes):
        state = server_state.read(client, pool)  # one moment, as if all were stopped
        server_state.check(state)
        if int(state.pool[b"changes"]) > (versions[-1] if versions else 0):
            versions.append(int(state.pool[b"changes"]))
        stops += 1
        if not any(p.process.is_alive() for p in processes):
            break
        time.sleep(0.01)
    assert [p.join() for p in processes] == [0] * 4
    diaries = [p.lines() for p in processes]
    assert all("end" in [line["kind"] for line in lines] for lines in diaries), (
        "nobody was stopped by an error"
    )
    assert len(versions) >= STOPS, "there were changes between the stops"
    assert check_history(BLOCKS, diaries) > 2 * OPERATIONS
    state = server_state.read(client, pool)
    server_state.check(state)
    assert (state.seqs, state.owners, state.copying) == ({}, {}, {})
    assert [w.name for w in judge.owners()] == [judge.worker] and judge.num_free == BLOCKS


@pytest.mark.parametrize("wrong", ["twice", "stranger", "version"])
def test_a_history_with_a_fault_is_seen(wrong):
    good = [
        {"kind": "extend", "version": 1, "blocks": {"new": [0, 1]}},
        {"kind": "free", "version": 3, "blocks": {"freed": [0]}},
    ]
    other = [{"kind": "extend", "version": 2, "blocks": {"new": [2]}}]
    assert check_history(4, [good, other]) == 3
    other[0] |= {
        "twice": {"blocks": {"new": [1]}},
        "stranger": {"blocks": {"freed": [3]}},
        "version": {"version": 3},
    }[wrong]
    with pytest.raises(AssertionError):
        check_history(4, [good, other])
