"""Requests that many workers share: each is answered once, whoever dies, and as one process would."""

import threading

import pytest
from needs import need_module
from redis_servers import free_port, new_pool, servers  # noqa: F401

from pagedkv.coordinator.errors import Unreachable
from pagedkv.coordinator.requests import MOST_TRIES, PARTS, RequestQueue, TextRequest

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
    with pytest.raises(Unreachable, match=r"no answer within 0\.1 s"):
        RequestQueue(f"redis://127.0.0.1:{free_port()}", "p", timeout=0.1).take()
