"""Pages of a shared pool, on one machine and on two: what is here, what is fetched, and what is computed again."""

import contextlib
import secrets

import numpy as np
import pytest
from needs import need_module
from redis_servers import KINDS, new_pool, servers  # noqa: F401

from pagedkv import StalePlan
from pagedkv.coordinator import LeaseLost, RedisBlockManager
from pagedkv.coordinator.pages import SharedCache
from pagedkv.coordinator.shared_memory import SharedStorage
from pagedkv.lm import Llama
from pagedkv.store import Layout, RedisPageStore

need_module("redis", "redis")

BLOCKS, SIZE = 24, 4


@pytest.fixture(scope="module")
def model():
    return Llama.load()


@pytest.fixture(params=KINDS)
def url(request, servers):  # noqa: F811
    return servers(request.param)


class Cluster:
    """Workers of one pool: each is a cache on a machine, which is a name of shared memory."""

    def __init__(self, url, model, stack):
        self.url, self.model, self.stack, self.pool = url, model, stack, new_pool()
        self.name = secrets.token_hex(6)

    def worker(self, machine="here", *, store=False, **options):
        c = self.model.config
        manager = RedisBlockManager(
            self.url,
            self.pool,
            num_blocks=BLOCKS,
            block_size=SIZE,
            prefix_cache=True,
            lease_seconds=600,
            **options,
        )
        storage = SharedStorage(
            f"{self.name}-{machine}", c.num_layers, BLOCKS, SIZE, c.num_kv_heads, c.head_dim
        )
        self.stack.callback(storage.close, unlink=True)
        if store:
            store = RedisPageStore(self.url, Layout.of(storage, "m"), pool=self.pool)
            self.stack.callback(store.close)
        return SharedCache(manager, storage, store=store or None)


@pytest.fixture
def cluster(url, model):
    with contextlib.ExitStack() as stack:
        yield Cluster(url, model, stack)


PROMPT = "ROMEO: what light is it"  # 23 characters: five full blocks and three


def computed(model, cache, seq, text, count=None):
    """Run the next tokens of a text through the model and commit them: logits, and how many were computed."""
    reservation = cache.extend(seq, count)
    work = cache.work(reservation)
    start, end = int(work.start[0]), int(work.start[0] + work.counts[0])
    plan = cache.plan([seq], work.counts)

    def attend(layer, q, k, v):
        cache.write(layer, work.reservation, k[work.lacking], v[work.lacking])
        return cache.attend(layer, q, plan)

    tokens = np.array(model.tokenizer.encode(text))
    logits = model.decode(tokens[start:end], np.arange(start, end), attend)
    cache.commit([seq], [tokens[int(reservation.start[0]) : end]])
    return logits[-1], int(work.lacking.sum())


def started(model, cache, text, seq=None):
    seq = cache.add(seq, tokens=model.tokenizer.encode(text))
    return seq, *computed(model, cache, seq, text)


def expected(model, text):
    return model.forward_full(model.tokenizer.encode(text))[-1]


def near(logits, model, text):
    return np.allclose(logits, expected(model, text), atol=1e-4)


def test_a_prompt_is_computed_once_for_all_workers_of_a_machine(cluster, model):
    a, b = cluster.worker(), cluster.worker()
    assert started(model, a, PROMPT)[2] == 23
    seq, logits, n = started(model, b, PROMPT + ", sir")
    assert n == 28 - 20 and near(logits, model, PROMPT + ", sir")
    assert np.array_equal(b.block_tables([seq])[0, :5], a.block_tables(a.seq_ids)[0, :5])


def test_another_machine_fetches_the_pages_it_lacks_once(cluster, model):
    a, b, c = (
        cluster.worker(store=True),
        cluster.worker("there", store=True),
        cluster.worker("there", store=True),
    )
    started(model, a, PROMPT)
    faults = []
    for cache in (b, c):
        cache.store.observers.append(faults.append)
        _, logits, n = started(model, cache, PROMPT)
        assert n == 3 and near(logits, model, PROMPT)
    assert [event.counts for event in faults] == [{"pages": 5, "damaged": 0}]


