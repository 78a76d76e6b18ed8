"""Processes that die and disks that fill up: what is on disk is the old snapshot or the new one, whole."""

import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest
from needs import ROOT, STRESS, need_module
from saved import CONTAINERS, used_before, wall

from pagedkv.lm import Llama
from pagedkv.store import SaveFailed, load, recover, save

KILLS = 100 if STRESS else 10  # per container
pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and limits as POSIX has them")


@pytest.fixture(params=CONTAINERS)
def path(request, tmp_path):
    if request.param.endswith(".h5"):
        need_module("h5py", "hdf5")
    return tmp_path / request.param


def run(code, *args, **options):
    """Start a Python that can import the package and these tests' helpers."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, **options)


# Death while saving

GENERATIONS = """
import sys
import numpy as np
from pagedkv import PagedKVCache
from pagedkv.store import save
path, cache = sys.argv[1], PagedKVCache(128, 16, 2, 32, num_layers=2)
for generation in range(int(sys.argv[2]), 1000):
    cache.add(generation)
    cache.extend(generation, 1024)
    for array in cache.storage.arrays.values():
        array[:, cache.block_tables([generation])[0]] = generation
    print(generation, "begun", flush=True)
    save(cache, path, generation)
    print(generation, "done", flush=True)
    cache.free(generation)
"""


def generation_on_disk(path):
    """The one that a snapshot holds, after looking at every number in it."""
    report = load(path)
    assert report.num_damages == 0
    (generation,) = report.seq_ids
    assert report.cache.length(generation) == 1024
    for array in report.cache.storage.arrays.values():
        assert (array[:, report.cache.block_tables([generation])[0]] == generation).all()
    return generation


def test_killed_while_saving_leaves_the_old_or_the_new_snapshot(path):
    """SIGKILL at random moments: the last generation that was there or done, or the one begun."""
    rng, begun, there, interrupted = random.Random(1), -1, -1, 0
    for _ in range(KILLS):
        process = run(GENERATIONS, path, begun + 1)
        assert process.stdout.readline() == f"{begun + 1} begun\n"
        time.sleep(rng.uniform(0, 0.08))
        process.kill()
        *whole, _ = process.communicate()[0].split("\n")  # death may have cut the last line
        said = [line.split() for line in whole]
        begun = max([begun + 1, *(int(generation) for generation, what in said if what == "begun")])
        done = max([there, *(int(generation) for generation, what in said if what == "done")])
        if (path / "tables" if path.suffix == "" else path).exists():
            there = generation_on_disk(path)
        assert there in (done, begun)
        interrupted += done < begun
    assert interrupted > 0
    process = run(GENERATIONS, path, begun + 1)
    while process.stdout.readline() != f"{begun + 1} done\n":
        assert process.poll() is None
    process.kill(), process.communicate()
    assert generation_on_disk(path) > begun
    cache = wall()
    save(cache, path)  # and whatever the dead left behind is gone
    left = [file for file in (path if path.is_dir() else path.parent).iterdir() if file.suffix == ".tmp"]
    assert left == []


def test_bytes_reach_the_disk_before_their_name_and_the_name_before_save_returns(path, monkeypatch):
    """SIGKILL cannot show this, for the kernel lives on; a power failure would."""
    calls, sync, move = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append("sync"), sync(file))[1])
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append("rename"), move(*names))[1])
    save(wall(), path)
    if path.is_file():
        assert calls == ["sync", "rename", "sync"]
    else:  # six pages and the folder, then the tables and the folder
        assert calls == ["sync", "rename"] * 6 + ["sync"] + ["sync", "rename", "sync"]


# A full disk

SAVE_IN_LITTLE_ROOM = """
import resource, sys
from saved import wall
from pagedkv.store import SaveFailed, load, save
cache, path = wall(), sys.argv[1]
for room in (4000, 2500, 1000, 100, 0):
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    try:
        save(cache, path)
        print("saved")
    except SaveFailed as error:
        print(error)
    report = load(path)
    print(*report.seq_ids, report.num_damages)
