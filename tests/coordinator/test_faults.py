"""What breaks between a worker and its pool: nothing that was acknowledged is lost, nothing happens twice."""

import contextlib
import random
import shutil
import signal
import time

import pytest
import redis_servers
import server_state
from cut_proxy import Proxy
from needs import STRESS
from pool_workers import SIZES, Process, all_calls
from redis_servers import new_pool, real_server, servers, wait_for  # noqa: F401  a fixture
from server_state import expire, state_of

from pagedkv import PoolExhausted
from pagedkv.coordinator import CoordinatorError, PoolLost, RedisBlockManager, Unreachable
from pagedkv.coordinator.connection import connect, keys_of

TIMES = 20 if STRESS else 2


# The connection is cut


@pytest.fixture
def proxy(servers):  # noqa: F811
    proxy = Proxy(int(servers("real").rpartition(":")[2]))
    yield proxy
    proxy.close()


@pytest.mark.parametrize("fate", ["lose", "mute", "half"])
def test_a_cut_connection_changes_neither_results_nor_state(proxy, servers, fate):  # noqa: F811
    url, results, kinds = servers("real"), {}, []
    for way in ("straight", "cut"):
        pool = new_pool()
        manager = RedisBlockManager(proxy.url, pool, worker="w", timeout=20, lease_seconds=600, **SIZES)
        manager.observers.append(lambda event: kinds.append(event.kind))
        calls, results[way] = all_calls(manager), []
        while True:
            proxy.plan = [fate] if way == "cut" else []
            try:
                results[way].append(repr(next(calls)))
            except StopIteration:
                break
        state = state_of(url, pool)
        results[way] += [state.queue, state.pool[b"changes"]]
    proxy.plan = []
    assert results["cut"] == results["straight"]
    assert kinds.count("conflict") >= 16


def test_cuts_at_random_between_two_workers(proxy, servers):  # noqa: F811
    """`all_calls` again and again, beside a worker whose connection is whole."""
    url, draw = servers("real"), random.Random(0)
    for _ in range(TIMES):
        pool = new_pool()
        cut = RedisBlockManager(proxy.url, pool, worker="w", timeout=20, lease_seconds=600, **SIZES)
        other = RedisBlockManager(url, pool)
        calls = all_calls(cut)
        with contextlib.suppress(StopIteration, PoolExhausted):
            while True:
                proxy.plan = [
                    draw.choice(["lose", "mute", "half", "pass"]) for _ in range(draw.randint(0, 2))
                ]
                next(calls)
                other.extend(other.add())
                state_of(url, pool)
        proxy.plan = []
        cut.leave()
        assert set(state_of(url, pool).tables) == {b"i%d" % seq for seq in other.seq_ids}


# The server is slow


def test_a_call_that_timed_out_may_have_happened_and_is_repeated(proxy, servers):  # noqa: F811
    for _ in range(TIMES):
        pool = new_pool()
        manager = RedisBlockManager(proxy.url, pool, timeout=0.2, lease_seconds=600, **SIZES)
        manager.extend(manager.add("s"), 5)
        manager.fork("s", ["t"])
        proxy.plan = ["hang"]
        with pytest.raises(Unreachable, match=r"timeout = 0\.2 s"):
            manager.extend(["s", "t"], 2)
        assert state_of(servers("real"), pool).seqs[b"ss"][1] == 7, "it did happen"
        assert manager.lengths(["s", "t"]).tolist() == [5, 5]
        with pytest.raises(Unreachable, match="repeat it"):
            manager.add()
        reservation = manager.extend(["s", "t"], 2)
        assert len(reservation.copies) == 1 and reservation.start.tolist() == [5, 5]
        assert manager.lengths(["s", "t"]).tolist() == [7, 7]
        assert manager.add() == 0
        manager.free(["s", "t"])
        assert state_of(servers("real"), pool).owners == {}


def test_a_call_that_never_arrived_is_repeated_too(proxy, servers):  # noqa: F811
    manager = RedisBlockManager(proxy.url, new_pool(), timeout=0.2, lease_seconds=600, **SIZES)
    proxy.plan = ["lose"] * 50
    with pytest.raises(Unreachable):
        manager.add("s")
    proxy.plan = []
    assert manager.add("s") == "s" and manager.seq_ids == ["s"]


# The server is restarted


def restarted(process, port, folder, *options):
    process.kill()
    process.wait()
    return redis_servers.started(folder, *options, port=port)[0]


AOF = ["--appendonly", "yes", "--appendfsync", "always"]


