"""Pages in shared memory: the same bytes for all processes, and no segment lost or left behind. Real processes."""

import os
import secrets
import signal
import subprocess
import sys

import numpy as np
import pytest
from needs import ROOT
from pools import LAYERS, all_layers

from pagedkv import KVStorage, PagedKVCache
from pagedkv.coordinator import shared_memory
from pagedkv.coordinator.shared_memory import SharedStorage, remove_leftovers, segment_name, segments

SHAPE = (LAYERS, 8, 4, 2, 2)

pytestmark = pytest.mark.skipif(
    not shared_memory.FOLDER.is_dir(), reason="segments can be listed on Linux only"
)


@pytest.fixture
def pool():
    name = f"test-{secrets.token_hex(8)}"
    yield name
    (shared_memory.FOLDER / segment_name(name)).unlink(missing_ok=True)


def exists(pool):
    return (shared_memory.FOLDER / segment_name(pool)).exists()


class Process:
    """Another Python that obeys lines: it opens the pool as `s` and answers with what it prints."""

    BEGIN = (
        "import sys, numpy as np\n"
        "from pagedkv.coordinator.shared_memory import SharedStorage\n"
        "s = SharedStorage(*eval(sys.argv[1]))\n"
        "print('open', s.created, flush=True)\n"
        "for line in sys.stdin: exec(line); sys.stdout.flush()\n"
    )

    def __init__(self, pool, *, begin=BEGIN, python=sys.executable):
        self.process = subprocess.Popen(
            [python, "-c", begin, repr((pool, *SHAPE))],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.opened = self.process.stdout.readline().strip()

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self):
        """End as a program ends; returns what it complained about."""
        complaints = self.process.communicate(timeout=60)[1]
        assert self.process.returncode == 0, complaints
        return complaints

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


def test_all_processes_see_the_same_pages(pool):
    with SharedStorage(pool, *SHAPE) as storage:
        other = Process(pool)
        assert (storage.created, other.opened) == (True, "open False")
        storage.arrays["keys"][1, 2, 3] = 5
        assert other.ask("print(s.arrays['keys'][1, 2, 3].tolist())") == "[[5.0, 5.0], [5.0, 5.0]]"
        other.ask("s.arrays['values'][0, 7] = 9; print()")
        assert (storage.arrays["values"][0, 7] == 9).all()
        assert not storage.arrays["keys"][0].any()
        assert other.end() == ""


def test_it_is_a_storage_like_any_other(pool):
    with SharedStorage(pool, *SHAPE) as storage:
        shared = PagedKVCache(8, 4, 2, 2, num_layers=LAYERS, storage=storage)
        plain = PagedKVCache(8, 4, 2, 2, num_layers=LAYERS)
        for cache in (shared, plain):
            cache.add("a")
            cache.append("a", *all_layers(range(6)), 6)
            cache.fork("a", ["b"])
            cache.append("b", *all_layers([9]))
        for name, array in plain.storage.arrays.items():
            assert np.array_equal(storage.arrays[name], array)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_every_dtype_has_its_arrays(pool, dtype):
    with SharedStorage(pool, *SHAPE, dtype) as one, SharedStorage(pool, *SHAPE, dtype) as two:
        plain = KVStorage(*SHAPE, dtype)
        numbers = np.random.default_rng(0).normal(size=(5, 2, 2))
        for storage in (one, plain):
            storage.write(1, [3, 4, 30, 31, 7], numbers, -numbers)
        for name, array in plain.arrays.items():
            assert two.arrays[name].dtype == array.dtype and np.array_equal(two.arrays[name], array)


# What is remembered of each page


def test_digests_stand_beside_the_pages_for_all(pool):
    one, two = b"1" * 32, b"2" * 32
    with SharedStorage(pool, *SHAPE) as a, SharedStorage(pool, *SHAPE) as b:
        a.remember([3, 5], [one, two])
        assert b.holds([3, 5, 5, 0], [one, two, one, one]).tolist() == [True, True, False, False]
        b.forget([3])
        assert a.holds([3, 5], [one, two]).tolist() == [False, True]
        assert a.holds([], []).tolist() == []
        with pytest.raises(ValueError, match="block"):
            a.holds([8], [one])


# Who removes it, and when


@pytest.mark.parametrize("first", ["maker", "reader"])
def test_the_exit_of_one_process_takes_nothing_from_the_others(pool, first):
    maker = Process(pool)
    reader = Process(pool)
    maker.ask("s.arrays['keys'][:] = 3; print()")
    goes, stays = (maker, reader) if first == "maker" else (reader, maker)
    assert goes.end() == ""  # nor does a resource tracker complain
    assert exists(pool)
    third = Process(pool)
    assert third.opened == "open False"
    assert third.ask("print(s.arrays['keys'].min())") == stays.ask("print(s.arrays['keys'].min())") == "3.0"
    assert third.end() == stays.end() == ""
    assert not exists(pool)


def test_children_of_multiprocessing_take_nothing_either(pool):
    script = (
        "import multiprocessing, sys\n"
        "from pagedkv.coordinator.shared_memory import SharedStorage\n"
        "def child(args):\n"
        "    s = SharedStorage(*args)\n"
        "    s.arrays['keys'][:] += 1\n"
        "if __name__ == '__main__':\n"
        "    args = eval(sys.argv[1])\n"
        "    s = SharedStorage(*args)\n"
        "    for method in ('fork', 'spawn'):\n"
        "        p = multiprocessing.get_context(method).Process(target=child, args=(args,))\n"
        "        p.start(), p.join()\n"
        "        again = SharedStorage(*args)\n"
        "        again.close()\n"
        "    print(s.arrays['keys'].min(), flush=True)\n"
        "    sys.stdin.read()\n"
    )
    path = ROOT / "tests" / "coordinator"  # spawn needs a file to import from
    file = path / f"_{pool}.py"
    try:
        file.write_text(script)
        begin = f"import runpy; runpy.run_path({str(file)!r}, run_name='__main__')"
        process = Process(pool, begin=begin)
        assert process.opened == "2.0"
        assert exists(pool)
        assert process.end() == ""
        assert not exists(pool)
    finally:
        file.unlink()


