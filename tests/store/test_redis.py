"""The page store in Redis keeps the promises of the one in a folder, against fakeredis and a real server."""

import subprocess
import time

import numpy as np
import pytest
from needs import need_module, need_program
from redis_servers import free_port, new_pool, real_server, servers  # noqa: F401
from saved import wall

from pagedkv.store import Layout, SaveFailed
from pagedkv.store import redis as redis_pages
from pagedkv.store.redis import RedisPageStore

redis = need_module("redis", "redis")


def key(number):
    return number.to_bytes(32, "big")


def same(page, other):
    return page.keys() == other.keys() and all(
        np.array_equal(page[n], other[n], equal_nan=True) for n in page
    )


@pytest.fixture(scope="module")
def cache():
    return wall()


@pytest.fixture(params=["fake", "real"])
def url(request, servers):  # noqa: F811
    return servers(request.param)


@pytest.fixture
def store(url, cache):
    with_events = RedisPageStore(url, Layout.of(cache.storage, "m"), pool=new_pool(), timeout=60)
    with_events.events = []
    with_events.observers.append(with_events.events.append)
    yield with_events
    with_events.close()


def value(store, number):
    return store._redis.get(store._name(key(number)))


def test_missing_pages_are_none_in_their_place(store, cache):
    pages = [cache.storage.page(block) for block in (0, 1, 2)]
    assert store.put_many((key(i), page) for i, page in enumerate(pages)) == 3
    found = store.get_many([key(0), key(7), key(2)])
    assert found[1] is None
    assert same(found[0], pages[0]) and same(found[2], pages[2])
    assert store.get_many([]) == [] and store.put_many([]) == 0
    assert [event.counts for event in store.events[:1]] == [{"pages": 2, "damaged": 0}]


def test_a_page_is_one_value_with_the_bytes_of_a_record(store, cache):
    page = cache.storage.page(1)
    store.put_many([(key(1), page)])
    assert value(store, 1) == store.layout.pack(key(1), page)
    assert store.keys() == [key(1)]
    assert key(1) in store and key(2) not in store


def test_a_page_is_written_once_and_the_first_stays(store, cache):
    one, two = cache.storage.page(0), cache.storage.page(1)
    assert store.put_many([(key(1), one), (key(1), two)]) == 1
    assert store.put_many([(key(1), two), (key(2), two)]) == 1
    assert same(store.get_many([key(1)])[0], one)
    assert sorted(store.keys()) == [key(1), key(2)]


def test_delete_says_whether_it_was_there(store, cache):
    store.put_many([(key(1), cache.storage.page(0))])
    assert store.delete(key(1)) and not store.delete(key(1))
    assert store.get_many([key(1)]) == [None]


@pytest.mark.parametrize("length", [0, 10, 47, 48, 100, -1])
def test_a_cut_page_is_a_miss_and_is_removed(store, cache, length):
    store.put_many([(key(1), cache.storage.page(0))])
    store._redis.set(store._name(key(1)), value(store, 1)[:length])
    assert store.get_many([key(1)]) == [None]
    assert value(store, 1) is None and store.corrupt == 1
    assert store.events[-1].counts == {"pages": 0, "damaged": 1}
    assert store.put_many([(key(1), cache.storage.page(0))]) == 1
    assert store.get_many([key(1)]) != [None]


