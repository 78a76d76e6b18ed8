"""The usual step of decoding has a short script: it does what the whole one would, or leaves it to that."""

import pytest
from redis_servers import servers  # noqa: F401  a fixture
from twin import Twin

from pagedkv import PoolExhausted
from pagedkv.coordinator import RedisBlockManager


@pytest.fixture(params=["fake", "real"])
def pool(request, servers):  # noqa: F811
    pools = []

    def new(num_blocks=12, **options):
        pools.append(Twin(servers(request.param), num_blocks, 4, prefix_cache=True, **options))
        return pools[-1]

    yield new
    for pool in pools:
        pool.close()


@pytest.fixture
def short(monkeypatch):
    """The ids of each step that the short script has done."""
    done, mirror = [], RedisBlockManager._stepped

    def stepped(manager, started, ids, *rest, **options):
        done.append(ids)
        return mirror(manager, started, ids, *rest, **options)

    monkeypatch.setattr(RedisBlockManager, "_stepped", stepped)
    return done


def prompt(twin, seq_id, length, first=0):
    twin.add(seq_id, tokens=range(first, first + length))
    twin.extend([seq_id], None)
    twin.commit(seq_id)


def test_steps_of_decoding_are_short(pool, short):
    twin = pool(32)
    for n, seq_id in enumerate(["a", 7, "c"]):
        prompt(twin, seq_id, 3 + n, 100 * n)
    assert not short
    for step in range(9):  # each of them passes the end of its last block twice
        twin.extend(["c", "a", 7])
        twin.commit(["c", "a", 7], [step, step, step])
    twin.extend("a")
    twin.extend(["a", "c"], [1, 1])
    assert short == [("c", "a", 7)] * 9 + [("a",), ("a", "c")]


def shared_tail(twin):
    prompt(twin, "a", 6)
    twin.fork("a", ["b"])
    return ["a", "b"]


def both_of_a_shared_tail_apart(twin):
    shared_tail(twin)
    return ["b"]


def open_tail_of_a_cut_block(twin):
    """The last owner writes into a block that can be found."""
    prompt(twin, "a", 8)
    twin.fork("a", ["b"])
    twin.truncate("a", 6)
    twin.free("b")
    return ["a"]


def a_sequence_that_begins(twin):
    prompt(twin, "a", 6)
    twin.add("b", tokens=range(6))
    return ["a", "b"]


def a_block_that_is_cached(twin):
    """Only blocks with a text are free: one has to be evicted."""
    prompt(twin, "old", 44)
    prompt(twin, "a", 4, 500)
    twin.free("old")
    return ["a"]


def one_plain_block_for_two(twin):
    for n, seq_id in enumerate(["a", "b"]):
        prompt(twin, seq_id, 4, 100 * n)
    prompt(twin, "old", 36, 500)
    twin.free("old")
    return ["a", "b"]


def nothing(twin):
    return []


@pytest.mark.parametrize(
    "prepare",
    [
        shared_tail,
        both_of_a_shared_tail_apart,
        open_tail_of_a_cut_block,
        a_sequence_that_begins,
        a_block_that_is_cached,
        one_plain_block_for_two,
        nothing,
    ],
)
def test_whatever_is_more_than_a_step_takes_the_whole_script(pool, short, prepare):
    twin = pool()
    ids = prepare(twin)
    short.clear()
    twin.extend(ids)
    assert not short


def test_a_step_that_finds_no_room_is_refused(pool):
    twin = pool(2, max_length=6)
    prompt(twin, "a", 4)
    prompt(twin, "b", 4, 100)
    with pytest.raises(PoolExhausted):
        twin.extend(["a", "b"])
    twin.free("b")
    for _ in range(2):
        twin.extend("a")
    with pytest.raises(ValueError, match="max_length is 6"):
        twin.extend("a")


def test_blocks_that_were_left_behind_are_no_matter(pool, short):
    twin = pool()
    prompt(twin, "a", 7)
    twin.release_before("a", 4)
    twin.extend("a")
    prompt(twin, "b", 4, 100)
    twin.release_before("b", 4)
    short.clear()
    twin.extend(["a", "b"])
    assert short == [("a", "b")]
