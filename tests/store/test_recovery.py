"""Damaged pages computed again from the tokens, with the model that ships: equal to what was lost."""

import numpy as np
import pytest
from pools import check_invariants, refused
from saved import sharing

from pagedkv.lm import Llama
from pagedkv.store import SnapshotError, load, model_name, recover, save
from pagedkv.store.files import SnapshotFile

BLOCK = 4


@pytest.fixture(scope="module")
def model():
    return Llama.load()


def answers(model, **options):
    """Four texts that begin alike, as in the course, and a fifth: a cache, and the tokens of each."""
    cache = model.new_cache(48, BLOCK, **options)
    texts = {seq: f"Good night{end} Parting" for seq, end in zip("abcd", ",!.;", strict=True)} | {
        "e": "Adieu"
    }
    tokens = {seq: model.tokenizer.encode(text) for seq, text in texts.items()}
    known = {} if not options else {"tokens": tokens["a"][:10]}
    cache.add("a", **known)
    model.forward(cache, "a", [tokens["a"][:10]])
    if options:
        cache.commit("a")
    cache.fork("a", ["b", "c", "d"])
    model.forward(cache, list("abcd"), [tokens[seq][10:] for seq in "abcd"])
    cache.add("e")
    model.forward(cache, "e", [tokens["e"]])
    if options:
        cache.commit(list("abcd"), [tokens[seq][10:] for seq in "abcd"])
        cache.commit("e", tokens["e"])
    return cache, tokens


def break_pages(path, pages):
    source = SnapshotFile(path)
    data = bytearray(path.read_bytes())
    for page in pages:
        data[source._pages_at + page * source._itemsize + 99] ^= 4
    path.write_bytes(data)


def gathered(cache, seq):
    return np.stack([np.stack(cache.gather(layer, seq)) for layer in range(cache.storage.num_layers)])


@pytest.mark.parametrize("broken", [[0], [1], [2], [5], [1, 4], [0, 1, 2, 3], "all"])
def test_damaged_pages_come_back_equal_and_shared_as_before(tmp_path, model, broken):
    cache, tokens = answers(model)
    path = tmp_path / "s.npz"
    pages = save(cache, path, model=model, tokens=tokens).num_pages
    broken = list(range(pages)) if broken == "all" else broken
    break_pages(path, broken)
    report = recover(path, model.new_cache(20, BLOCK), model=model)
    check_invariants(report.cache)
    assert sorted(report.recomputed) == sorted(report.damaged) == broken
    assert report.losses == ()
    assert sharing(report.cache, cache.seq_ids) == sharing(cache, cache.seq_ids)
    for seq in cache.seq_ids:
        assert np.allclose(gathered(report.cache, seq), gathered(cache, seq), rtol=1e-4, atol=1e-5)
    assert f"page {broken[0]} computed again (checksum" in str(report)


def test_only_the_damaged_pages_are_computed(tmp_path, model, monkeypatch):
    cache, tokens = answers(model)
    save(cache, tmp_path / "s.npz", model=model, tokens=tokens)
    break_pages(tmp_path / "s.npz", [1])
    computed = []

    def decode(tokens, positions, attend, really=model.decode):
        computed.extend(positions.tolist())
        return really(tokens, positions, attend)

    monkeypatch.setattr(model, "decode", decode)
    recover(tmp_path / "s.npz", model=model, name=model_name(model))
    assert computed == [4, 5, 6, 7]


def test_the_text_goes_on_as_if_nothing_had_been_damaged(tmp_path, model):
    cache, tokens = answers(model)
    save(cache, tmp_path / "s.npz", model=model, tokens=tokens)
    break_pages(tmp_path / "s.npz", [0, 3])
    other = recover(tmp_path / "s.npz", model=model).cache

    def written(cache):
        text, token = [], model.tokenizer.encode("\n")[0]
        for _ in range(30):
            logits = model.next_logits(cache, list("abcd"), [[token]] * 4)
            text.append(logits.argmax(axis=1).tolist())
            token = text[-1][0]
        return text

    assert written(other) == written(cache)