def test_without_a_store_another_machine_computes_what_it_lacks(cluster, model):
    a, b, c = cluster.worker(), cluster.worker("there"), cluster.worker("there")
    started(model, a, PROMPT)
    _, logits, n = started(model, b, PROMPT)
    assert n == 23 and near(logits, model, PROMPT)
    _, logits, n = started(model, c, PROMPT)
    assert n == 3 and near(logits, model, PROMPT)


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "another"])
def test_a_page_that_is_not_right_in_the_store_is_computed_again_alone(cluster, model, damage):
    a, b = cluster.worker(store=True), cluster.worker("there", store=True)
    started(model, a, PROMPT)
    digests, store = a._digests(a.seq_ids[0]), a.store
    name, value = store._name(digests[2]), bytearray(store._redis.get(store._name(digests[2])))
    value[100] ^= 1
    replacement = {
        "missing": None,
        "cut": bytes(value[:-8]),
        "flipped": bytes(value),
        "another": store._redis.get(store._name(digests[1])),
    }[damage]
    store._redis.delete(name) if replacement is None else store._redis.set(name, replacement)
    _, logits, n = started(model, b, PROMPT)
    assert n == 3 + SIZE and near(logits, model, PROMPT)
    assert b.store.corrupt == (damage != "missing")
    c = cluster.worker("third", store=True)  # b stored it anew
    assert started(model, c, PROMPT)[2] == 3


def test_a_store_that_fails_costs_time_only(cluster, model, monkeypatch):
    a, b = cluster.worker(store=True), cluster.worker("there", store=True)

    def down(*_):
        raise ConnectionError("down")

    for cache in (a, b):
        monkeypatch.setattr(cache.store, "put_many", down)
        monkeypatch.setattr(cache.store, "get_many", down)
    assert near(started(model, a, PROMPT)[1], model, PROMPT)
    _, logits, n = started(model, b, PROMPT)
    assert n == 23 and near(logits, model, PROMPT)
    assert (a.store_failures, b.store_failures) == (1, 2)


def test_memory_that_was_lost_while_redis_went_on_is_never_read(cluster, model):
    a = cluster.worker()
    started(model, a, PROMPT)
    a.free(a.seq_ids)  # the blocks stay findable
    a.storage.close(unlink=True)
    b = cluster.worker()
    assert b.storage.created
    seq = b.add(tokens=model.tokenizer.encode(PROMPT))
    assert b.match(seq) == 20
    logits, n = computed(model, b, seq, PROMPT)
    assert n == 23 and near(logits, model, PROMPT)


def test_a_block_with_another_text_elsewhere_is_not_taken_for_the_one_that_is_here(cluster, model):
    a, b = cluster.worker(), cluster.worker("there")
    started(model, a, PROMPT)
    a.free(a.seq_ids)
    other = "JULIET: good night, good night! Parting is such sweet sorrow"
    first = b.add()
    b.extend(first, BLOCKS * SIZE)  # takes every block of the pool, so that nothing of a's is found any more
    b.free(first)
    started(model, b, other)
    _, logits, n = started(model, a, other)
    assert n == len(other) and near(logits, model, other)


@pytest.mark.parametrize("change", ["write", "copy", "set_page", "restore"])
def test_whatever_changes_a_page_wipes_what_it_was_known_for(cluster, model, change):
    a = cluster.worker()
    storage, digest = a.storage, b"d" * 32
    storage.remember(range(BLOCKS), [digest] * BLOCKS)
    if change == "write":
        shape = (2, storage.num_kv_heads, storage.head_dim)
        storage.write(0, [13, 14], np.zeros(shape, np.float32), np.zeros(shape, np.float32))
    elif change == "copy":
        storage.copy_blocks([(1, 3, 2)])
    elif change == "set_page":
        storage.set_page(3, storage.page(1))
    else:
        seq = a.add()
        a.extend(seq, 13)
        snapshot = a.snapshot([seq])
        a.free(seq)
        held = a.add()
        a.extend(held, 3 * SIZE)
        storage.remember(range(BLOCKS), [digest] * BLOCKS)
        pairs = a.manager.restore(snapshot)
        assert not storage.holds(pairs[:, 1], [digest] * 4).any()
        return
    assert storage.holds(range(BLOCKS), [digest] * BLOCKS).tolist() == [i != 3 for i in range(BLOCKS)]


