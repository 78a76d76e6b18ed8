"""Requests that many workers share: each is answered once, whoever dies, and as one process would."""

import threading
import time

import numpy as np
import pytest
from needs import need_module
from redis_servers import KINDS, free_port, new_pool, servers  # noqa: F401

from pagedkv.coordinator.errors import Unreachable
from pagedkv.coordinator.pages import SharedCache
from pagedkv.coordinator.requests import MOST_TRIES, PARTS, RequestQueue, TextRequest
from pagedkv.coordinator.worker import TextWorker, shared_cache, text_alone
from pagedkv.lm import Llama

need_module("redis", "redis")


@pytest.fixture(params=["fake", "real"])
def url(request, servers):  # noqa: F811
    return servers(request.param)


class Queues:
    """Queues of one pool, for workers by name."""

    def __init__(self, url):
        self.url, self.pool, self.made = url, new_pool(), []

    def __call__(self, worker=""):
        queue = RequestQueue(self.url, self.pool, worker=worker, lease_seconds=60)
        self.made.append(queue)
        return queue


@pytest.fixture
def queues(url):
    queues = Queues(url)
    yield queues
    for queue in queues.made:
        queue.close()


def lease_of(queue):
    return queue._client.zscore(queue._keys[PARTS.index("leases")], queue.worker)


def let_expire(queue):
    """As if the worker had not been heard of for longer than its lease."""
    queue._client.zadd(queue._keys[PARTS.index("leases")], {queue.worker: 1})


def requests(n):
    return [TextRequest(f"r{i}", f"prompt {i} ü", tokens=i + 1, seed=i, top_p=0.5) for i in range(n)]


def ids(taken):
    return [request.id for request in taken.new]


def test_requests_are_taken_in_order_and_as_they_were_put(queues):
    a, b = queues("a"), queues("b")
    assert a.put(requests(4)) == 4 and a.put(requests(5)) == 1
    assert a.take(2).new == requests(5)[:2]
    assert ids(b.take(10)) == ["r2", "r3", "r4"]
    assert ids(a.take(10, ["r0", "r1"])) == []
    assert a.claims() == {"r0": "a", "r1": "a", "r2": "b", "r3": "b", "r4": "b"}
    assert a.waiting == 0


def test_one_answer_for_each_from_whoever_has_the_claim(queues):
    a, b = queues("a"), queues("b")
    a.put(requests(2))
    a.take(1)
    assert not b.finish("r0", {"text": "b"}) and not a.finish("r1", {"text": "a"})
    assert a.finish("r0", {"text": "a"}) and not a.finish("r0", {"text": "again"})
    assert b.results() == {"r0": {"text": "a"}}
    assert a.claims() == {} and b.waiting == 1


def test_a_dead_workers_requests_go_to_exactly_one_other(queues):
    dead, b, c = queues("dead"), queues("b"), queues("c")
    dead.put(requests(4))
    dead.take(3)
    b.take(1)
    let_expire(dead)
    assert ids(b.take(2, ["r3"])) == ["r0", "r1"]  # in their old order, before all others
    assert ids(c.take(9)) == ["r2"]
    assert not dead.finish("r0", {"text": "late"})
    assert b.finish("r0", {"text": "b"})
    assert c.take_back() == []


def test_a_worker_that_was_asleep_learns_what_it_has_lost(queues):
    a, b = queues("a"), queues("b")
    a.put(requests(3))
    a.take(2)
    let_expire(a)
    b.take(1)
    taken = a.take(0, ["r0", "r1"])
    assert taken.kept == set() and taken.new == []
    assert b.claims() == {"r0": "b"} and b.waiting == 2
    assert ids(a.take(1)) == ["r1"]


def test_a_lease_is_renewed_by_taking_nothing(queues):
    a, b = queues("a"), queues("b")
    a.put(requests(1))
    a.take(1)
    lease = lease_of(a)
    a.lease_seconds = 120
    assert a.take(0, ["r0"]).kept == {"r0"}
    assert lease + 50_000 < lease_of(a) < lease + 100_000
    assert ids(b.take(1)) == []


def test_an_answer_that_was_lost_comes_again(queues):
    a = queues("a")
    a.put(requests(3))
    a.take(2)  # suppose that the reply never came
    assert sorted(ids(a.take(2))) == ["r0", "r1"]
    assert sorted(ids(a.take(2, ["r0"]))) == ["r1", "r2"]


def test_given_back_requests_stand_in_front_in_their_order(queues):
    a, b = queues("a"), queues("b")
    a.put(requests(4))
    a.take(3)
    assert a.give_back(["r0", "r2", "r3"]) == 2 and a.give_back([]) == 0
    assert ids(b.take(9)) == ["r0", "r2", "r3"]
    a.leave()
    assert ids(b.take(9, ["r0", "r2", "r3"])) == ["r1"]


