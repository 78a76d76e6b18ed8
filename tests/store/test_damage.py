"""One fault in a snapshot, wherever it is: never wrong data, never a strange error, never more lost than must be."""

import json
import random
import struct
import zlib

import numpy as np
import pytest
from needs import STRESS, need_module
from pools import all_layers, check_invariants, new_cache, table
from saved import CONTAINERS, beginning, used_before, wall

from pagedkv.store import SnapshotError, load, save
from pagedkv.store.files import SEAL, SEAL_WORD, SnapshotFile
from pagedkv.store.tables import HEAD, MAGIC

FAULTS = 2_000 if STRESS else 200  # per container


def cache_to_save():
    """The four answers, and two that stand alone."""
    cache = wall()
    for seq, n in (("e", 3), ("f", 1)):
        cache.add(seq)
        cache.append(seq, *all_layers(range(40, 40 + n)), n)
    return cache


@pytest.fixture(params=CONTAINERS[:2])
def file(request, tmp_path):
    """(a snapshot in a file, its bytes, the cache that was saved)"""
    if request.param.endswith(".h5"):
        need_module("h5py", "hdf5")
    cache = cache_to_save()
    save(cache, tmp_path / request.param, model="m")
    return tmp_path / request.param, (tmp_path / request.param).read_bytes(), cache


class Anatomy:
    """Where the parts of a file lie."""

    def __init__(self, path):
        source = SnapshotFile(path)
        self.tables = source.tables
        self.start, self.size = source._pages_at, source._itemsize
        self.pages = [slice(self.start + i * self.size, self.start + (i + 1) * self.size) for i in range(8)]
        data = path.read_bytes()
        self.copies = [data.find(MAGIC), data.rfind(MAGIC)]


# Faults: each takes the bytes of a file, its anatomy and a source of chance, and returns other bytes


def flip_a_bit(data, parts, rng):
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def flip_a_bit_of_a_page(data, parts, rng):
    data[parts.start + rng.randrange(8 * parts.size)] ^= 1 << rng.randrange(8)
    return data


def cut(data, parts, rng):
    return data[: rng.randrange(len(data))]


def cut_by_one(data, parts, rng):
    return data[:-1]


def swap_two_pages(data, parts, rng):
    a, b = rng.sample(parts.pages, 2)
    data[a], data[b] = data[b], data[a]
    return data


def duplicate_a_page(data, parts, rng):
    a, b = rng.sample(parts.pages, 2)
    data[a] = data[b]
    return data


def blank_a_page(data, parts, rng):
    data[rng.choice(parts.pages)] = bytes(parts.size)
    return data


def blank_a_sector(data, parts, rng):
    at = rng.randrange(len(data))
    return data[:at] + bytes(len(data[at : at + 512])) + data[at + 512 :]


def page_of_another_snapshot(data, parts, rng):
    """Right in itself, at the right place, of the same model: only not of this snapshot."""
    page = rng.choice(parts.pages)
    data[page] = parts.other[page.start - parts.start + parts.other_start :][: parts.size]
    return data


def garbage_behind(data, parts, rng):
    return data + rng.randbytes(rng.randrange(1, 100))


def zero_file(data, parts, rng):
    return bytes(len(data))


def empty_file(data, parts, rng):
    return b""


def _rewritten(data, at, change):
    """The tables at a place, changed, under a right checksum."""
    _, _, length, pages_at = HEAD.unpack_from(data, at)
    fields = json.loads(bytes(data[at + HEAD.size : at + HEAD.size + length]))
    change(fields)
    text = json.dumps(fields).encode()[:length]
    rest = struct.pack("<QQ", length, pages_at) + text.ljust(length)
    data[at : at + HEAD.size + length] = struct.pack("<16sI", MAGIC, zlib.crc32(rest)) + rest
    return data