def test_without_the_model_the_same_damage_costs_tokens(tmp_path, model):
    cache, tokens = answers(model)
    save(cache, tmp_path / "s.npz", model=model, tokens=tokens)
    break_pages(tmp_path / "s.npz", [1])
    report = load(tmp_path / "s.npz", model=model)
    assert [report.cache.length(seq) for seq in "abcde"] == [4, 4, 4, 4, 5]


def test_a_sequence_whose_tokens_nobody_knows_is_cut(tmp_path, model):
    cache, tokens = answers(model)
    del tokens["e"]
    save(cache, tmp_path / "s.npz", model=model, tokens=tokens)
    pages = SnapshotFile(tmp_path / "s.npz").tables.snapshot
    break_pages(tmp_path / "s.npz", [1, int(pages.indices[-1])])
    report = recover(tmp_path / "s.npz", model=model)
    assert [loss.seq_id for loss in report.losses] == ["e"]
    assert report.cache.length("e") == 4
    assert report.recomputed == (1,)
    told = recover(tmp_path / "s.npz", model=model, tokens={"e": model.tokenizer.encode("Adieu")})
    assert told.losses == () and told.cache.length("e") == 5


def test_one_sharer_who_knows_the_text_is_enough(tmp_path, model):
    cache, tokens = answers(model)
    save(cache, tmp_path / "s.npz", model=model, tokens={"c": tokens["c"]})
    break_pages(tmp_path / "s.npz", [1])
    report = recover(tmp_path / "s.npz", model=model)
    assert report.recomputed == (1,) and report.losses == ()


def test_what_a_window_left_behind_cannot_be_computed_over(tmp_path, model):
    cache, tokens = answers(model)
    cache.release_before("a", 8)
    save(cache, tmp_path / "s.npz", "a", model=model, tokens={"a": tokens["a"]})
    break_pages(tmp_path / "s.npz", [1])
    (loss,) = recover(tmp_path / "s.npz", model=model).losses
    assert (loss.seq_id, loss.saved, loss.kept) == ("a", 19, 12)


def test_a_cache_that_knows_its_texts_needs_none_and_finds_its_prefixes_again(tmp_path, model):
    cache, tokens = answers(model, prefix_cache=True)
    save(cache, tmp_path / "s.npz", model=model)
    break_pages(tmp_path / "s.npz", [1])
    other = recover(tmp_path / "s.npz", model.new_cache(20, BLOCK, prefix_cache=True), model=model).cache
    check_invariants(other)
    for pool in (cache, other):
        pool.add("again", tokens=tokens["a"])
        assert pool.match("again") == 16
    cut = load(tmp_path / "s.npz", model.new_cache(20, BLOCK, prefix_cache=True), model=model).cache
    cut.add("again", tokens=tokens["a"])
    assert cut.match("again") == 4


@pytest.mark.parametrize("wrong", [[999] * 20, [-1] * 20])
def test_tokens_that_the_model_does_not_have_leave_the_cache_as_it_was(tmp_path, model, wrong):
    cache, _ = answers(model)
    save(cache, tmp_path / "s.npz", model=model, tokens={"a": wrong})
    break_pages(tmp_path / "s.npz", [0])
    other = model.new_cache(20, BLOCK)
    with pytest.raises(ValueError, match="there is no token"):
        recover(tmp_path / "s.npz", other, model=model)
    check_invariants(other)
    assert other.num_free == 20 and other.seq_ids == []


def test_another_model_is_refused(tmp_path, model):
    cache, tokens = answers(model)
    save(cache, tmp_path / "s.npz", model=model, tokens=tokens)
    other = Llama.load()
    other.layers[0].query_key_value[0, 0] += 1
    pool = model.new_cache(20, BLOCK)
    with refused(pool, SnapshotError, match="model is 'sha256:"):
        recover(tmp_path / "s.npz", pool, model=other)
    assert model_name(Llama.load()) == model_name(model) != model_name(other)
    assert model_name(None) == "" and model_name("words") == "words"