def test_with_an_append_only_file_a_restart_loses_nothing(tmp_path):
    process, port = redis_servers.started(tmp_path, *AOF)
    try:
        url, pool = f"redis://127.0.0.1:{port}", new_pool()
        manager = RedisBlockManager(url, pool, timeout=30, lease_seconds=600, **SIZES)
        draw = random.Random(1)
        manager.add("s", tokens=range(9))
        manager.extend("s", None)
        manager.commit("s")
        for n in range(TIMES):
            for _ in range(draw.randint(1, 9)):
                manager.extend(manager.fork("s"), 3)
            before = state_of(url, pool)
            process = restarted(process, port, tmp_path, *AOF)
            assert state_of(url, pool) == before
            assert manager.extend("s").start.tolist() == [9 + n], "and the worker goes on"
            manager.free([seq for seq in manager.seq_ids if seq != "s"])
    finally:
        process.kill()
        process.wait()


def test_a_server_that_forgot_everything_is_noticed_and_the_pool_built_again(tmp_path):
    process, port = redis_servers.started(tmp_path)
    try:
        url, pool = f"redis://127.0.0.1:{port}", new_pool()
        for _ in range(TIMES):
            a, b = (
                RedisBlockManager(url, pool, worker=n, timeout=30, lease_seconds=600, **SIZES) for n in "ab"
            )
            for manager in (a, b):
                manager.add(f"of {manager.worker}", tokens=range(9))
                manager.extend(f"of {manager.worker}", None)
                manager.commit(f"of {manager.worker}")
            process = restarted(process, port, tmp_path)
            for manager in (a, b):
                for call in (manager.add, manager.heartbeat, lambda m=manager: m.num_free, manager.reap):
                    with pytest.raises(PoolLost, match=pool):
                        call()
            fresh = {m: RedisBlockManager(url, pool, worker=m.worker, timeout=30, **SIZES) for m in (a, b)}
            with pytest.raises(PoolLost):
                a.add()  # the pool exists again, but it is another one: never a mix
            for old, new in fresh.items():
                assert len(new.restore(old.snapshot())) == 3
                assert new.length(f"of {new.worker}") == 9
            assert set(state_of(url, pool).seqs) == {b"sof a", b"sof b"}
            process = restarted(process, port, tmp_path)  # the next round begins with nothing
    finally:
        process.kill()
        process.wait()


def test_a_server_that_forgot_the_last_changes_is_noticed(tmp_path):
    process, port = redis_servers.started(tmp_path)
    try:
        url, pool = f"redis://127.0.0.1:{port}", new_pool()
        manager, idle = (RedisBlockManager(url, pool, timeout=30, lease_seconds=600, **SIZES) for _ in "ab")
        idle.extend(idle.add("i"), 5)
        client = connect(url, 10)
        client.save()
        manager.add("s")
        process = restarted(process, port, tmp_path)  # goes on with what was saved
        with pytest.raises(PoolLost):
            manager.extend("s")
        assert idle.extend("i").start.tolist() == [5], "of this one nothing was forgotten"
    finally:
        process.kill()
        process.wait()


# Workers die or freeze


def test_workers_killed_at_any_moment_leave_a_whole_pool(servers, tmp_path):  # noqa: F811
    url, pool, draw = servers("real"), new_pool(), random.Random(2)
    judge = RedisBlockManager(url, pool, lease_seconds=3600, timeout=30, **SIZES)
    client = connect(url, 10)
    judge.add("kept", tokens=[1, 2, 3, 4, 5, 6, 7, 8, 9])
    judge.extend("kept", None)
    judge.commit("kept")
    table = judge.block_tables(["kept"]).tolist()
    for n in range(TIMES):
        victim = Process(tmp_path, url, pool, f"v{n}", n, 10**6, lease_seconds=600.0)
        wait_for(lambda v=victim: len(v.lines()) > 3)
        time.sleep(draw.random() * 0.2)
        victim.kill()
        held = {key for key, (token, *_) in state_of(url, pool).seqs.items() if token != judge.token}
        expire(client, pool, f"v{n}")
        found = judge.reap()
        assert found.workers == (f"v{n}",) and len(found.seq_ids) == len(held)
        state = state_of(url, pool)
        assert set(state.seqs) == {b"skept"} and state.copying == {}
        assert sorted(state.owners) == sorted(table[0]) and judge.reap().workers == ()
        assert judge.block_tables(["kept"]).tolist() == table
    judge.free("kept")
    assert judge.num_free == judge.num_blocks


def test_a_worker_that_was_frozen_past_its_lease_changes_nothing_when_it_wakes(servers, tmp_path):  # noqa: F811
    url, pool = servers("real"), new_pool()
    judge = RedisBlockManager(url, pool, lease_seconds=3600, timeout=30, **SIZES)
    client = connect(url, 10)
    for n in range(TIMES):
        frozen = Process(tmp_path, url, pool, f"f{n}", n, 10**6, lease_seconds=600.0)
        wait_for(lambda f=frozen: len(f.lines()) > 3)
        frozen.signal(signal.SIGSTOP)
        time.sleep(0.02)  # what it had sent arrives
        expire(client, pool, f"f{n}")
        if n % 2:
            judge.reap()
        before = state_of(url, pool)
        frozen.signal(signal.SIGCONT)
        assert frozen.join() == 0 and frozen.last == "LeaseLost"
        assert state_of(url, pool) == before
        judge.reap()
        assert judge.num_free == judge.num_blocks