def test_a_flipped_bit_anywhere_is_a_miss(store, cache):
    page = cache.storage.page(0)
    record = store.layout.pack(key(1), page)
    for place in np.random.default_rng(0).integers(0, len(record) * 8, 40).tolist():
        damaged = bytearray(record)
        damaged[place // 8] ^= 1 << place % 8
        store._redis.set(store._name(key(1)), bytes(damaged))
        assert store.get_many([key(1)]) == [None], f"bit {place}"


def test_a_page_under_anothers_name_is_never_handed_out(store, cache):
    store.put_many([(key(1), cache.storage.page(0))])
    store._redis.set(store._name(key(2)), value(store, 1))
    assert store.get_many([key(2)]) == [None]
    assert same(store.get_many([key(1)])[0], cache.storage.page(0))


def test_pages_of_another_model_are_a_miss_and_stay(store, cache):
    store.put_many([(key(1), cache.storage.page(0))])
    pool = store._prefix.decode()[len("{pagedkv:") :].partition("}")[0]
    other = RedisPageStore(store.url, Layout.of(cache.storage, "other"), pool=pool)
    assert other.get_many([key(1)]) == [None]
    assert other.corrupt == 0 and same(store.get_many([key(1)])[0], cache.storage.page(0))
    other.close()


def test_pools_know_nothing_of_each_other(store, cache):
    store.put_many([(key(1), cache.storage.page(0))])
    other = RedisPageStore(store.url, store.layout, pool=new_pool())
    assert other.get_many([key(1)]) == [None] and other.keys() == []
    odd = RedisPageStore(store.url, store.layout, pool="a*[b]?\\ü")
    odd.put_many([(key(3), cache.storage.page(0))])
    assert odd.keys() == [key(3)]
    odd.delete(key(3))


def test_a_value_of_another_type_is_a_miss_and_stays(store, cache):
    store._redis.rpush(store._name(key(1)), b"a list")
    assert store.get_many([key(1)]) == [None]
    assert store.put_many([(key(1), cache.storage.page(0))]) == 0
    assert store._redis.llen(store._name(key(1))) == 1


def test_a_page_is_forgotten_as_a_whole(url, cache):
    store = RedisPageStore(url, Layout.of(cache.storage), pool=new_pool(), ttl=0.05)
    store.put_many([(key(1), cache.storage.page(0))])
    assert 0 < store._redis.pttl(store._name(key(1))) <= 50
    time.sleep(0.1)
    assert store.get_many([key(1)]) == [None] and store.keys() == []


def test_without_ttl_a_page_stays(store, cache):
    store.put_many([(key(1), cache.storage.page(0))])
    assert store._redis.pttl(store._name(key(1))) == -1


def test_one_message_as_long_as_it_stays_small(store, cache, monkeypatch):
    record, page = store.layout.record.itemsize, cache.storage.page(0)
    sent = []
    execute = store._redis.execute_command
    monkeypatch.setattr(
        store._redis, "execute_command", lambda *a, **k: sent.append(a[0]) or execute(*a, **k)
    )
    store.put_many([(key(i), page) for i in range(10)])
    assert all(page is not None for page in store.get_many([key(i) for i in range(10)]))
    assert sent == ["MGET"]
    monkeypatch.setattr(redis_pages, "CHUNK_BYTES", 4 * record)
    small = RedisPageStore(store.url, store.layout, pool=new_pool())
    many = small._redis.execute_command
    small._redis.execute_command = lambda *a, **k: sent.append((a[0], len(a[1:]))) or many(*a, **k)
    sent.clear()
    small.put_many((key(i), page) for i in range(10))
    assert all(page is not None for page in small.get_many([key(i) for i in range(10)]))
    assert sent == [("MGET", 4), ("MGET", 4), ("MGET", 2)]


@pytest.mark.parametrize("name", [b"short", "0" * 32, None])
def test_other_keys_are_refused(store, cache, name):
    for call in (
        store.get_many,
        lambda keys: store.put_many([(k, cache.storage.page(0)) for k in keys]),
        lambda keys: store.delete(keys[0]),
    ):
        with pytest.raises(ValueError, match="32 bytes"):
            call([name])


def test_metrics_count_fetched_and_damaged_pages(store, cache):
    from pagedkv.metrics import Metrics

    metrics = Metrics(cache)
    metrics.watch(store)
    store.put_many([(key(1), cache.storage.page(0)), (key(2), cache.storage.page(1))])
    store._redis.set(store._name(key(2)), b"x" * 100)
    store.get_many([key(1), key(2), key(3)])
    numbers = metrics.read()
    assert numbers['pagedkv_page_faults_total{kind="major"}'] == 1
    assert numbers['pagedkv_corrupt_pages_total{tier="redis"}'] == 1
    metrics.close()


# Servers that cannot be used


@pytest.mark.parametrize("ttl", [0, -1, 0.0001, float("nan"), float("inf")])
def test_an_impossible_ttl_is_refused(cache, ttl):
    with pytest.raises(ValueError, match="ttl"):
        RedisPageStore("redis://127.0.0.1:1", Layout.of(cache.storage), ttl=ttl)


@pytest.mark.parametrize("url", ["127.0.0.1:6379", "http://127.0.0.1", "", "redis://127.0.0.1:port"])
def test_a_url_that_is_none_is_refused(cache, url):
    with pytest.raises(ValueError, match="url must be"):
        RedisPageStore(url, Layout.of(cache.storage))


def test_nobody_there(cache):
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:\d+ does not answer \(url, timeout\)"):
        RedisPageStore(f"redis://:hush@127.0.0.1:{free_port()}", Layout.of(cache.storage), timeout=1)


def test_wrong_and_missing_passwords_are_said_and_never_shown(tmp_path, cache):
    with real_server(tmp_path, "--requirepass", "secret") as url:
        layout = Layout.of(cache.storage)
        for wrong in (url, url.replace("//", "//:hush@")):
            with pytest.raises(ConnectionError, match="password in url") as caught:
                RedisPageStore(wrong, layout)
            assert "hush" not in str(caught.value)
        assert RedisPageStore(url.replace("//", "//:secret@"), layout).put_many([]) == 0


def test_a_server_that_is_full_or_a_replica_refuses_and_what_was_there_stays(tmp_path, cache):
    with real_server(tmp_path) as url:
        store = RedisPageStore(url, Layout.of(cache.storage))
        page = cache.storage.page(0)
        store.put_many([(key(1), page)])
        store._redis.config_set("maxmemory", "1")
        with pytest.raises(SaveFailed, match="refuses to store"):
            store.put_many([(key(2), page)])
        store._redis.config_set("maxmemory", "0")
        store._redis.replicaof("127.0.0.1", free_port())
        with pytest.raises(SaveFailed, match="refuses to store"):
            store.put_many([(key(2), page)])
        assert same(store.get_many([key(1)])[0], page)


def test_a_server_that_hangs_is_not_waited_for_for_ever(tmp_path, cache):
    need_program("redis-server")
    import signal

    from redis_servers import started

    process, port = started(tmp_path)
    try:
        store = RedisPageStore(f"redis://127.0.0.1:{port}", Layout.of(cache.storage), timeout=0.05)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(ConnectionError, match="timeout"):
            store.get_many([key(1)])
        process.send_signal(signal.SIGCONT)
        assert store.get_many([key(1)]) == [None]
    finally:
        process.kill()
        process.wait()


def test_without_redis_py_the_message_names_the_extra():
    script = (
        "import sys; sys.modules['redis'] = None\n"
        "from pagedkv import KVStorage\n"
        "from pagedkv.store import Layout\n"
        "from pagedkv.store.redis import RedisPageStore\n"
        "RedisPageStore('redis://x', Layout.of(KVStorage(1, 1, 1, 1, 1)))"
    )
    import sys

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert 'pip install "pagedkv[redis]"' in done.stderr.splitlines()[-1]