def _both_rewritten(data, parts, change):
    """The whole file as a program would have written it that means something else."""
    for at in parts.copies:
        _rewritten(data, at, change)
    end, pages_end = len(data) - SEAL.size, parts.pages[-1].stop
    data[end:] = SEAL.pack(SEAL_WORD, zlib.crc32(data[pages_end:end], zlib.crc32(data[: parts.start])))
    return data


def wrong_version(data, parts, rng):
    return _both_rewritten(data, parts, lambda fields: fields.update(version=rng.choice([0, 2, 9])))


def wrong_version_in_one_copy(data, parts, rng):
    return _rewritten(data, rng.choice(parts.copies), lambda fields: fields.update(version=2))


def field_changed_in_one_copy(data, parts, rng):
    return _rewritten(
        data, rng.choice(parts.copies), lambda f: f["snapshot"]["lengths"]["int64"].__setitem__(0, 11)
    )


def layout_changed(data, parts, rng):
    """Refused for the layout, whichever of its numbers was changed."""
    name = rng.choice(["num_layers", "block_size", "num_kv_heads", "head_dim"])
    return _both_rewritten(
        data, parts, lambda fields: fields["layout"].update({name: rng.choice([0, 1, 3, 5])})
    )


def nonsense(data, parts, rng):
    """A field of another kind or out of all bounds, under a right checksum."""

    def change(fields):
        where = rng.choice([fields, fields["layout"], fields["snapshot"]])
        name = rng.choice(sorted(set(where) - {"num_blocks", "tokens", "stem", "digests"}))
        where[name] = rng.choice(
            [None, -1, 10**30, "x", [], {}, [[]], {"int32": ["x"]}, {"int64": [9] * 5}, 0.5]
        )

    return _both_rewritten(data, parts, change)


HARMLESS = [  # the sequences whose pages are whole come back, all the others as far as they are whole
    flip_a_bit,
    flip_a_bit_of_a_page,
    cut_by_one,
    swap_two_pages,
    duplicate_a_page,
    blank_a_page,
    page_of_another_snapshot,
    garbage_behind,
]
HARMFUL = [zero_file, empty_file, wrong_version, layout_changed, nonsense]  # nothing can be had from these
EITHER = [
    cut,
    blank_a_sector,
    wrong_version_in_one_copy,
    field_changed_in_one_copy,
]  # the tables may be gone, or say two things


def expected(parts, before, after):
    """Tokens that each sequence keeps: those in front of its first page whose bytes are others now."""
    kept = {}
    snapshot = parts.tables.snapshot
    for row, seq in enumerate(snapshot.seq_ids):
        pages = snapshot.indices[snapshot.indptr[row] : snapshot.indptr[row + 1]]
        bad = [i for i, page in enumerate(pages) if after[parts.pages[page]] != before[parts.pages[page]]]
        kept[seq] = bad[0] * 4 if bad else int(snapshot.lengths[row])
    return kept


def check_load(path, before, after, parts, saved):
    """Load a damaged file and hold the result against what must be; False if it was refused."""
    other = used_before(new_cache(9, 4))
    queue = other.manager.allocator.queue()
    try:
        report = load(path, other, model="m")
    except SnapshotError:
        assert other.manager.allocator.queue() == queue and other.seq_ids == []
        return False
    check_invariants(other)
    kept = expected(parts, before, after)
    assert {seq: other.length(seq) for seq in other.seq_ids} == kept
    for seq, length in kept.items():
        assert beginning(other, seq, length) == beginning(saved, seq, length)
    lost = {loss.seq_id: (loss.saved, loss.kept) for loss in report.losses}
    assert lost == {seq: (saved.length(seq), n) for seq, n in kept.items() if n < saved.length(seq)}
    damaged = {page for page in range(8) if after[parts.pages[page]] != before[parts.pages[page]]}
    assert set(report.damaged) == damaged
    assert bool(report.num_damages) == (before != after)
    return True


def anatomy_of(path, saved):
    parts = Anatomy(path)
    twin = path.with_name(f"twin{path.suffix}")
    save(saved, twin, model="m")
    parts.other, parts.other_start = twin.read_bytes(), Anatomy(twin).start
    return parts