def test_a_forked_child_that_leaves_does_not_take_the_segment_with_it(pool):
    process = Process(pool)
    child = "(s.close(), os._exit(0)) if p == 0 else print(os.waitpid(p, 0)[1])"
    assert process.ask(f"import os; p = os.fork(); {child}") == "0"
    assert exists(pool)
    assert process.end() == ""
    assert not exists(pool)


def test_unlink_takes_the_name_and_leaves_the_memory_to_those_who_have_it(pool):
    one, two = SharedStorage(pool, *SHAPE), SharedStorage(pool, *SHAPE)
    two.arrays["keys"][:] = 1
    one.close(unlink=True)
    one.close()
    assert not exists(pool)
    with SharedStorage(pool, *SHAPE) as new:
        assert new.created and not new.arrays["keys"].any()
        assert two.arrays["keys"].min() == 1
        two.close()  # the last of the old one: the new one's name is not its own to remove
        assert exists(pool)


def test_an_array_that_somebody_keeps_stays_readable(pool):
    storage = SharedStorage(pool, *SHAPE)
    kept = storage.arrays["keys"]
    kept[:] = 2
    storage.close()
    assert kept.sum() == 2 * kept.size
    assert not exists(pool)


def test_what_kill_9_left_is_found_and_removed_and_nothing_else(pool):
    killed, living = Process(pool), Process(pool + "2")
    assert {f.pool: f.in_use for f in segments()}.items() >= {pool: True, pool + "2": True}.items()
    killed.kill()
    assert {f.pool: f.in_use for f in segments()}.items() >= {pool: False, pool + "2": True}.items()
    assert pool in {found.pool for found in remove_leftovers()}
    assert (exists(pool), exists(pool + "2")) == (False, True)
    living.end()


def test_a_worker_that_comes_back_finds_what_kill_9_left(pool):
    killed = Process(pool)
    killed.ask(f"s.arrays['keys'][:] = 4; s.remember([1], [{b'd' * 32}]); print()")
    killed.kill()
    with SharedStorage(pool, *SHAPE) as storage:
        assert not storage.created
        assert storage.arrays["keys"].min() == 4
        assert storage.holds([1], [b"d" * 32]).all()


@pytest.mark.parametrize("left", ["empty", "unfinished", "of another shape"])
def test_a_leftover_that_cannot_be_used_is_replaced(pool, left):
    path = shared_memory.FOLDER / segment_name(pool)
    if left == "of another shape":
        killed = Process(pool)
        killed.kill()
        with SharedStorage(pool, LAYERS, 9, 4, 2, 2) as storage:
            assert storage.created and storage.num_blocks == 9
    else:
        path.write_bytes(bytes(0 if left == "empty" else 100_000))
        with SharedStorage(pool, *SHAPE) as storage:
            assert storage.created
            assert not storage.arrays["keys"].any()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((LAYERS, 9, 4, 2, 2), "float32"), ((LAYERS, 8, 2, 4, 2), "float32"), (SHAPE, "float16")],
)
def test_another_shape_or_type_is_refused_while_somebody_uses_it(pool, shape, dtype):
    with SharedStorage(pool, *SHAPE) as storage:
        storage.arrays["keys"][:] = 1
        with pytest.raises(ValueError, match="in use with"):
            SharedStorage(pool, *shape, dtype)
        assert exists(pool) and storage.arrays["keys"].min() == 1


def test_a_maker_who_stops_is_not_waited_for_for_ever(pool, monkeypatch):
    monkeypatch.setattr(shared_memory, "PATIENCE", 0.1)
    path = shared_memory.FOLDER / segment_name(pool)
    path.write_bytes(bytes(100_000))
    with path.open("rb") as maker:
        assert shared_memory._lock(maker.fileno(), alone=True)
        with pytest.raises(TimeoutError, match="not ready"):
            SharedStorage(pool, *SHAPE)


def test_memory_that_is_not_there_is_refused_before_anybody_writes_to_it(pool):
    free = os.statvfs(shared_memory.FOLDER)
    blocks = 2 * free.f_frsize * free.f_blocks // (16 << 20)
    with pytest.raises(OSError, match="no room for"):
        SharedStorage(pool, 1, blocks, 1024, 32, 64)  # 16 MiB a block
    assert not exists(pool)


def test_many_who_open_it_at_once_and_leave_share_one(pool):
    begin = (
        "import sys\n"
        "from pagedkv.coordinator.shared_memory import SharedStorage\n"
        "args = eval(sys.argv[1])\n"
        "for i in range(60):\n"
        "    with SharedStorage(*args) as s:\n"
        "        assert not s.arrays['keys'].any() and s.name\n"
        "print('done', flush=True)\n"
        "sys.stdin.read()\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", begin, repr((pool, *SHAPE))],
            cwd=ROOT,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(3)
    ]
    for process in processes:
        out, complaints = process.communicate(timeout=120)
        assert (out, complaints) == ("done\n", "")
    assert not exists(pool)
