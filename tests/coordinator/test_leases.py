"""Leases, tokens, the reaper, hand-over, copies whose sources wait: what one worker may do and another may not."""

import time

import numpy as np
import pytest
import server_state
from needs import need_module
from redis_servers import new_pool, servers  # noqa: F401  a fixture
from server_state import expire

from pagedkv import PagedKVCache, PoolExhausted
from pagedkv.coordinator import CoordinatorError, LeaseLost, RedisBlockManager
from pagedkv.coordinator.connection import connect, keys_of
from pagedkv.metrics import Metrics

LEASE = 3600.0  # seconds: no test waits for it; `expire` ends one


class Pool:
    """Workers of one pool on one server, and what the server holds of it."""

    def __init__(self, url):
        self.url, self.name, self.client, self.workers = url, new_pool(), connect(url, 10), []

    def worker(self, name=None, **options):
        options = {"num_blocks": 16, "block_size": 4, "prefix_cache": True, "lease_seconds": LEASE} | options
        manager = RedisBlockManager(self.url, self.name, worker=name, **options)
        self.workers.append(manager)
        return manager

    def expire(self, manager):
        """Let a lease end now, as if the worker had been silent for so long."""
        expire(self.client, self.name, manager.worker)

    @property
    def state(self):
        state = server_state.read(self.client, self.name)
        server_state.check(state)
        return state

    def close(self):
        for manager in self.workers:
            manager._scripts.close()
        self.client.close()


@pytest.fixture(params=["fake", "real"])
def pool(request, servers):  # noqa: F811
    pool = Pool(servers(request.param))
    yield pool
    pool.close()


def grown(manager, n, seq_id=None):
    seq_id = manager.add(seq_id)
    manager.extend(seq_id, n)
    return seq_id


# One pool for all


def test_later_workers_join_with_the_settings_of_the_first(pool):
    pool.worker(namespace="model", max_length=50)
    other = RedisBlockManager(pool.url, pool.name)
    assert (other.num_blocks, other.block_size, other.prefix_cache) == (16, 4, True)
    assert (other.tables.max_length, other._namespace) == (50, "model")


def test_ids_are_unique_in_the_whole_pool_and_blocks_are_handed_out_once(pool):
    a, b = pool.worker(), pool.worker()
    assert [a.add(), b.add(), a.add("x")] == [0, 1, "x"]
    with pytest.raises(ValueError, match="'x' exists already"):
        b.add("x")
    taken = [*a.extend([0, "x"], 5).slots // 4, *b.extend(1, 9).slots // 4]
    assert len(set(taken)) == 7 and b.num_free == 9 == a.num_free
    with pytest.raises(PoolExhausted, match="requested 10, free 9"):
        b.extend(1, 40)


def test_another_workers_sequence_is_unknown(pool):
    a, b = pool.worker(), pool.worker()
    grown(a, 5, "hers")
    for call in (b.extend, b.free, b.fork, b.lengths):
        with pytest.raises(KeyError, match="no sequence"):
            call(["hers"] if call is b.lengths else "hers")


def test_a_worker_that_thinks_a_sequence_its_own_is_told_otherwise(pool):
    a, b = pool.worker(), pool.worker()
    grown(a, 5, "hers")
    b.tables.put(b.tables.add("hers"), [0, 1], 5)
    before = pool.state
    for tokens in (1, 2):
        with pytest.raises(KeyError, match="no sequence 'hers'"):
            b.extend("hers", tokens)
    assert pool.state == before


def test_a_prompt_finds_the_blocks_that_another_worker_computed(pool):
    a, b = pool.worker(), pool.worker()
    a.add("a", tokens=range(10))
    a.extend("a", None)
    b.add("b", tokens=range(10))
    assert b.match("b") == 0, "what is not committed is not found"
    a.commit("a")
    assert b.match("b") == 8
    assert b.extend("b", None).start.tolist() == [8]
    assert b.block_tables(["b"])[0, :2].tolist() == a.block_tables(["a"])[0, :2].tolist()
    a.free("a")
    b.free("b")
    assert pool.state.cached != [] and a.num_free == 16


def test_a_block_that_is_written_into_is_found_no_more(pool):
    manager = pool.worker()
    manager.add("s", tokens=range(9))
    manager.extend("s", None)
    manager.commit("s")
    manager.fork("s", ["t"])
    manager.truncate("s", 6)  # the block is cut in two, but shared: it stays as it is
    manager.free("t")
    block = int(manager.block_tables(["s"])[0, 1])
    assert block in pool.state.sealed
    manager.extend("s")  # in place
    assert block not in pool.state.sealed
    manager.add("u", tokens=range(9))
    assert manager.match("u") == 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_blocks": 8}, "num_blocks of pool .* is 16, not 8"),
        ({"block_size": 2}, "block_size of pool .* is 4, not 2"),
        ({"max_length": 9}, "max_length of pool .* is None, not 9"),
        ({"prefix_cache": False}, "prefix_cache of pool .* is True, not False"),
        ({"namespace": b"m"}, "namespace of pool .* is b'', not b'm'"),
        ({"num_blocks": 0}, "num_blocks .* 0"),
        ({"num_blocks": 2.5}, "num_blocks .* 2.5"),
        ({"lease_seconds": 0}, "lease_seconds .* 0"),
        ({"lease_seconds": float("nan")}, "lease_seconds .* nan"),
        ({"timeout": "soon"}, "timeout .* 'soon'"),
        ({"namespace": 7}, "namespace .* 7"),
    ],
)
def test_other_settings_are_refused_by_name(pool, options, says):
    pool.worker()
    before = pool.state
    with pytest.raises(ValueError, match=says):
        pool.worker(**options)
    assert pool.state == before