def test_random_faults_of_a_file(file):
    path, before, saved = file
    parts, rng = anatomy_of(path, saved), random.Random(0)
    assert check_load(path, before, before, parts, saved)
    refused = {}
    for i in range(FAULTS):
        fault = (HARMLESS + HARMFUL + EITHER)[i % len(HARMLESS + HARMFUL + EITHER)]
        after = bytes(fault(bytearray(before), parts, rng))
        path.write_bytes(after)
        loaded = check_load(path, before, after, parts, saved)
        refused.setdefault(fault, []).append(not loaded)
        if fault in HARMLESS:
            assert loaded, fault.__name__
        if fault in HARMFUL:
            assert not loaded, fault.__name__
    assert not all(refused[cut]) and any(refused[field_changed_in_one_copy])


def test_every_single_byte_of_a_small_file_matters_and_costs_a_page_at_most(tmp_path):
    cache = new_cache(2, 2)
    cache.add("a")
    cache.append("a", *all_layers(range(3)), 3)
    save(cache, tmp_path / "s.npz")
    before = (tmp_path / "s.npz").read_bytes()
    source = SnapshotFile(tmp_path / "s.npz")
    page_of = lambda at: (at - source._pages_at) // source._itemsize  # noqa: E731
    step = 1 if STRESS else 23
    for at in range(0, len(before), step):
        after = bytearray(before)
        after[at] ^= 0xFF
        (tmp_path / "s.npz").write_bytes(after)
        report = load(tmp_path / "s.npz", new_cache(2, 2))
        assert report.num_damages == 1, at
        assert report.cache.length("a") == {0: 0, 1: 2}.get(page_of(at), 3)


def test_another_models_file_is_refused(file):
    path, _, saved = file
    save(saved, path, model="other")
    with pytest.raises(SnapshotError, match="model is 'other', not 'm'"):
        load(path, new_cache(9, 4), model="m")


# Folders