def test_a_block_counts_as_here_when_it_is_complete_and_not_before(cluster, model):
    a, b = cluster.worker(), cluster.worker()
    seq = a.add(tokens=model.tokenizer.encode(PROMPT))
    reservation = a.extend(seq, None)
    blocks = np.unique(reservation.slots // SIZE)
    assert not a.storage.digests[blocks].any()
    a.free(seq)  # as a reaper would, if it died here
    assert started(model, b, PROMPT)[2] == 23


# Handing over


@pytest.mark.parametrize("there", [False, True], ids=["same machine", "another machine"])
@pytest.mark.parametrize("store", [False, True], ids=["no store", "store"])
def test_prefill_here_decode_there(cluster, model, there, store):
    a = cluster.worker(store=store)
    b = cluster.worker("there" if there else "here", store=store, worker="b")
    seq, logits, _ = started(model, a, PROMPT)
    before = a.storage.arrays["keys"].copy()
    text = PROMPT + model.tokenizer.decode([int(np.argmax(logits))])
    memory = a.hand_over(seq, "b")
    assert a.seq_ids == []
    assert b.adopt([seq], memory) == [seq]
    assert b.length(seq) == 23
    assert np.array_equal(a.storage.arrays["keys"], before)
    steps = []
    for _ in range(6):
        logits, n = computed(model, b, seq, text, 1)
        steps.append(n)
        assert near(logits, model, text)
        text += model.tokenizer.decode([int(np.argmax(logits))])
    first = 1 if not there else 1 + 3 if store else 1 + 23
    assert steps == [first, 1, 1, 1, 1, 1]


def test_a_sequence_that_lacks_pages_is_not_handed_over(cluster, model):
    a, b = cluster.worker(), cluster.worker("there")
    started(model, a, PROMPT)
    seq = b.add(tokens=model.tokenizer.encode(PROMPT))
    b.extend(seq, None)
    with pytest.raises(ValueError, match="lacks pages"):
        b.hand_over(seq, a.manager.worker)
    assert seq in b.seq_ids


# What happens to sequences that lack pages


def test_forks_and_beams_of_a_sequence_that_lacks_pages_lack_them_too(cluster, model):
    a, b = cluster.worker(), cluster.worker("there")
    started(model, a, PROMPT)
    seq = b.add(tokens=model.tokenizer.encode(PROMPT))
    b.extend(seq, None)
    other, child = b.add(), b.fork(seq)[0]
    b.reorder([seq, other], [1, 0])
    for one, whole in ((child, False), (other, False), (seq, True)):
        work = b.work(b.extend(one, 1))
        assert work.counts[0] == (1 if whole else 24)
    b.truncate(child, 2)
    assert b.work(b.extend(child, 1)).start[0] == 0
    b.free([child, other, seq])
    assert not b._lost and not b._known


def test_nothing_is_written_after_the_lease(cluster, model, monkeypatch):
    a = cluster.worker()
    seq = a.add()
    reservation = a.extend(seq, 2)
    keys = np.ones((2, a.storage.num_kv_heads, a.storage.head_dim), np.float32)
    a.write(0, reservation, keys, keys)
    current = a.versions([seq])
    monkeypatch.setattr(a.manager, "versions", lambda _: current)  # this may be remembered, the lease may not
    monkeypatch.setattr(type(a.manager), "lease_left", -0.1)
    before = a.storage.arrays["keys"].copy()
    with pytest.raises(LeaseLost):
        a.write(0, reservation, keys + 1, keys)
    assert np.array_equal(a.storage.arrays["keys"], before)


def test_work_for_a_reservation_of_the_past_is_stale(cluster):
    a = cluster.worker()
    seq = a.add()
    reservation = a.extend(seq, 2)
    a.extend(seq, 1)
    with pytest.raises(StalePlan):
        a.work(reservation)
