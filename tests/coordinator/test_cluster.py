"""Pools on a Redis Cluster: each lies whole on one of its servers, and any server may be asked for it."""

import contextlib

import numpy as np
import pytest
from needs import need_module
from pool_workers import SIZES, all_calls
from redis_servers import free_cluster_port, free_port, new_pool, real_server, started, wait_for
from saved import wall
from server_state import expire, state_of

from pagedkv.coordinator import CoordinatorError, RedisBlockManager, RequestQueue, TextRequest, Unreachable
from pagedkv.coordinator.connection import connect, keys_of
from pagedkv.store import Layout
from pagedkv.store.redis import RedisPageStore

NODES, SLOTS = 3, 16384


class Cluster:
    """Primaries with a share of the slots each, and a password, which has to come along wherever one is sent."""

    def __init__(self, folder, stack):
        need_module("redis", "redis")
        self.ports, self.clients = [], []
        for n in range(NODES):
            options = ["--cluster-enabled", "yes", "--requirepass", "right"]
            process, port = started(folder / str(n), *options, port=free_cluster_port())
            stack.callback(process.wait)
            stack.callback(process.kill)
            self.ports.append(port)
        self.urls = [f"redis://:right@127.0.0.1:{port}" for port in self.ports]
        self.clients = [connect(url, 10) for url in self.urls]
        for n, client in enumerate(self.clients):
            stack.callback(client.close)
            first, end = (SLOTS * m // NODES for m in (n, n + 1))
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", n + 1)
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.ports[0])
        self.ids = [client.execute_command("CLUSTER", "MYID").decode() for client in self.clients]
        wait_for(lambda: all(map(self.agrees, self.clients)))

    @staticmethod
    def agrees(client):
        info = client.execute_command("CLUSTER", "INFO").split()
        return b"cluster_state:ok" in info and b"cluster_slots_ok:%d" % SLOTS in info

    def slot(self, pool):
        return self.clients[0].execute_command("CLUSTER", "KEYSLOT", keys_of(pool)[0])

    def pool_on(self, n):
        """The name of a new pool whose slot lies on server n."""
        return next(pool for pool in iter(new_pool, None) if self.slot(pool) * NODES // SLOTS == n)

    def holders(self, pool):
        """The servers that hold keys of a pool."""
        found = [any(pool.encode() in key for key in client.scan_iter()) for client in self.clients]
        return np.flatnonzero(found).tolist()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        yield Cluster(tmp_path_factory.mktemp("cluster"), stack)


def test_pools_lie_on_different_servers_and_behave_as_on_one(cluster, tmp_path):
    with real_server(tmp_path) as url:
        alone = RedisBlockManager(url, "p", worker="w", lease_seconds=600, **SIZES)
        expected = [repr(result) for result in all_calls(alone)]
    for n in range(NODES):
        for asked in cluster.urls:
            pool = cluster.pool_on(n)
            manager = RedisBlockManager(asked, pool, worker="w", lease_seconds=600, **SIZES)
            assert [repr(result) for result in all_calls(manager)] == expected
            assert manager.num_free == manager.num_blocks
            assert cluster.holders(pool) == [n]


@pytest.mark.parametrize("n", range(NODES))
def test_two_workers_that_ask_different_servers_share_a_pool(cluster, n):
    pool = cluster.pool_on(n)
    a, b = (
        RedisBlockManager(url, pool, lease_seconds=600, worker=name, **SIZES)
        for url, name in zip(cluster.urls, "ab", strict=False)
    )
    a.add("s", tokens=range(9))
    a.extend("s", None)
    a.commit("s")
    b.add("t", tokens=range(9))
    assert b.extend("t", None).start.tolist() == [8]
    a.hand_over("s", "b")
    assert b.adopt() == ["s"] and len(b.extend(["s", "t"]).slots) == 2
    state_of(cluster.urls[n], pool)
    expire(cluster.clients[n], pool, "b")
    assert set(a.reap().seq_ids) == {"s", "t"} and a.num_free == a.num_blocks


def test_requests_and_pages_of_a_pool_are_found_from_any_server(cluster):
    cache = wall()
    pages = {bytes([i]) * 32: cache.storage.page(i) for i in range(3)}
    for n in range(NODES):
        pool = cluster.pool_on(n)
        first, second = (RequestQueue(url, pool, worker=url) for url in cluster.urls[:2])
        assert first.put([TextRequest("a", "x"), TextRequest("b", "y")]) == 2
        assert [request.id for request in second.take(2).new] == ["a", "b"]
        assert second.finish("b", {"text": "z"}) and first.results() == {"b": {"text": "z"}}
        assert first.claims() == {"a": second.worker} and not first.done
        stores = [RedisPageStore(url, Layout.of(cache.storage, "m"), pool=pool) for url in cluster.urls]
        assert stores[0].put_many(pages.items()) == 3
        for store in stores:
            found = store.get_many([*pages, b"?" * 32])
            assert [page is None for page in found] == [False] * 3 + [True]
            assert sorted(store.keys()) == sorted(pages)
        assert stores[1].delete(next(iter(pages))) and next(iter(pages)) not in stores[2]
        assert cluster.holders(pool) == [n]
        first.forget()


def test_a_pool_that_moves_to_another_server_is_followed(cluster):
    """While its slot is on the way nothing happens; afterwards all goes on where it was."""
    source, target, cache = 0, 2, wall()
    pool = cluster.pool_on(source)
    slot, (giver, taker) = cluster.slot(pool), (cluster.clients[source], cluster.clients[target])
    manager = RedisBlockManager(cluster.urls[1], pool, timeout=0.3, lease_seconds=600, **SIZES)
    queue = RequestQueue(cluster.urls[1], pool)
    store = RedisPageStore(cluster.urls[1], Layout.of(cache.storage, "m"), pool=pool)
    store.put_many([(b"k" * 32, cache.storage.page(0))])
    manager.add("s", tokens=range(9))
    manager.extend("s", None)
    queue.put([TextRequest("a", "x")])
    before = state_of(cluster.urls[source], pool)

    def setslot(client, *what):
        client.execute_command("CLUSTER", "SETSLOT", slot, *what)

    setslot(taker, "IMPORTING", cluster.ids[source])
    setslot(giver, "MIGRATING", cluster.ids[target])
    keys = giver.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100)
    for n, key in enumerate(keys):
        to = ["127.0.0.1", cluster.ports[target], key, 0, 5000, "AUTH", "right"]
        assert giver.execute_command("MIGRATE", *to) == b"OK"
        if n == len(keys) // 2:
            with pytest.raises(Unreachable, match=r"TRYAGAIN|Multiple keys"):
                manager.extend("s")
    for client in (taker, giver, cluster.clients[1]):
        setslot(client, "NODE", cluster.ids[target])
    assert state_of(cluster.urls[target], pool) == before and cluster.holders(pool) == [target]
    assert manager.extend("s").start.tolist() == [9]
    assert [request.id for request in queue.take().new] == ["a"]
    with contextlib.suppress(ConnectionError):  # this is how a store learns of it
        store.get_many([b"k" * 32])
    assert store.get_many([b"k" * 32])[0] is not None