def damage_folder(folder, rng):
    """One fault in one file; returns the keys of pages that are damaged now."""
    pages = sorted(folder.glob("*.page"))
    victim, other = rng.sample(pages, 2)
    kind = rng.choice(["flip", "cut", "swap", "duplicate", "delete", "empty", "zero", "tables"])
    data = bytearray(victim.read_bytes())
    if kind == "tables":
        text = bytearray((folder / "tables").read_bytes())
        text[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
        (folder / "tables").write_bytes(text)
        return set()
    if kind == "delete":
        victim.unlink()
    elif kind == "swap":
        victim.write_bytes(other.read_bytes()), other.write_bytes(data)
        return {bytes.fromhex(victim.stem), bytes.fromhex(other.stem)}
    elif kind == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        victim.write_bytes(data)
    else:
        cut = data[: rng.randrange(len(data))]
        new = {"cut": cut, "duplicate": other.read_bytes(), "empty": b"", "zero": bytes(len(data))}[kind]
        victim.write_bytes(new)
    return {bytes.fromhex(victim.stem)}


def test_random_faults_of_a_folder(tmp_path):
    saved, rng = cache_to_save(), random.Random(0)
    save(saved, tmp_path / "folder", model="m")
    whole = {file: file.read_bytes() for file in (tmp_path / "folder").iterdir()}
    for i in range(FAULTS):
        bad = damage_folder(tmp_path / "folder", rng)
        other = used_before(new_cache(9, 4))
        report = load(tmp_path / "folder", other, model="m")
        check_invariants(other)
        assert report.num_damages == max(1, len(bad))
        assert len(report.damaged) == len(bad)
        for loss in report.losses:
            assert report.damaged[loss.page] == loss.reason
        lost = {loss.seq_id for loss in report.losses}
        for seq in other.seq_ids:
            assert (other.length(seq) < saved.length(seq)) == (seq in lost)
            assert beginning(other, seq, other.length(seq)) == beginning(saved, seq, other.length(seq))
        if bad:
            assert lost
        if i % 20 == 0:
            save(saved, tmp_path / "folder", model="m")  # what was damaged is written again
            assert load(tmp_path / "folder", new_cache(8, 4), model="m").num_damages == 0
        for file, data in whole.items():
            if not file.exists() or file.read_bytes() != data:
                file.write_bytes(data)


def test_nothing_but_garbage_in_the_tables_of_a_folder(tmp_path):
    save(wall(), tmp_path / "folder")
    for data in (b"", b"\0" * 5000, b"not tables at all"):
        (tmp_path / "folder" / "tables").write_bytes(data)
        with pytest.raises(SnapshotError, match="no checkpoint that can be read"):
            load(tmp_path / "folder")


# The story of the lesson


@pytest.mark.parametrize(
    ("block", "kept"),
    [
        (0, {"a": 0, "b": 0, "c": 0, "d": 0}),
        (1, {"a": 4, "b": 4, "c": 4, "d": 4}),
        (2, {"a": 12, "b": 12, "c": 12, "d": 8}),
        (3, {"a": 8, "b": 12, "c": 12, "d": 12}),
    ],
)
def test_a_flipped_bit_costs_every_sequence_that_uses_the_block(tmp_path, block, kept):
    cache = wall()
    path = tmp_path / "s.npz"
    report = save(cache, path)
    tables = SnapshotFile(path).tables.snapshot
    assert (len(tables.indices), report.num_pages) == (12, 6)
    page = int(tables.indices[np.concatenate([table(cache, s) for s in "abcd"]).tolist().index(block)])
    data = bytearray(path.read_bytes())
    data[Anatomy(path).pages[page].start + 100] ^= 1
    path.write_bytes(data)
    report = load(path, new_cache(8, 4))
    assert {seq: report.cache.length(seq) for seq in "abcd"} == kept
    assert list(report.damaged) == [page]
    for loss in report.losses:
        assert f"keeps {loss.kept} of 12 tokens (page {page}: checksum" in str(loss)
    assert f"4 sequences on 6 pages, 1 damaged\n{report.losses[0]}" in str(report)


@pytest.mark.parametrize("known", ["tokens", "block_hashes"])
def test_only_what_is_whole_can_be_found_again(tmp_path, known):
    """Blocks behind a damaged one are gone from the prefix cache too, whether tokens or only hashes are known."""
    prompt = {"tokens": range(18)} if known == "tokens" else {"block_hashes": list("pqrs"), "num_tokens": 18}
    path, cache = tmp_path / "s.npz", new_cache(12, 4, prefix_cache=True)
    cache.add("a", **prompt)
    cache.append("a", *all_layers(range(18)), 18)
    cache.commit("a") if known == "tokens" else cache.commit("a", block_hashes=list("pqrs"))
    save(cache, path)
    for page, found in [(None, 16), (0, 0), (2, 8), (4, 16)]:
        data = bytearray(path.read_bytes())
        if page is not None:
            data[Anatomy(path).pages[page].start + 77] ^= 1
        damaged = path.with_name("damaged.npz")
        damaged.write_bytes(data)
        other = load(damaged, new_cache(12, 4, prefix_cache=True)).cache
        check_invariants(other)
        assert other.length("a") == (18 if page is None else 4 * page)
        other.add("b", **prompt)
        assert other.match("b") == found
        other.free("a")
        assert other.match("b") == found


def test_a_checksum_does_not_tell_who_wrote_a_page(tmp_path):
    """Whoever changes a page and its checksum is believed: a CRC is no signature."""
    cache = wall()
    path = tmp_path / "s.npz"
    save(cache, path)
    data, page = bytearray(path.read_bytes()), Anatomy(path).pages[2]
    record = data[page]
    record[100] ^= 1
    record[4:8] = zlib.crc32(record[8:], zlib.crc32(record[:4])).to_bytes(4, "little")
    data[page] = record
    path.write_bytes(data)
    report = load(path)
    assert report.num_damages == 0
    assert beginning(report.cache, "a", 12) != beginning(cache, "a", 12)