"""


def test_a_full_disk_leaves_the_old_snapshot_and_says_so(path):
    save(wall(), path, ["a"])
    before = sorted(file.name for file in path.parent.iterdir())
    process = run(SAVE_IN_LITTLE_ROOM, path)
    said = process.communicate()[0].splitlines()
    assert process.returncode == 0 and len(said) == 10
    refused = [what for what in said[::2] if what != "saved"]
    assert len(refused) >= 3 if path.is_dir() else len(refused) == 5  # files of a folder are smaller
    assert all("File too large; what was there before is untouched" in what for what in refused)
    assert all(str(path) in what for what in refused)
    for what, there in zip(said[::2], said[1::2], strict=True):
        assert there == ("a b c d 0" if "saved" in said[: said.index(what) + 1] else "a 0")
    assert sorted(file.name for file in path.parent.iterdir()) == before


@pytest.mark.parametrize("name", ["missing/s.npz", "s.npz/s.npz", "s.npz/checkpoint"])
def test_a_folder_that_is_not_there_is_said(tmp_path, name):
    (tmp_path / "s.npz").write_bytes(b"old")
    with pytest.raises(SaveFailed, match=r"s\.npz"):
        save(wall(), tmp_path / name)
    assert (tmp_path / "s.npz").read_bytes() == b"old"


# Restart: the promise of persistence

WRITE_HALF = """
import sys, time
import numpy as np
from pagedkv.lm import Llama
from pagedkv.store import save
model = Llama.load()
cache, prompt = model.new_cache(40, 4), model.tokenizer.encode("Good night")
cache.add("a")
logits = model.next_logits(cache, ["a"], [prompt])
cache.fork("a", ["b", "c"])
texts = {seq: prompt.tolist() for seq in "abc"}
logits, choice = np.repeat(logits, 3, axis=0), np.arange(3)
for step in range(20):  # each the likeliest, but for the first token, where the three part
    tokens = np.argsort(-logits, axis=1)[np.arange(3), choice if step == 0 else 0]
    for seq, token in zip("abc", tokens.tolist()):
        texts[seq].append(token)
    logits = model.next_logits(cache, list("abc"), tokens[:, None])
save(cache, sys.argv[1], model=model, tokens=texts)
print("saved", flush=True)
time.sleep(600)
"""


def continued(model, cache, tokens, steps=20):
    """Each of three texts goes on with its likeliest tokens."""
    texts = {seq: list(tokens[seq]) for seq in "abc"}
    for seq in "abc":  # the last token was run already: run it again, to get what followed it
        cache.truncate(seq, cache.length(seq) - 1)
    for _ in range(steps):
        logits = model.next_logits(cache, list("abc"), [[texts[seq][-1]] for seq in "abc"])
        for seq, row in zip("abc", logits, strict=True):
            texts[seq].append(int(row.argmax()))
    return texts


def test_a_text_half_written_is_finished_by_another_process(path):
    """Killed after the save; loaded into a pool of another size and order: the same texts, still sharing."""
    process = run(WRITE_HALF, path)
    assert process.stdout.readline() == "saved\n"
    process.kill(), process.communicate()
    model = Llama.load()
    other = used_before(model.new_cache(61, 4))
    report = load(path, other, model=model)
    assert report.num_damages == 0
    shared = np.count_nonzero(other.manager.allocator.ref_counts == 3)
    assert shared == 2  # the whole blocks of `Good night`
    texts = continued(model, other, report.tokens)
    for seq in "abc":
        alone = model.new_cache(40, 4)
        alone.add("x")
        written = report.tokens[seq][:11]
        logits = model.next_logits(alone, ["x"], [written])
        while len(written) < 10 + 20 + 20:
            written.append(int(logits[0].argmax()))
            logits = model.next_logits(alone, ["x"], [written[-1:]])
        assert texts[seq] == written
    assert len({tuple(text) for text in texts.values()}) == 3


def test_the_same_with_a_damaged_page_recovered(path):
    process = run(WRITE_HALF, path)
    assert process.stdout.readline() == "saved\n"
    process.kill(), process.communicate()
    model = Llama.load()
    whole = load(path, model=model)
    damaged = path if path.is_file() else sorted(path.glob("*.page"))[0]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    report = recover(path, model=model)
    assert len(report.recomputed) == 1
    assert continued(model, report.cache, report.tokens) == continued(model, whole.cache, whole.tokens)