def test_the_first_worker_must_say_how_large_the_pool_is(pool):
    with pytest.raises(ValueError, match=r"no pool .* yet: its first worker says num_blocks and block_size"):
        RedisBlockManager(pool.url, pool.name)
    assert pool.client.keys(f"*{pool.name}*") == []


# Leases and tokens


def test_tokens_grow_and_a_name_that_comes_again_takes_over(pool):
    old = pool.worker("w")
    grown(old, 9, "s")
    new = pool.worker("w")
    assert (old.token, new.token) == (1, 2)
    assert new.num_free == 16, "what the earlier worker of this name held is taken back"
    with pytest.raises(LeaseLost, match=r"worker 'w' .*token 1"):
        old.extend("s")
    new.add("s")


CHANGES = {
    "add": lambda m: m.add(),
    "extend": lambda m: m.extend("s"),
    "extend by nothing": lambda m: m.extend("s", 0),
    "commit": lambda m: m.commit("s", [1, 2, 3, 4, 5]),
    "fork": lambda m: m.fork("s"),
    "reorder": lambda m: m.reorder(["s"], [0]),
    "truncate": lambda m: m.truncate("s", 1),
    "release_before": lambda m: m.release_before("s", 4),
    "free": lambda m: m.free("s"),
    "restore": lambda m: m.restore(m.snapshot([])),
    "reset": lambda m: m.reset_prefix_cache(),
    "hand over": lambda m: m.hand_over("s", "other"),
    "adopt": lambda m: m.adopt(),
    "heartbeat": lambda m: m.heartbeat(),
    "match": lambda m: m.match("s"),
    "blocks_needed": lambda m: m.blocks_needed("s"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_worker_whose_lease_is_over_changes_nothing(pool, name):
    kinds = []
    manager = pool.worker("late", observers=[lambda event: kinds.append(event.kind)])
    pool.worker("other")
    grown(manager, 9, "s")
    pool.expire(manager)
    before = pool.state
    kinds.clear()
    with pytest.raises(LeaseLost, match=r"is over, .* s ago"):
        CHANGES[name](manager)
    assert pool.state == before and kinds == ["fence"]
    with pytest.raises(LeaseLost):  # from now on without asking
        manager.versions(["s"])
    with pytest.raises(LeaseLost):
        manager.check_lease()


@pytest.mark.parametrize("name", CHANGES)
def test_a_worker_that_was_reaped_changes_nothing(pool, name):
    manager, other = pool.worker("late"), pool.worker("other")
    grown(manager, 9, "s")
    pool.expire(manager)
    assert other.reap().seq_ids == ("s",)
    grown(other, 60, "s")  # the same blocks and the same name, in other hands
    before = pool.state
    with pytest.raises(LeaseLost, match="taken back"):
        CHANGES[name](manager)
    assert pool.state == before


def test_every_change_renews_the_lease_and_so_does_a_heartbeat(pool):
    manager = pool.worker(lease_seconds=1000)

    def ends():
        return pool.state.workers[manager.worker.encode()][1]

    seen = [ends()]
    for call in (manager.add, lambda: manager.extend(0), manager.heartbeat, lambda: manager.fork(0)):
        time.sleep(0.002)
        manager._lease_until = 0.0
        call()
        seen.append(ends())
        assert 0 < manager.lease_left <= 1000
    assert seen == sorted(set(seen))


def test_a_worker_knows_by_itself_when_its_lease_may_be_over(pool):
    manager = pool.worker(lease_seconds=0.05)
    grown(manager, 5, "s")
    time.sleep(0.06)
    for call in (manager.versions, manager.block_tables, manager.to_csr):
        with pytest.raises(LeaseLost, match=r"lease_seconds = 0\.05"):
            call(["s"])
    assert manager.snapshot().lengths.tolist() == [5], "what it last knew can still be read"


def test_attention_over_pages_of_a_lost_lease_is_refused(pool):
    cache = PagedKVCache(16, 4, 1, 2, manager=pool.worker())
    seq = cache.add()
    cache.append(seq, *np.ones((2, 1, 3, 1, 2), np.float32), 3)
    plan = cache.plan(seq)
    cache.manager._lease_until = 0.0
    with pytest.raises(LeaseLost):
        cache.attend(0, np.ones((1, 1, 2), np.float32), plan)


# The reaper


def test_the_reaper_takes_back_once_and_keeps_what_others_share(pool):
    dead, alive = pool.worker("dead"), pool.worker("alive")
    dead.add("d", tokens=range(10))
    dead.extend("d", None)
    dead.commit("d")
    alive.add("a", tokens=range(10))
    alive.extend("a", None)
    shared = alive.block_tables(["a"])[0, :2].tolist()
    assert alive.reap().workers == (), "a lease that is not over"
    pool.expire(dead)
    assert alive.reap(grace=1e10).workers == ()
    first, second = alive.reap(), alive.reap()
    assert (first.workers, first.seq_ids) == (("dead",), ("d",))
    assert len(first.freed) == 1 and not set(first.freed) & set(shared)
    assert (second.workers, second.seq_ids, second.freed.tolist()) == ((), (), [])
    assert pool.state.owners == dict.fromkeys([*shared, alive.block_tables(["a"])[0, 2]], 1)
    alive.free("a")
    assert alive.num_free == 16


def test_a_reaper_that_is_dead_itself_still_reaps(pool):
    dead = pool.worker("dead")
    grown(dead, 9)
    pool.expire(dead)
    assert dead.reap().workers == ("dead",)


def test_leaving_frees_what_is_left(pool):
    manager, other = pool.worker(), pool.worker()
    grown(manager, 9)
    assert len(manager.leave()) == 3 and other.num_free == 16
    assert [w.name for w in other.owners()] == [other.worker]
    assert manager.seq_ids == []
    assert manager.leave().tolist() == []


# Hand-over


@pytest.mark.parametrize("trace", [False, True])
def test_a_sequence_that_is_handed_over_goes_on_where_it_was(pool, trace):
    a, b = pool.worker("a"), pool.worker("b")
    said = {"block_hashes": [b"x", b"y", b"z"], "num_tokens": 12} if trace else {"tokens": range(12)}
    a.add("s", **said)
    a.extend("s", 9)
    a.commit("s")
    before, owners = a.snapshot(["s"]), pool.state.owners
    a.hand_over("s", "b")
    assert a.seq_ids == [] and pool.state.owners == owners
    with pytest.raises(KeyError):
        a.extend("s")
    assert b.adopt("s") == ["s"]
    after = b.snapshot(["s"])
    for name in ("indices", "lengths", "committed", "prompts", "tokens", "digests"):
        assert np.array_equal(getattr(before, name), getattr(after, name)), name
    b.extend("s", None)
    b.commit("s")
    assert b.length("s") == 12 and pool.state.parcels == {}


def test_what_is_handed_over_belongs_to_the_new_owner_at_once(pool):
    a, b, c = pool.worker("a"), pool.worker("b"), pool.worker("c")
    grown(a, 5, "first")
    a.hand_over("first", "b")
    pool.expire(a)
    assert c.reap().seq_ids == (), "the giver's death does not take it back"
    assert b.adopt() == ["first"]
    b.hand_over("first", "c")
    assert c.adopt(["first"]) == ["first"]
    c.fork("first", ["second"])
    c.hand_over(["second"], "b")
    pool.expire(b)
    assert c.reap().seq_ids == ("second",), "the taker's death does, adopted or not"
    c.free("first")
    assert c.num_free == 16


def test_hand_over_and_adopt_refuse_by_name_and_change_nothing(pool):
    a, b = pool.worker("a"), pool.worker("b")
    grown(a, 5, "s")
    before = pool.state
    with pytest.raises(ValueError, match="no lease"):
        a.hand_over("s", "nobody")
    pool.expire(b)
    with pytest.raises(ValueError, match="no lease"):
        a.hand_over("s", "b")
    with pytest.raises(KeyError, match="'t'"):
        a.hand_over(["s", "t"], "a")
    for wrong in ("s", "t"):
        with pytest.raises(KeyError, match=f"'{wrong}'"):
            a.adopt(wrong)
    assert a.adopt() == [] == a.adopt([])
    after = pool.state
    assert (after.seqs, after.owners, after.parcels) == (before.seqs, before.owners, before.parcels)


# Copies


def test_the_source_of_a_copy_is_kept_until_the_copy_is_done(pool):
    a, b = pool.worker("a"), pool.worker("b")
    grown(a, 5, "parent")
    a.fork("parent", ["child"])
    a.hand_over("child", "b")
    b.adopt()
    source = int(a.block_tables(["parent"])[0, 1])
    reservation = b.extend("child")  # the copy is delayed …
    assert reservation.copies[:, 0].tolist() == [source]
    assert source not in a.free("parent"), "… while the parent goes"
    grown(a, 8 * 4, "greedy")
    assert source not in a.block_tables(["greedy"])[0], "… and others take blocks"
    assert pool.state.copying == {b.token: [source]}
    assert b.confirm(reservation).tolist() == [source]
    assert pool.state.copying == {} and source in pool.state.plain
    assert b.confirm(reservation).tolist() == []


def test_the_last_owner_of_a_source_that_is_being_copied_does_not_write_into_it(pool):
    a, b = pool.worker("a"), pool.worker("b")
    grown(a, 5, "parent")
    a.fork("parent", ["child"])
    a.hand_over("child", "b")
    b.adopt()
    b.extend("child")
    assert len(a.extend("parent").copies) == 1
    b.confirm()
    assert len(a.confirm()) == 1, "then nobody owns it any more"


@pytest.mark.parametrize("goes_on", [lambda m: m.add(), lambda m: m.extend("s")])
def test_a_worker_that_goes_on_has_copied(pool, goes_on):
    manager = pool.worker()
    grown(manager, 5, "s")
    manager.fork("s")
    manager.extend("s")
    assert pool.state.copying != {}
    manager.heartbeat()
    assert pool.state.copying != {}, "a heartbeat may come from another thread"
    goes_on(manager)
    assert pool.state.copying == {}


def test_the_source_of_a_dead_workers_copy_is_taken_back(pool):
    a, b = pool.worker("a"), pool.worker("b")
    grown(a, 5, "parent")
    a.fork("parent", ["child"])
    a.hand_over("child", "b")
    b.adopt()
    b.extend("child")
    pool.expire(b)
    a.reap()
    assert pool.state.copying == {} and len(a.extend("parent").copies) == 0
    a.free("parent")
    assert a.num_free == 16


# Looking


def test_owners_shows_who_holds_what(pool):
    a, b = pool.worker("a"), pool.worker("b")
    grown(a, 5, "s")
    grown(a, 1, 7)
    first, second = b.owners()
    assert (first.name, first.token, first.sequences, first.lengths) == (
        "a",
        1,
        {"s": (0, 1), 7: (2,)},
        {"s": 5, 7: 1},
    )
    assert (second.name, second.sequences, second.pending) == ("b", {}, ())
    assert 0 < first.lease_left <= LEASE


def test_the_metrics_count_what_a_coordinator_does(pool):
    need_module("prometheus_client", "metrics")
    dead, alive = pool.worker("dead"), pool.worker("alive")
    late, kept = Metrics(dead), Metrics(alive)
    grown(dead, 9)
    pool.expire(dead)
    with pytest.raises(LeaseLost):
        dead.add()
    alive.reap()
    alive._told_again()
    assert late.read()["pagedkv_coordinator_fenced_writes_total"] == 1
    assert kept.read()["pagedkv_coordinator_reclaimed_blocks_total"] == 3
    assert kept.read()["pagedkv_coordinator_conflicts_total"] == 1


def test_two_processes_with_one_lease_are_told(pool):
    manager = pool.worker()
    manager.add()
    manager.add()
    manager._requests = 0  # as a process that was forked off before
    with pytest.raises(CoordinatorError, match="another process"):
        manager.add()


def test_all_keys_share_a_hash_tag_and_carry_the_version(pool):
    manager = pool.worker()
    manager.add("s", tokens=range(9))
    manager.extend("s")
    manager.extend("s", None)
    keys = set(pool.client.keys(f"*{pool.name}*"))
    assert keys and keys <= set(keys_of(pool.name))
    assert all(key.startswith(b"{pagedkv:%s}:v1:" % pool.name.encode()) for key in keys)