def test_a_request_that_kills_everybody_is_answered_with_an_error(queues):
    queue = queues("a")
    queue.put(requests(1))
    for i in range(MOST_TRIES):
        dead = queues(f"dead {i}")
        assert ids(dead.take(1)) == ["r0"]
        let_expire(dead)
    assert ids(queue.take(1)) == []
    assert "died" in queue.results()["r0"]["error"]


def test_many_at_once_get_each_request_once(queues):
    queues("").put(requests(60))
    taken, made = [], [queues(f"w{i}") for i in range(4)]

    def work(queue):
        while new := ids(queue.take(2)):
            for request_id in new:
                taken.append((request_id, queue.finish(request_id, {"by": queue.worker})))

    threads = [threading.Thread(target=work, args=(queue,)) for queue in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(taken) == sorted((f"r{i}", True) for i in range(60))
    assert len(queues("").results()) == 60
    queues("").forget()
    assert queues("").results() == {}


def test_nobody_there_is_said_in_time():
    with pytest.raises(Unreachable, match=r"did not answer within timeout = 0\.1 s"):
        RequestQueue(f"redis://127.0.0.1:{free_port()}", "p", timeout=0.1).take()


# Workers


@pytest.fixture(scope="module")
def model():
    return Llama.load()


class Crew:
    """Workers of one pool, in this process: they step when they are told to."""

    def __init__(self, url, model):
        self.url, self.model, self.pool, self.workers = url, model, new_pool(), {}
        self.queue = RequestQueue(url, self.pool)

    def hire(self, name, *, num_blocks=40, lease_seconds=600.0, **options):
        queue = RequestQueue(self.url, self.pool, worker=name, lease_seconds=lease_seconds)
        how = {"num_blocks": num_blocks, "block_size": 4, "worker": name, "lease_seconds": lease_seconds}
        options = {"reap_every": 0, "grace": 0} | options
        worker = TextWorker(
            self.model, lambda: shared_cache(self.model, self.url, self.pool, **how), queue, **options
        )
        self.workers[name] = worker
        return worker

    def work(self, *names, steps=None):
        """Let workers step in turn until all is answered, or so many times each."""
        workers = [self.workers[name] for name in names or self.workers]
        done = 0
        while not self.queue.done if steps is None else done < steps:
            done += 1
            assert done < 2000, "they do not come to an end"
            for worker in workers:
                worker.step()
                self.check(worker)

    def check(self, worker):
        """The ends of blocks that two texts own are never written by both."""
        cache = worker.cache
        for table, length in zip(
            cache.block_tables(cache.seq_ids), cache.lengths(cache.seq_ids), strict=True
        ):
            assert (table[: -(-length // 4)] >= 0).all()

    def assert_answered(self, requests):
        results = self.queue.results()
        assert sorted(results) == sorted(request.id for request in requests)
        for request in requests:
            assert results[request.id]["text"] == text_alone(self.model, request), request.id
        return results

    def assert_all_free(self):
        worker = next(iter(self.workers.values()))
        assert worker.cache.num_free == worker.cache.num_blocks
        assert (worker.cache.manager.allocator.ref_counts == 0).all()

    def close(self):
        for worker in self.workers.values():
            worker.cache.storage.close(unlink=True)
            worker.queue.close()
        self.queue.close()


@pytest.fixture(params=KINDS)
def crew(request, servers, model):  # noqa: F811
    crew = Crew(servers(request.param), model)
    yield crew
    crew.close()


def alike(n, tokens=10, prompt="ROMEO: what light, "):
    return [
        TextRequest(f"r{i:02}", f"{prompt}{'ABCDEFGHIJ'[i % 10]}", tokens + i % 3, seed=i) for i in range(n)
    ]


def test_workers_write_what_one_process_writes_and_find_each_others_prompts(crew):
    requests = alike(6)
    crew.queue.put(requests)
    for name in "ab":
        crew.hire(name, max_batch=2)
    crew.work()
    results = crew.assert_answered(requests)
    assert {result["worker"] for result in results.values()} == {"a", "b"}
    assert sum(result["hits"] > 0 for result in results.values()) >= 5
    assert all(result["restarts"] == 0 for result in results.values())
    crew.assert_all_free()


@pytest.mark.parametrize("num_blocks", [7, 10])
def test_a_pool_for_little_more_than_one_text_is_shared_without_a_deadlock(crew, num_blocks):
    requests = alike(5, prompt="")  # nothing to share
    requests = [TextRequest(r.id, r.prompt, 18, seed=r.seed) for r in requests]
    crew.queue.put(requests)
    for name in "abc":
        crew.hire(name, num_blocks=num_blocks, max_batch=2)
    crew.work()
    crew.assert_answered(requests)
    crew.assert_all_free()


def test_texts_give_way_and_go_on_as_if_nothing_had_been(crew, monkeypatch):
    monkeypatch.setattr(TextWorker, "_blocks", lambda *_: 1)  # everybody is let in
    requests = [TextRequest(f"r{i}", "A", 24, seed=i) for i in range(4)]
    crew.queue.put(requests)
    for name in "ab":
        crew.hire(name, num_blocks=8, max_batch=2)
    crew.work()
    results = crew.assert_answered(requests)
    assert sum(result["restarts"] for result in results.values()) > 0
    assert results["r0"]["restarts"] == 0  # the oldest never gave way
    crew.assert_all_free()


def test_what_a_dead_worker_held_is_written_by_another(crew):
    requests = alike(4)
    crew.queue.put(requests)
    dead = crew.hire("dead", lease_seconds=0.3, max_batch=2)
    while not any(len(text.tokens) > text.prompt + 3 for text in dead.writing):
        dead.step()
    dead.step = None  # it never does anything again
    crew.hire("b", max_batch=2)
    time.sleep(0.4)
    crew.work("b")
    assert {result["worker"] for result in crew.assert_answered(requests).values()} == {"b"}
    crew.workers["b"].step()
    del crew.workers["dead"]
    crew.assert_all_free()


def test_a_worker_that_wakes_after_its_lease_joins_anew_and_spoils_nothing(crew):
    requests = alike(4, tokens=20)
    crew.queue.put(requests)
    asleep = crew.hire("asleep", lease_seconds=0.3, max_batch=2)
    while not asleep.writing:
        asleep.step()
    old = asleep.cache.manager.token
    crew.hire("b", max_batch=2)
    time.sleep(0.4)
    crew.work("b", steps=3)  # takes what it held, requests and blocks
    crew.work("b", "asleep")
    crew.assert_answered(requests)
    assert asleep.cache.manager.token > old and asleep.rejoined >= 1


def test_requests_that_cannot_be_fulfilled_are_answered_with_the_reason(crew):
    bad = {
        "letters": TextRequest("letters", "12 %"),
        "empty": TextRequest("empty", ""),
        "context": TextRequest("context", "A" * 500, 100),
        "pool": TextRequest("pool", "A", 200),
        "heat": TextRequest("heat", "A", temperature=-1.0),
    }
    good = [*alike(2), TextRequest("none", "A", 0)]
    crew.queue.put([*bad.values(), *good])
    crew.hire("a")
    crew.work()
    results = crew.queue.results()
    for name in bad:
        assert results[name]["error"], name
    assert "needs up to 50 blocks, the pool has 40" in results["pool"]["error"]
    assert "context of 512" in results["context"]["error"]
    assert all(results[request.id]["text"] == text_alone(crew.model, request) for request in good)
    crew.assert_all_free()


def test_a_server_that_forgot_everything_is_joined_anew(crew):
    requests = alike(3)
    crew.queue.put(requests)
    worker = crew.hire("a")
    while not worker.writing:
        worker.step()
    crew.queue._client.flushall()
    for _ in range(3):
        worker.step()
    assert worker.rejoined == 1 and not worker.writing and not worker.waiting
    crew.queue.put(requests)
    crew.work()
    crew.assert_answered(requests)


def test_leaving_gives_everything_to_the_others(crew):
    requests = alike(3)
    crew.queue.put(requests)
    a, _ = crew.hire("a"), crew.hire("b")
    while not a.writing:
        a.step()
    a.close()
    del crew.workers["a"]
    assert crew.queue.claims() == {} and crew.queue.waiting == 3
    crew.work()
    crew.assert_answered(requests)
    crew.assert_all_free()


def test_a_page_that_a_worker_wrote_after_its_end_would_be_seen(crew):
    """The test of the tests above: a false page changes a text."""
    requests = alike(2)
    crew.queue.put(requests)
    worker = crew.hire("a", max_batch=1)
    while not crew.queue.results():
        worker.step()
    assert isinstance(worker.cache, SharedCache)
    for array in worker.cache.storage.arrays.values():
        array[:] = np.random.default_rng(0).normal(size=array.shape)  # without a word to `forget`
    crew.work()
    results = crew.queue.results()
    assert any(results[request.id]["text"] != text_alone(crew.model, request) for request in requests)