def test_who_was_sent_to_a_server_that_died_asks_the_first_one_again(cluster):
    pool, cache, gone = cluster.pool_on(0), wall(), f"redis://127.0.0.1:{free_port()}"
    manager = RedisBlockManager(cluster.urls[1], pool, lease_seconds=600, **SIZES)
    queue = RequestQueue(cluster.urls[1], pool)
    store = RedisPageStore(cluster.urls[1], Layout.of(cache.storage, "m"), pool=pool)
    manager._scripts._reach(gone)
    assert manager.add("s") == "s"
    queue._reach(gone)
    assert queue.put([TextRequest("a", "x")]) == 1
    store._redis = connect(gone, 1)
    for _ in range(2):
        with contextlib.suppress(ConnectionError):
            assert store.keys() == [] and b"k" * 32 not in store
    assert store.put_many([(b"k" * 32, cache.storage.page(0))]) == 1


@pytest.mark.parametrize(
    ("wrong", "says"),
    [(("right", "secret"), "refuses the password in url"), ((":right@", ""), "password in url")],
)
def test_a_wrong_password_is_named_as_by_one_server(cluster, wrong, says):
    for n in range(NODES):
        with pytest.raises(CoordinatorError, match=says) as caught:
            RedisBlockManager(cluster.urls[0].replace(*wrong), cluster.pool_on(n), **SIZES)
        assert "secret" not in str(caught.value)


def test_a_cluster_has_one_database(cluster):
    with pytest.raises(CoordinatorError, match="url must name database 0"):
        RedisBlockManager(cluster.urls[0] + "/1", cluster.pool_on(0), **SIZES)
