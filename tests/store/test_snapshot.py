"""Save and load: what was saved comes back, elsewhere and shared as before, or the cache stays as it was."""

import json

import numpy as np
import pytest
from needs import need_module
from pools import Model, all_layers, check_invariants, new_cache, refs, refused, table
from saved import CONTAINERS, assert_equal, contents, used_before, wall

from pagedkv import PoolExhausted, StalePlan
from pagedkv.storage import FORMATS
from pagedkv.store import Layout, SnapshotError, load, save
from pagedkv.store.files import SnapshotFile

BLOCK_SIZES = [1, 2, 4, 16]


@pytest.fixture(params=CONTAINERS)
def path(request, tmp_path):
    if request.param.endswith(".h5"):
        need_module("h5py", "hdf5")
    return tmp_path / request.param


# What comes back


def test_the_four_answers_share_six_pages_in_the_file_and_after_loading(path):
    cache = wall()
    report = save(cache, path)
    assert (report.num_pages, report.seq_ids) == (6, tuple("abcd"))
    other = used_before(new_cache(11, 4))
    loaded = load(path, other)
    assert loaded.num_damages == 0
    assert sorted(refs(other)) == [0] * 5 + [1] * 4 + [4] * 2
    assert_equal(other, cache)


def test_two_sequences_that_share_two_blocks_make_four_pages(path):
    cache = new_cache(8, 4)
    cache.add("a")
    cache.append("a", *all_layers(range(8)), 8)
    cache.fork("a", ["b"])
    cache.append(["a", "b"], *all_layers([50, 51]))
    assert save(cache, path).num_pages == 4
    other = load(path).cache
    assert sorted(refs(other)) == [0] * 4 + [1, 1, 2, 2]
    assert_equal(other, cache)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_boundary_comes_back(path, block_size, dtype):
    model = Model(64, block_size, dtype=dtype)
    for length in sorted({m * block_size + off for m in (0, 1, 2) for off in (-1, 0, 1) if m or off >= 0}):
        model.alloc(length, f"{length}")
    save(model.pool, path)
    other = load(path, used_before(new_cache(70, block_size, dtype=dtype))).cache
    assert other.storage.dtype == dtype
    assert_equal(other, model.pool)


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_stored_words_are_the_same_bit_for_bit(path, dtype):
    cache = new_cache(4, 4, dtype=dtype)
    cache.add("a")
    cache.extend("a", 8)
    for array in cache.storage.arrays.values():
        words = array.view(np.uint8)
        words[...] = np.random.default_rng(0).integers(0, 256, words.shape)
    save(cache, path)
    other = load(path).cache
    for name, array in other.storage.arrays.items():
        assert array.dtype == cache.storage.arrays[name].dtype
        assert (
            array[:, table(other, "a")].tobytes()
            == cache.storage.arrays[name][:, table(cache, "a")].tobytes()
        )


def test_a_sequence_goes_on_after_loading_as_if_nothing_had_been(path):
    model = Model(8, 4)
    model.alloc(10, "a"), model.fork("a", ["b"])
    save(model.pool, path)
    other = Model(9, 4)
    load(path, other.pool)
    other.tokens = dict(model.tokens)
    other.check()
    other.append(["a", "b"])  # the shared tail is copied for one of them
    assert other.num_free == 9 - 4


def test_chosen_sequences_are_saved_and_loaded_without_the_others_pages(path):
    cache = wall()
    assert save(cache, path, ["b", "d"]).num_pages == 4
    report = load(path, new_cache(8, 4), "d")
    assert (report.seq_ids, report.num_pages) == (("d",), 3)
    assert contents(report.cache, "d") == contents(cache, "d")


def test_what_a_window_left_behind_stays_behind(path):
    model = Model(8, 4)
    model.alloc(11, "a"), model.release_before("a", 9), model.alloc(3, "b")
    assert save(model.pool, path).num_pages == 2
    other = Model(8, 4)
    load(path, other.pool)
    other.tokens = dict(model.tokens)
    other.check()


def test_sequence_ids_keep_their_type(path):
    cache = new_cache(4, 4)
    for seq in (1, "1", "näch\ttlich", -5):
        cache.add(seq)
    save(cache, path)
    assert load(path).cache.seq_ids == [1, "1", "näch\ttlich", -5]