# The wrong server, or the wrong settings


def refused(says, *args, **options):
    with pytest.raises(CoordinatorError, match=says) as caught:
        RedisBlockManager(*args, **{"timeout": 0.3} | SIZES | options)
    assert "secret" not in str(caught.value)


def test_nobody_listens():
    port = redis_servers.free_port()
    refused(r"timeout = 0\.3 s \(is url right\?\)", f"redis://:secret@127.0.0.1:{port}")


def test_a_wrong_password_or_none(tmp_path):
    with real_server(tmp_path, "--requirepass", "right") as url:
        refused("password in url", url)
        refused("password in url", url.replace("//", "//:secret@"))
        RedisBlockManager(url.replace("//", "//:right@"), **SIZES).add()


def test_a_replica_cannot_be_written_to(tmp_path):
    with real_server(tmp_path, "--replicaof", "127.0.0.1", "1") as url:
        refused("url must name the primary", url)


def test_a_server_without_memory_refuses_to_grow_and_still_frees(tmp_path):
    with real_server(tmp_path) as url:
        manager = RedisBlockManager(url, "p", **SIZES)
        manager.extend(manager.add("s"), 9)
        client = connect(url, 10)
        before = state_of(url, "p")
        client.config_set("maxmemory", "100kb")
        for call in (manager.add, lambda: manager.extend("s", 9), lambda: manager.fork("s")):
            with pytest.raises(CoordinatorError, match="maxmemory is used up"):
                call()
        freed = manager.free("s")
        client.config_set("maxmemory", 0)
        after = state_of(url, "p")
        assert len(freed) == 3 and after.seqs == {} and after.pool[b"next_id"] == before.pool[b"next_id"]


@pytest.mark.parametrize("kind", ["fake", "real"])
def test_keys_that_are_anothers(servers, kind):  # noqa: F811
    url, pool = servers(kind), new_pool()
    client = connect(url, 10)
    client.set(keys_of(pool)[0], "something else")
    refused("pool = .* its keys hold something else", url, pool)
    assert client.get(keys_of(pool)[0]) == b"something else"
    client.delete(keys_of(pool)[0])
    client.hset(keys_of(pool)[0], "something", "else")
    refused("pool .* has format none", url, pool)
    manager = RedisBlockManager(url, new_pool(), **SIZES)
    client.hset(keys_of(manager.pool)[0], "format", 2)
    refused("pool .* has format 2, this version of pagedkv knows 1", url, manager.pool)


@pytest.mark.parametrize("url", ["127.0.0.1", "http://127.0.0.1", "redis://127.0.0.1:port", ""])
def test_a_url_that_is_none(url):
    with pytest.raises(ValueError, match="url must be redis://"):
        RedisBlockManager(url, **SIZES)


def test_a_script_that_the_server_forgot_is_sent_again(servers):  # noqa: F811
    manager = RedisBlockManager(servers("real"), new_pool(), **SIZES)
    client = connect(servers("real"), 10)
    client.script_flush()
    assert manager.add() == 0


def test_a_pool_that_lost_a_block_says_so_and_changes_nothing(servers):  # noqa: F811
    url = servers("real")
    manager = RedisBlockManager(url, new_pool(), **SIZES)
    manager.extend(manager.add("s"), 9)
    client = connect(url, 10)
    client.hdel(keys_of(manager.pool)[4], 1)
    before = server_state.read(client, manager.pool)
    for call in (
        lambda: manager.free("s"),
        lambda: manager.truncate("s", 0),
        lambda: manager.release_before("s", 9),
    ):
        with pytest.raises(CoordinatorError, match="damaged: block 1"):
            call()
    assert server_state.read(client, manager.pool) == before


def test_the_history_of_a_copied_folder_is_another_pool(tmp_path):
    """A backup of an older moment, played back beside the original, has the generation but not the changes."""
    folder, copy = tmp_path / "a", tmp_path / "b"
    with real_server(folder, *AOF) as url:
        manager = RedisBlockManager(url, "p", **SIZES)
        manager.add("s")
        shutil.copytree(folder, copy)
        manager.add("t")
    with real_server(copy, *AOF) as url:
        manager._scripts = type(manager._scripts)(url, "p", 5.0)
        with pytest.raises(PoolLost):
            manager.add("u")
