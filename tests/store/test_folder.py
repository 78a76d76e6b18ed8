"""The page store, and checkpoints that write only what is new."""

import threading

import numpy as np
import pytest
from pools import all_layers, new_cache
from saved import assert_equal, wall

from pagedkv.store import Layout, PageStore, SnapshotError, load, save


def key(number):
    return number.to_bytes(32, "big")


@pytest.fixture
def cache():
    return wall()


@pytest.fixture
def store(tmp_path, cache):
    return PageStore(tmp_path / "pages", Layout.of(cache.storage, "m"))


def same(page, other):
    return page.keys() == other.keys() and all(
        np.array_equal(page[n], other[n], equal_nan=True) for n in page
    )


def test_missing_pages_are_none_in_their_place(store, cache):
    pages = [cache.storage.page(block) for block in (0, 1, 2)]
    assert store.put_many((key(i), page) for i, page in enumerate(pages)) == 3
    found = store.get_many([key(0), key(7), key(2)])
    assert found[1] is None
    assert same(found[0], pages[0]) and same(found[2], pages[2])
    assert same(store.get_many([key(1)])[0], pages[1])
    assert store.get_many([]) == []


def test_a_page_is_written_once(store, cache):
    page = cache.storage.page(0)
    assert store.put_many([(key(1), page), (key(1), page)]) == 1
    assert store.put_many([(key(1), page), (key(2), page)]) == 1
    assert sorted(store.keys()) == [key(1), key(2)]


def test_delete_says_whether_it_was_there(store, cache):
    store.put_many([(key(1), cache.storage.page(0))])
    assert key(1) in store
    assert store.delete(key(1)) and not store.delete(key(1))
    assert key(1) not in store and store.get_many([key(1)]) == [None]


@pytest.mark.parametrize("length", [0, 10, 47, 48, 100, -1])
def test_a_cut_page_is_a_miss_and_is_removed(store, cache, length):
    store.put_many([(key(1), cache.storage.page(0))])
    (file,) = store.folder.glob("*.page")
    file.write_bytes(file.read_bytes()[:length])
    assert store.get_many([key(1)]) == [None]
    assert not file.exists() and store.corrupt == 1
    assert store.put_many([(key(1), cache.storage.page(0))]) == 1
    assert store.get_many([key(1)]) != [None]


def test_a_page_under_anothers_name_is_never_handed_out(store, cache):
    store.put_many([(key(1), cache.storage.page(0)), (key(2), cache.storage.page(1))])
    one, two = (store.folder / f"{key(i).hex()}.page" for i in (1, 2))
    one.write_bytes(two.read_bytes())
    assert store.get_many([key(1)]) == [None]
    assert same(store.get_many([key(2)])[0], cache.storage.page(1))


def test_pages_of_another_model_are_a_miss_and_stay(store, cache):
    store.put_many([(key(1), cache.storage.page(0))])
    other = PageStore(store.folder, Layout.of(cache.storage, "other"))
    assert other.get_many([key(1)]) == [None]
    assert other.corrupt == 0 and same(store.get_many([key(1)])[0], cache.storage.page(0))


def test_what_a_crash_left_behind_is_ignored_and_cleaned(store, cache):
    store.put_many([(key(1), cache.storage.page(0))])
    left = store.folder / f".{key(1).hex()}.page.0123.tmp"
    left.write_bytes(b"half a pa")
    again = PageStore(store.folder, store.layout)
    assert not left.exists() and again.keys() == [key(1)]


def test_what_somebody_is_writing_is_not_cleaned(store):
    pytest.importorskip("fcntl", reason="without flock nothing is cleaned")
    from pagedkv.store.files import replacing

    with replacing(store.folder / "x.page") as file, replacing(store.folder / "x.page") as other:
        PageStore(store.folder, store.layout)
        file.write(b"one"), other.write(b"two")  # two writers, two temporary names
    assert (store.folder / "x.page").read_bytes() == b"one"


@pytest.mark.parametrize("name", [b"short", "0" * 32, None])
def test_other_keys_are_refused(store, cache, name):
    for call in (store.get_many, lambda keys: store.put_many([(k, cache.storage.page(0)) for k in keys])):
        with pytest.raises(ValueError, match="32 bytes"):
            call([name])


# Checkpoints


def test_a_checkpoint_writes_only_new_and_changed_pages(tmp_path, cache):
    path = tmp_path / "checkpoint"
    assert save(cache, path).written == 6
    assert save(cache, path).written == 0
    cache.append("a", *all_layers([60]))  # position 12: a new block
    assert save(cache, path).written == 1
    cache.append("a", *all_layers([61]))  # the same block, filled further
    report = save(cache, path)
    assert (report.num_pages, report.written) == (7, 1)
    assert_equal(load(path).cache, cache)


def test_pages_that_nobody_needs_any_more_go(tmp_path, cache):
    path = tmp_path / "checkpoint"
    save(cache, path)
    cache.free(["a", "b", "c"])
    assert save(cache, path).written == 0
    assert len(list(path.glob("*.page"))) == 3
    assert load(path).seq_ids == ("d",)


def test_equal_pages_are_one_file_and_two_blocks(tmp_path):
    cache = new_cache(4, 4)
    for seq in "ab":
        cache.add(seq)
        cache.append(seq, *all_layers(range(4)), 4)
    report = save(cache, tmp_path / "checkpoint")
    assert (report.num_pages, report.written) == (2, 1)
    assert_equal(load(tmp_path / "checkpoint").cache, cache)


def test_a_long_generation_costs_its_growth_not_its_length(tmp_path):
    cache = new_cache(32, 4)
    cache.add("a")
    written = []
    for step in range(100):
        cache.append("a", *all_layers([step % 100]))
        written.append(save(cache, tmp_path / "checkpoint").written if step % 10 == 9 else 0)
    assert max(written) <= 10 // 4 + 2
    assert_equal(load(tmp_path / "checkpoint").cache, cache)


def test_a_refused_checkpoint_leaves_the_one_before(tmp_path, cache, monkeypatch):
    path = tmp_path / "checkpoint"
    save(cache, path, ["a"])

    def full(self, records):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PageStore, "put_packed", full)
    with pytest.raises(OSError, match="No space left"):
        save(cache, path)
    monkeypatch.undo()
    assert load(path).seq_ids == ("a",)


def test_a_folder_of_something_else_is_no_checkpoint_and_stays_as_it_was(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(SnapshotError, match="no checkpoint"):
        load(tmp_path / "folder")
    assert list((tmp_path / "folder").iterdir()) == []


def test_readers_wait_for_a_writer(tmp_path, cache):
    fcntl = pytest.importorskip("fcntl", reason="there is no flock here")
    path = tmp_path / "checkpoint"
    save(cache, path)
    with open(path / ".lock", "rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        reader = threading.Thread(target=load, args=(path,))
        reader.start()
        reader.join(0.3)
        assert reader.is_alive()
    reader.join(60)
    assert not reader.is_alive()