def test_an_empty_cache_can_be_saved(path):
    save(new_cache(4, 4), path)
    report = load(path)
    assert report.cache.seq_ids == [] and report.num_damages == 0


def test_without_a_cache_one_like_the_saved_one_is_made(path):
    save(wall(), path)
    cache = load(path).cache
    assert (cache.num_blocks, cache.block_size) == (8, 4)
    assert Layout.of(cache.storage) == Layout.of(wall().storage)


def test_tokens_travel_with_their_sequences(path):
    cache = wall()
    save(cache, path, tokens={"a": np.arange(12), "b": [7]})
    assert load(path).tokens == {"a": list(range(12)), "b": [7]} | {seq: [] for seq in "cd"}
    with pytest.raises(KeyError, match="'z'"):
        save(cache, path, tokens={"z": [1]})


def test_slots_without_a_token_are_not_written_to_disk(path):
    cache = new_cache(2, 4)
    cache.add("a")
    cache.append("a", *all_layers([1]))
    cache.storage.arrays["keys"][:, :, 1:] = 12345.0  # what somebody else left there
    save(cache, path)
    files = [path] if path.is_file() else list(path.iterdir())
    assert all(np.float32(12345).tobytes() not in file.read_bytes() for file in files)


def test_free_slots_hold_nan_again_after_loading(path):
    save(wall(), path)
    other = new_cache(8, 4)
    load(path, other, ["a"])
    other.truncate("a", 10)
    save(other, path)
    back = load(path, new_cache(8, 4)).cache
    assert np.isnan(back.storage.arrays["keys"][:, table(back, "a")[-1], 2:]).all()
    check_invariants(back)


def test_prefixes_that_were_findable_are_findable_again(path):
    cache = new_cache(8, 4, prefix_cache=True)
    cache.add("a", tokens=range(11))
    cache.append("a", *all_layers(range(11)), 11)
    cache.commit("a")
    save(cache, path)
    other = load(path, new_cache(9, 4, prefix_cache=True)).cache
    other.add("b", tokens=range(11))
    assert other.match("b") == 8
    other.extend("b", None)
    assert table(other, "b")[:2] == table(other, "a")[:2]
    assert load(path, new_cache(9, 4)).tokens == {"a": list(range(11))}


# What the files are


def test_numpy_and_zip_read_the_npz(tmp_path):
    cache = wall()
    save(cache, tmp_path / "s.npz")
    with np.load(tmp_path / "s.npz", allow_pickle=False) as file:
        assert file.files == ["tables", "pages", "tables_again"]
        assert file["tables"].tobytes() == file["tables_again"].tobytes()
        described = json.loads(file["tables"].tobytes()[36:])
        assert described["snapshot"]["indices"] == {"int32": [0, 1, 2, 0, 1, 3, 0, 1, 4, 0, 1, 5]}
        assert described["snapshot"]["lengths"] == {"int64": [12] * 4}
        assert np.array_equal(file["pages"][2]["keys"], cache.storage.page(3)["keys"])  # a's own page


def test_hdf5_reads_the_h5(tmp_path):
    h5py = need_module("h5py", "hdf5")
    cache = wall()
    save(cache, tmp_path / "s.h5")
    with h5py.File(tmp_path / "s.h5") as file:
        assert sorted(file) == ["pages", "tables"]
        assert np.array_equal(file["pages"][2]["keys"], cache.storage.page(3)["keys"])


def test_an_h5_is_loaded_without_h5py(tmp_path, monkeypatch):
    need_module("h5py", "hdf5")
    cache = wall()
    save(cache, tmp_path / "s.h5")
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    assert_equal(load(tmp_path / "s.h5").cache, cache)
    with pytest.raises(ImportError, match=r'pip install "pagedkv\[hdf5\]"'):
        save(cache, tmp_path / "t.h5")
    assert [file.name for file in tmp_path.iterdir()] == ["s.h5"]


def test_pages_are_read_through_a_memory_map(tmp_path):
    save(wall(), tmp_path / "s.npz")
    source = SnapshotFile(tmp_path / "s.npz")
    record, reason = source.read(5)
    assert reason is None
    with pytest.raises(ValueError, match="read-only"):
        record["keys"][...] = 0
    assert np.shares_memory(record["keys"], np.frombuffer(source._map, np.uint8))


