"""PagedCache's contract with transformers, call by call, and what it refuses."""

import copy
import gc
import subprocess
import sys
import types
import weakref

import numpy as np
import pytest
from needs import need_module

torch = need_module("torch", "transformers")
transformers = need_module("transformers", "transformers")

from pagedkv import PoolExhausted  # noqa: E402
from pagedkv.integrations import transformers as ours  # noqa: E402
from pagedkv.integrations.transformers import PagedCache  # noqa: E402

pytestmark = pytest.mark.torch

HEADS, HEAD_DIM, LAYERS = 2, 3, 2
CONFIG = transformers.LlamaConfig(num_hidden_layers=LAYERS)


def paged(num_blocks=32, block_size=4, **options):
    return PagedCache(CONFIG, num_blocks, block_size, poison=True, **options)


def some(batch, new, dtype=torch.float32, heads=HEADS, head_dim=HEAD_DIM):
    """Keys and values of every layer, all different."""
    return [
        tuple(torch.randn(batch, heads, new, head_dim).to(dtype) for _ in ("keys", "values"))
        for _ in range(LAYERS)
    ]


def feed(cache, new):
    """One forward pass; what each layer's attention would read."""
    return [cache.update(keys, values, layer) for layer, (keys, values) in enumerate(new)]


def both(batch=2, **options):
    """Our cache and transformers' own, which says what is right."""
    return paged(**options), transformers.DynamicCache(config=CONFIG)


def assert_same(mine, theirs, new):
    for ours_, want in zip(feed(mine, new), feed(theirs, new), strict=True):
        for got, expected in zip(ours_, want, strict=True):
            assert got.dtype == expected.dtype
            assert got.is_contiguous()
            assert torch.equal(got, expected)
    assert mine.get_seq_length() == theirs.get_seq_length()


def state(cache):
    """Everything that a refusal must leave alone."""
    manager, ids = cache.manager, cache.seq_ids
    pages = (
        {} if cache.engine is None else {name: a.copy() for name, a in cache.engine.storage.arrays.items()}
    )
    lengths = [layer.get_seq_length() for layer in cache.layers]
    return (
        ids,
        manager.seq_ids,
        manager.block_tables(ids).tolist(),
        manager.allocator.queue(),
        lengths,
        cache.stats,
        pages,
    )


def assert_unchanged(before, after):
    assert str(before[:-1]) == str(after[:-1])
    for name in before[-1]:
        np.testing.assert_array_equal(before[-1][name], after[-1][name])


# What transformers calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("length", ["0", "1", "bs-1", "bs", "bs+1", "2bs-1", "2bs", "2bs+1"])
def test_a_layer_reads_the_bits_that_were_written(length, block_size, dtype):
    n = (
        {"0": 0, "1": 1}.get(length)
        if length in "01"
        else eval(length.replace("2bs", "2*bs"), {"bs": block_size})
    )
    mine, theirs = both(num_blocks=160, block_size=block_size)
    assert_same(mine, theirs, some(2, n, dtype))
    for new in (1, 3, 1):
        assert_same(mine, theirs, some(2, new, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_infinities_nans_and_negative_zeros_come_back_as_they_were(dtype):
    odd = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0, 0.0, 1.0], dtype=dtype)
    new = [(odd.view(1, 2, 1, 3), odd.flip(0).view(1, 2, 1, 3))] * LAYERS
    words = torch.int32 if dtype == torch.float32 else torch.int16
    for keys, values in feed(paged(), new):
        assert torch.equal(keys.view(words), new[0][0].view(words))
        assert torch.equal(values.view(words), new[0][1].view(words))


def test_bfloat16_lies_in_the_pages_as_raw_words():
    cache, new = paged(block_size=2), some(1, 3, torch.bfloat16)
    feed(cache, new)
    table, stored = cache.manager.block_tables(cache.seq_ids)[0], cache.engine.storage.arrays["keys"]
    assert stored.dtype == np.uint16
    words = new[1][0].view(torch.int16).numpy().view(np.uint16)[0].transpose(1, 0, 2)  # [3, heads, head_dim]
    np.testing.assert_array_equal(stored[1, table].reshape(-1, HEADS, HEAD_DIM)[:3], words)


def test_one_table_per_row_serves_all_layers():
    cache = paged()
    feed(cache, some(3, 5))
    assert cache.manager.seq_ids == cache.seq_ids == [0, 1, 2]
    assert cache.blocks_used == 6
    assert cache.manager.lengths(cache.seq_ids).tolist() == [5, 5, 5]


def test_each_layer_knows_how_far_it_is():
    cache = paged()
    (first, second), (keys, values) = cache.layers, some(1, 5)[0]
    cache.update(keys, values, 0)
    assert (first.get_seq_length(), second.get_seq_length()) == (5, 0)
    assert (cache.get_seq_length(), cache.get_seq_length(1)) == (5, 0)


@pytest.mark.parametrize("query", [1, torch.tensor([5])], ids=["number", "positions"])
def test_mask_sizes_for_a_number_and_for_positions(query):
    cache = paged()
    feed(cache, some(2, 5))
    assert cache.get_mask_sizes(query, 0) == (6, 0)
    assert cache.get_query_offset() == 5
    assert cache.get_max_length() == -1


@pytest.mark.parametrize(("by", "left"), [(0, 3), (-1, 2), (-3, 0), (-5, 0)])
def test_crop_removes_as_many_tokens_as_it_says(by, left):
    cache = paged(block_size=2)
    feed(cache, some(2, 3))
    cache.crop(by)
    assert {layer.get_seq_length() for layer in cache.layers} == {left}
    assert cache.blocks_used == 2 * -(-left // 2)


def test_crop_refuses_a_positive_number():
    cache = paged()
    feed(cache, some(2, 3))
    before = state(cache)
    with pytest.raises(ValueError, match="got 2"):
        cache.crop(2)
    assert_unchanged(before, state(cache))


def test_before_5_24_crop_is_told_the_length_to_keep(monkeypatch):
    monkeypatch.setattr(ours, "CROPS_TO_LENGTH", True)
    cache = paged()
    feed(cache, some(1, 7))
    for asked, left in ((9, 7), (5, 5), (-1, 4), (0, 0)):
        cache.crop(asked)
        assert cache.get_seq_length() == left


def test_nothing_of_what_was_cropped_is_read_again():
    mine, theirs = both()
    for step in (5, -2, 2):
        if step < 0:
            mine.crop(step), theirs.crop(step)
        else:
            assert_same(mine, theirs, some(2, step))


def test_reorder_before_the_first_update_does_nothing():
    cache = paged()
    cache.reorder_cache(torch.tensor([1, 1]))
    assert cache.get_seq_length() == 0
    assert cache.batch_size == -1


@pytest.mark.parametrize("index", [[1, 1], [0, 0], [1, 0], [0, 1]])
def test_reorder_points_tables_and_moves_no_byte(index):
    mine, theirs = both()
    assert_same(mine, theirs, some(2, 6))
    pages = {name: array.copy() for name, array in mine.engine.storage.arrays.items()}
    mine.engine.storage.poisoned = False  # what becomes free would be marked
    tables = mine.manager.block_tables(mine.seq_ids)
    for cache in (mine, theirs):
        cache.reorder_cache(torch.tensor(index))
    np.testing.assert_array_equal(mine.manager.block_tables(mine.seq_ids), tables[index])
    for name, array in mine.engine.storage.arrays.items():
        np.testing.assert_array_equal(array, pages[name])
    assert mine.blocks_used == 2 * len(set(index))
    for _ in range(3):
        assert_same(mine, theirs, some(2, 1))


@pytest.mark.parametrize(
    "pick", [[0], [2, 0], [1, 1, 1, 2], [-1], [True, False, True], torch.tensor([2, 2, 0]), []], ids=str
)
def test_rows_are_kept_repeated_and_dropped(pick):
    mine, theirs = both()
    assert_same(mine, theirs, some(3, 6))
    pick = torch.as_tensor(pick, dtype=None if len(pick) else torch.long)
    for cache in (mine, theirs):
        cache.batch_select_indices(pick)
    rows = len(torch.arange(3)[pick])
    assert len(set(mine.seq_ids)) == len(mine.seq_ids) == rows
    assert mine.manager.seq_ids == sorted(mine.seq_ids)
    if rows:
        assert_same(mine, theirs, some(rows, 1))


def test_repeated_rows_share_until_they_write():
    mine, theirs = both()
    assert_same(mine, theirs, some(2, 6))
    for cache in (mine, theirs):
        cache.batch_repeat_interleave(3)
    assert (mine.batch_size, mine.blocks_used, mine.stats.unshared) == (6, 4, 12)
    assert_same(mine, theirs, some(6, 1))
    assert mine.stats == ours.CacheStats(
        used=8, unshared=12, peak=8, copied=4
    )  # the last owner writes in place
    assert_same(mine, theirs, some(6, 1))


def test_a_shared_tail_is_cut_and_then_copied_once():
    cache, theirs = both()
    assert_same(cache, theirs, some(1, 7))
    for each in (cache, theirs):
        each.batch_repeat_interleave(2)
    assert cache.manager.block_tables(cache.seq_ids).tolist() == [[0, 1], [0, 1]]
    for each in (cache, theirs):
        each.crop(-2)
    assert_same(cache, theirs, some(2, 1))
    assert cache.manager.block_tables(cache.seq_ids).tolist() == [[0, 2], [0, 1]]
    assert cache.stats.copied == 1


def test_reset_gives_all_back_and_another_batch_dtype_and_shape_may_come():
    cache = paged(num_blocks=8)
    for batch, dtype, heads in ((2, torch.float32, 2), (3, torch.bfloat16, 2), (1, torch.float32, 4)):
        new = some(batch, 5, dtype, heads)
        assert torch.equal(feed(cache, new)[1][0], new[1][0])
        assert cache.is_initialized
        cache.reset()
        assert (cache.blocks_used, cache.get_seq_length(), cache.batch_size, cache.is_initialized) == (
            0,
            0,
            -1,
            False,
        )
        assert cache.stats == ours.CacheStats(0, 0, 0, 0)


def test_early_initialization_makes_the_pages():
    cache = paged()
    cache.early_initialization(2, HEADS, HEAD_DIM, torch.float16, torch.device("cpu"))
    assert cache.is_initialized
    assert cache.engine.storage.dtype == "float16"
    feed(cache, some(2, 3, torch.float16))


def test_a_deep_copy_shares_inside_but_not_with_its_model():
    cache = paged()
    feed(cache, some(1, 6))
    cache.batch_repeat_interleave(2)
    twin = copy.deepcopy(cache)
    new = some(2, 1)
    assert (twin.blocks_used, twin.batch_size) == (2, 2)
    got = feed(twin, new)
    assert cache.get_seq_length() == 6
    assert torch.equal(got[1][0], feed(cache, new)[1][0])
    assert copy.deepcopy(paged()).get_seq_length() == 0


def test_a_cache_is_what_generate_may_roll_back_and_not_compile():
    cache = paged()
    assert (cache.is_croppable, cache.is_compileable, len(cache)) == (True, False, LAYERS)
    assert cache.is_sliding == cache.is_linear == [False] * LAYERS
    cache.activate_past_recording()
    assert not cache.is_recording_past(0)


def test_a_cache_shows_its_pages_and_tells_observers():
    events = []
    cache = paged(num_blocks=4, observers=[events.append])
    feed(cache, some(1, 5))
    assert "0 ▪" in repr(cache)
    assert "<table" in cache._repr_html_()
    assert [event.kind for event in events] == ["add", "extend"]


def test_memory_goes_with_the_cache():
    cache = paged()
    feed(cache, some(1, 5))
    pages = weakref.ref(cache.engine)
    gc.disable()
    try:
        del cache
        assert pages() is None  # no cycle: it does not wait for the collector
    finally:
        gc.enable()


# What it refuses


@pytest.mark.parametrize(
    ("new", "what"),
    [
        (some(3, 1), "got keys of (3, 2, 3, 'float32')"),
        (some(1, 1), "got keys of (1,"),
        (some(2, 1, heads=4), "got keys of (2, 4, 3"),
        (some(2, 1, head_dim=8), "got keys of (2, 2, 8"),
        (some(2, 1, torch.bfloat16), "'bfloat16'"),
        (some(2, 1, torch.float64), "torch.float64"),
        ([(torch.ones(2, 2, 1, 3), torch.ones(2, 2, 1, 4))], "one shape"),
        ([(torch.ones(2, 2, 1, 3), torch.ones(2, 2, 2, 3))], "one shape"),
        ([(torch.ones(2, 2, 3), torch.ones(2, 2, 3))], "one shape"),
        ([(torch.ones(2, 2, 1, 3), torch.ones(2, 2, 1, 3).half())], "torch.float16"),
        ([(torch.ones(2, 2, 1, 3, dtype=torch.int64),) * 2], "torch.int64"),
        ([(torch.ones(2, 2, 1, 3, device="meta"),) * 2], "meta"),
    ],
    ids=lambda what: what if isinstance(what, str) else "",
)
def test_another_batch_model_or_dtype_is_refused_before_anything_changes(new, what):
    cache = paged()
    feed(cache, some(2, 5))
    before = state(cache)
    with pytest.raises(ValueError) as refusal:
        feed(cache, new)
    assert what in str(refusal.value)
    assert_unchanged(before, state(cache))
    feed(cache, some(2, 1))


@pytest.mark.parametrize("batch", [1, 4])
def test_beams_beyond_the_pool_are_refused_before_anything_changes(batch):
    cache = paged(num_blocks=4)
    if batch == 1:
        feed(cache, some(1, 14))
    before = state(cache)
    with pytest.raises(PoolExhausted) as refusal:
        feed(cache, some(batch, 5))
    assert "its 4 blocks of 4, or fewer rows" in refusal.value.__notes__[0]
    assert f"{batch} rows" in refusal.value.__notes__[0]
    assert_unchanged((*before[:-1], {}), state(cache))
    feed(
        cache, some(1 if batch == 1 else 2, 2)
    )  # what fits goes on, with another batch too if nothing was stored


def test_a_copy_that_does_not_fit_is_refused():
    cache = paged(num_blocks=2)
    feed(cache, some(1, 6))
    cache.batch_repeat_interleave(3)
    before = state(cache)
    with pytest.raises(PoolExhausted):
        feed(cache, some(3, 1))
    assert_unchanged(before, state(cache))


def test_a_model_with_more_layers_is_refused():
    cache = paged()
    feed(cache, some(2, 5))
    with pytest.raises(ValueError, match="made for 2"):
        cache.update(*some(2, 1)[0], LAYERS)


def test_a_model_with_fewer_layers_or_a_broken_pass_is_seen_and_can_be_cropped_away():
    mine, theirs = both()
    assert_same(mine, theirs, some(2, 5))
    mine.update(*some(2, 1)[0], 0)  # and then nothing
    before = state(mine)
    with pytest.raises(ValueError, match=r"layer 1 holds 5 tokens, others 6: .*crop\(-1\)"):
        mine.update(*some(2, 1)[0], 0)
    assert_unchanged(before, state(mine))
    mine.crop(-1)
    assert_same(mine, theirs, some(2, 2))


def test_layers_of_one_pass_get_equally_many_tokens():
    cache = paged()
    keys, values = some(2, 2)[0]
    cache.update(keys, values, 0)
    for wrong in (
        (keys[:, :, :1], values[:, :, :1]),
        (keys[:1], values[:1]),
        (keys.half(), values.half()),
        (keys, values[:, :1]),
    ):
        with pytest.raises(ValueError, match="layer 1 got"):
            cache.update(*wrong, 1)
    cache.update(keys, values, 1)
    assert cache.get_seq_length(1) == 2


@pytest.mark.parametrize("index", [[0, 2], [0, -3]])
def test_rows_that_are_not_there_are_refused(index):
    cache = paged()
    feed(cache, some(2, 5))
    before = state(cache)
    with pytest.raises(ValueError, match="rows are 0 … 1"):
        cache.reorder_cache(torch.tensor(index))
    assert_unchanged(before, state(cache))


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (transformers.T5Config(), "T5Config is an encoder and a decoder"),
        (transformers.MambaConfig(), "MambaConfig"),
        (transformers.Qwen3NextConfig(), "linear_attention"),
        (transformers.Gemma3nTextConfig(), "keys of others"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_without_keys_and_values_of_their_own_are_refused(config, what):
    with pytest.raises(ValueError, match=what):
        PagedCache(config, 8)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4), (2.5, 4), ("8", 4)])
def test_a_pool_that_cannot_be_is_refused(num_blocks, block_size):
    with pytest.raises(ValueError, match="must be"):
        PagedCache(CONFIG, num_blocks, block_size)


def without(name):
    kept = {n: getattr(transformers.cache_utils, n) for n in ("Cache", "CacheLayerMixin") if n != name}
    return types.SimpleNamespace(**kept)


class NoLayers:
    def __init__(self, layer_classes=None):
        pass


@pytest.mark.parametrize(
    "old",
    [
        without("Cache"),
        without("CacheLayerMixin"),
        types.SimpleNamespace(Cache=NoLayers, CacheLayerMixin=object),
    ],
    ids=["no Cache", "no layers", "other arguments"],
)
def test_a_transformers_without_cache_layers_says_so(old):
    with pytest.raises(
        ImportError, match=r"transformers 4\.44\.0 has no Cache\(layers=…\).*pagedkv\[transformers\]"
    ):
        ours._require_layers(old, "4.44.0")
    ours._require_layers()


def test_without_the_extra_the_import_says_which_to_install():
    code = "import sys; sys.modules['torch'] = None; import pagedkv.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 'pip install "pagedkv[transformers]"' in done.stderr.splitlines()[-1]