def test_progress_is_told_to_the_end(path):
    seen = []
    save(wall(), path, progress=lambda *now: seen.append(now))
    assert seen[-1] == (6, 6)
    seen.clear()
    load(path, progress=lambda *now: seen.append(now))
    assert seen == [(n, 6) for n in range(1, 7)]
    need_module("tqdm", "bench")
    save(wall(), path, progress=True)


# What is refused, and changes nothing


def test_a_pool_that_is_too_small_stays_as_it_was(path):
    save(wall(), path)
    other = new_cache(7, 4)
    other.add("x")
    other.append("x", *all_layers([1, 2]), 2)
    load_into = new_cache(6, 4)
    load(path, load_into)  # six pages fit into six blocks
    cramped = new_cache(6, 4)
    cramped.add("x")
    cramped.append("x", *all_layers([1]))
    with refused(cramped, PoolExhausted):
        load(path, cramped)


def test_a_sequence_that_is_there_already_is_refused(path):
    save(wall(), path)
    cache = wall()
    with refused(cache, ValueError, match="'a' exists already"):
        load(path, cache)


@pytest.mark.parametrize("seq_ids", ["z", ["a", "z"], [0], ["a", "a"]])
def test_unknown_and_repeated_sequences_are_refused(path, seq_ids):
    cache = wall()
    with refused(cache, (KeyError, ValueError)):
        save(cache, path, seq_ids)
    assert not path.is_file()
    save(cache, path)
    other = new_cache(20, 4)
    with refused(other, (KeyError, ValueError)):
        load(path, other, seq_ids)


@pytest.mark.parametrize(
    "shape",
    [(8, 2, 2, 2, 2), (8, 4, 1, 2, 2), (8, 4, 2, 1, 2), (8, 4, 2, 2, 1)],
    ids=["block_size", "num_kv_heads", "head_dim", "num_layers"],
)
def test_a_cache_of_another_shape_is_refused_by_name(path, shape, request):
    from pagedkv import PagedKVCache

    save(wall(), path)
    blocks, size, heads, dim, layers = shape
    other = PagedKVCache(blocks, size, heads, dim, num_layers=layers)
    with refused(other, SnapshotError, match=request.node.callspec.id.split("-")[-1]):
        load(path, other)


def test_another_dtype_or_model_is_refused_by_name(path):
    save(wall(), path, model="one")
    for cache, model, match in [
        (new_cache(8, 4, dtype="float16"), "one", "float16"),
        (new_cache(8, 4), "two", "model is 'one', not 'two'"),
        (new_cache(8, 4), None, "model is 'one', not ''"),
    ]:
        with refused(cache, SnapshotError, match=match):
            load(path, cache, model=model)
    load(path, new_cache(8, 4), model="one")


@pytest.mark.parametrize("name", ["s.pt", "s.npz.bak", "s.json"])
def test_an_unknown_container_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"\.npz, \.h5"):
        save(wall(), tmp_path / name)


def test_what_is_not_there_cannot_be_loaded(path):
    with pytest.raises(SnapshotError, match="cannot be read"):
        load(path)


def test_tables_and_pages_are_of_one_moment(path):
    """Appending between the two: the snapshot is refused, the one before stays."""
    cache = wall()
    save(cache, path, ["a"])

    def meddle(done, total):
        cache.truncate("b", 11)

    with pytest.raises(StalePlan, match="'b' changed"):
        save(cache, path, progress=meddle)
    assert load(path, new_cache(8, 4)).seq_ids == ("a",)


def test_a_failing_copy_gives_the_blocks_back(path, monkeypatch):
    """Damage between the two readings of a page: nobody can find the blocks."""
    cache = new_cache(8, 4, prefix_cache=True)
    cache.add("a", tokens=range(11))
    cache.append("a", *all_layers(range(11)), 11)
    cache.commit("a")
    save(cache, path)
    other = new_cache(8, 4, prefix_cache=True)
    calls = []

    def fault(self, record, key, really=Layout.fault):
        calls.append(key)
        return "smoke" if len(calls) == 5 else really(self, record, key)

    monkeypatch.setattr(Layout, "fault", fault)
    with pytest.raises(SnapshotError, match="smoke"):
        load(path, other)
    check_invariants(other)
    assert other.num_free == 8 and other.seq_ids == []
    other.add("b", tokens=range(11))
    assert other.match("b") == 0
