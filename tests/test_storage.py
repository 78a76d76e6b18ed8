"""The page arrays: scatter, gather, copies, pages, types."""

import numpy as np
import pytest
from needs import need_module
from pools import HEAD_DIM, HEADS, LAYERS, vectors

from pagedkv import KVStorage
from pagedkv.tiles import Workspace

DTYPES = ["float32", "float16"]


def new_storage(num_blocks=4, block_size=4, dtype="float32", **options):
    return KVStorage(LAYERS, num_blocks, block_size, HEADS, HEAD_DIM, dtype, poison=True, **options)


def contents(storage):
    return {name: array.tobytes() for name, array in storage.arrays.items()}


def holds_nan(storage, block, offset):
    """Whether one slot holds NaN in all layers, keys and values; mixed is an error."""
    nan = np.array([np.isnan(array[:, block, offset]) for array in storage.arrays.values()])
    assert nan.all() or not nan.any()
    return bool(nan.all())


def fill(storage, slots):
    """Write token s to slot s in every layer."""
    for layer in range(LAYERS):
        storage.write(layer, slots, *vectors(layer, slots))


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_have_the_promised_shape_and_begin_poisoned(dtype):
    storage = new_storage(5, 3, dtype)
    assert list(storage.arrays) == ["keys", "values"]
    for array in storage.arrays.values():
        assert array.shape == (LAYERS, 5, 3, HEADS, HEAD_DIM) and array.dtype == dtype
        assert np.isnan(array).all()
    assert storage.nbytes == 2 * LAYERS * 5 * 3 * HEADS * HEAD_DIM * np.dtype(dtype).itemsize


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_pages_and_the_memory_they_are_copied_to_begin_at_a_multiple_of_64_bytes(dtype):
    workspace = Workspace()
    for size in (1, 3, 1000, 1 << 16):  # NumPy's own arrays begin at any multiple of 16
        arrays = [
            *new_storage(num_blocks=size, dtype=dtype).arrays.values(),
            workspace.array("pages", (size, 3)),
        ]
        assert [array.ctypes.data % 64 for array in arrays] == [0] * len(arrays)


@pytest.mark.parametrize("num_blocks", [10**9, 10**16])
def test_a_pool_that_does_not_fit_into_memory_is_refused_with_its_shape(num_blocks):
    with pytest.raises(MemoryError, match=f"no memory.*{num_blocks}, 16, 8, 128"):
        KVStorage(80, num_blocks, 16, 8, 128)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_what_is_written_is_read_in_any_order(block_size, dtype):
    storage = new_storage(4, block_size, dtype)
    slots = np.random.default_rng(0).permutation(4 * block_size)
    fill(storage, slots)
    for layer in range(LAYERS):
        for asked in (slots, slots[::-1], slots[:0], [slots[0]] * 3):
            keys, values = storage.read(layer, asked)
            expected = vectors(layer, asked)
            assert keys.dtype == values.dtype == np.float32
            assert np.array_equal(keys, expected[0]) and np.array_equal(values, expected[1])


def test_a_write_touches_its_slots_and_layer_only():
    storage = new_storage()
    storage.write(1, [6], *vectors(1, [6]))
    for array in storage.arrays.values():
        assert np.isnan(array[0]).all()
        assert np.flatnonzero(~np.isnan(array[1]).all(axis=(-1, -2)).ravel()).tolist() == [6]


@pytest.mark.parametrize("filled", [0, 1, 3, 4])
def test_a_copy_takes_the_filled_slots_of_all_layers_and_no_others(filled):
    storage = new_storage()
    fill(storage, [0, 1, 2, 3])
    storage.copy_blocks([[0, 2, filled]])
    for offset in range(4):
        assert holds_nan(storage, 2, offset) == (offset >= filled)
    for array in storage.arrays.values():
        assert np.array_equal(array[:, 2, :filled], array[:, 0, :filled])


def test_a_copy_without_a_count_takes_whole_blocks_from_another_storage():
    source, target = new_storage(), new_storage(2)
    fill(source, [12, 13])
    target.copy_blocks([[3, 1]], source)
    for name, array in target.arrays.items():
        assert np.array_equal(array[:, 1], source.arrays[name][:, 3], equal_nan=True)
        assert np.isnan(array[:, 0]).all()


@pytest.mark.parametrize(
    "copies, says",
    [
        ([[0, 4, 1]], "block 4"),
        ([[4, 0, 1]], "block 4"),
        ([[-1, 0, 1]], "block -1"),
        ([[0, 1, 5]], "filled slot count 5"),
        ([[0, 1, -1]], "filled slot count -1"),
        ([[0, 1, 2], [0, 9, 2]], "block 9"),
        ([[0, 1, 2.0]], "2.0"),
        ([0, 1, 2], r"\(3,\)"),
        ([[0]], r"\(1, 1\)"),
    ],
)
def test_copies_out_of_range_copy_nothing(copies, says):
    storage = new_storage()
    fill(storage, range(8))
    before = contents(storage)
    with pytest.raises(ValueError, match=says):
        storage.copy_blocks(copies)
    assert contents(storage) == before


@pytest.mark.parametrize(
    "other",
    [
        KVStorage(LAYERS + 1, 4, 4, HEADS, HEAD_DIM),
        KVStorage(LAYERS, 4, 8, HEADS, HEAD_DIM),
        KVStorage(LAYERS, 4, 4, HEADS + 1, HEAD_DIM),
        KVStorage(LAYERS, 4, 4, HEADS, HEAD_DIM + 1),
        KVStorage(LAYERS, 4, 4, HEADS, HEAD_DIM, "float16"),
    ],
    ids=["layers", "block_size", "heads", "head_dim", "dtype"],
)
def test_pages_of_another_shape_or_type_are_refused(other):
    storage = new_storage()
    before = contents(storage)
    with pytest.raises(ValueError, match="pages of the source"):
        storage.copy_blocks([[0, 0]], other)
    with pytest.raises(ValueError, match="of a page is"):
        storage.set_page(0, other.page(0))
    assert contents(storage) == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_page_moves_byte_for_byte(dtype):
    storage = new_storage(dtype=dtype)
    fill(storage, [5, 6])
    page = storage.page(1)
    before = {name: array.tobytes() for name, array in page.items()}
    storage.poison([1])
    assert {name: array.tobytes() for name, array in page.items()} == before, "a page is a copy"
    storage.set_page(3, page)
    assert {name: array.tobytes() for name, array in storage.page(3).items()} == before


@pytest.mark.parametrize(
    "block, page, says",
    [
        (4, None, "block 4"),
        (-1, None, "block -1"),
        (1.0, None, "1.0"),
        (0, {}, r"\['keys', 'values'\], got \[\]"),
        (0, {"keys": 0}, r"got \['keys'\]"),
        (0, {"keys": 0, "values": 0}, "keys of a page is float32"),
    ],
)
def test_a_page_that_does_not_fit_changes_nothing(block, page, says):
    storage = new_storage()
    before = contents(storage)
    with pytest.raises(ValueError, match=says):
        storage.set_page(block, storage.page(0) if page is None else page)
    assert contents(storage) == before


def test_a_wrong_value_array_does_not_leave_half_a_page():
    storage = new_storage()
    before = contents(storage)
    page = {"keys": np.zeros_like(storage.page(0)["keys"]), "values": np.zeros(3, np.float32)}
    with pytest.raises(ValueError, match="values of a page"):
        storage.set_page(0, page)
    assert contents(storage) == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_storages_over_one_buffer_see_the_same_pages(dtype):
    memory = bytearray(new_storage(dtype=dtype).nbytes)
    first = new_storage(dtype=dtype, buffer=memory)
    second = KVStorage(LAYERS, 4, 4, HEADS, HEAD_DIM, dtype, buffer=memory)  # opens what is there
    fill(first, range(16))
    for layer in range(LAYERS):
        assert np.array_equal(second.read(layer, range(16)), vectors(layer, range(16)))


@pytest.mark.parametrize("buffer", [bytearray(new_storage().nbytes - 1), bytes(new_storage().nbytes), b"", 5])
def test_a_buffer_must_be_large_enough_and_writable(buffer):
    with pytest.raises(ValueError, match="buffer must be"):
        new_storage(buffer=buffer)


def wrong(shape, dtype=np.float32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    "keys, says",
    [
        (wrong((1, HEADS, HEAD_DIM)), r"shape \(2, 2, 2\), got \(1, 2, 2\)"),
        (wrong((2, HEADS + 1, HEAD_DIM)), r"got \(2, 3, 2\)"),
        (wrong((2, HEADS, HEAD_DIM + 1)), r"got \(2, 2, 3\)"),
        (wrong((2, HEADS * HEAD_DIM)), r"got \(2, 4\)"),
        (wrong((2, HEADS, HEAD_DIM), int), "floating point, got int64"),
        (wrong((2, HEADS, HEAD_DIM), complex), "floating point, got complex128"),
        (wrong((2, HEADS, HEAD_DIM), object), "floating point, got object"),
        (wrong((2, HEADS, HEAD_DIM), bool), "floating point, got bool"),
        (None, r"got \(\)"),
    ],
)
@pytest.mark.parametrize("swapped", [False, True], ids=["keys", "values"])
def test_wrong_shapes_and_types_write_nothing(keys, says, swapped):
    storage = new_storage()
    before, right = contents(storage), wrong((2, HEADS, HEAD_DIM))
    with pytest.raises(ValueError, match=f"{'values' if swapped else 'keys'} must .*{says}"):
        storage.write(0, [0, 1], *((right, keys) if swapped else (keys, right)))
    assert contents(storage) == before


@pytest.mark.parametrize("slots", [[0, 16], [-1, 0], [0.0, 1.0], ["0", "1"], [True, False], [None, 0]])
def test_slots_that_are_none_write_nothing(slots):
    storage = new_storage()
    before, right = contents(storage), wrong((2, HEADS, HEAD_DIM))
    with pytest.raises(ValueError, match="slot"):
        storage.write(0, slots, right, right)
    with pytest.raises(ValueError, match="slot"):
        storage.read(0, slots)
    assert contents(storage) == before


@pytest.mark.parametrize("layer", [-1, LAYERS, 0.0, "0", True, None])
def test_there_is_no_such_layer(layer):
    storage = new_storage()
    with pytest.raises(ValueError, match="layer"):
        storage.read(layer, [0])
    with pytest.raises(ValueError, match="layer"):
        storage.write(layer, [0], *vectors(0, [0]))


@pytest.mark.parametrize("number", [0, -1, 2.5, "4", True])
@pytest.mark.parametrize("name", ["num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim"])
def test_sizes_are_whole_numbers_of_at_least_one(name, number):
    sizes = {"num_layers": 1, "num_blocks": 1, "block_size": 1, "num_kv_heads": 1, "head_dim": 1}
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got {number!r}"):
        KVStorage(**{**sizes, name: number})


@pytest.mark.parametrize("dtype", ["float64", "int8x", "f4", np.int32, None, 3])
def test_unknown_types_are_named_with_the_known_ones(dtype):
    with pytest.raises(ValueError, match="dtype must be one of float32, float16, bfloat16, int8, got"):
        KVStorage(1, 1, 1, 1, 1, dtype)


@pytest.mark.parametrize("given", [np.float32, np.float64])
def test_what_float16_cannot_hold_is_refused_not_stored_as_infinity(given):
    storage = new_storage(dtype="float16")
    before, keys = contents(storage), np.ones((1, HEADS, HEAD_DIM), given)
    storage.encode(keys * 65504, keys, (1,))
    for values in (keys * 70000, keys * -70000):
        with pytest.raises(ValueError, match="values holds 70000: float16 ends at 65504"):
            storage.write(0, [0], keys, values)
    assert contents(storage) == before


def test_infinity_that_was_given_is_kept():
    storage = new_storage(dtype="float16")
    keys = np.full((1, HEADS, HEAD_DIM), np.inf, np.float32)
    storage.write(0, [0], keys, -keys)
    assert np.array_equal(storage.read(0, [0]), [keys, -keys])


# bfloat16: kept as uint16, rounded to the nearest


def stored_bits(numbers):
    storage = KVStorage(1, 1, 1, 1, len(numbers), "bfloat16")
    storage.write(0, [0], numbers[None, None], numbers[None, None])
    assert np.array_equal(storage.arrays["keys"], storage.arrays["values"])
    return storage.arrays["keys"].ravel().tolist()


@pytest.mark.parametrize(
    "given, bits",
    [
        (0x3F800000, 0x3F80),  # 1
        (0x3F808000, 0x3F80),  # half way: to the even one below
        (0x3F818000, 0x3F82),  # half way: to the even one above
        (0x3F808001, 0x3F81),
        (0x3F807FFF, 0x3F80),
        (0xBF818000, 0xBF82),
        (0x80000000, 0x8000),  # −0
        (0x00000001, 0x0000),
        (0x0000C000, 0x0001),  # subnormal
        (0x7F7F7FFF, 0x7F7F),  # the largest
        (0x7F800000, 0x7F80),  # infinity that was given
        (0xFF800000, 0xFF80),
    ],
)
def test_bfloat16_rounds_to_the_nearest_and_ties_to_even(given, bits):
    assert stored_bits(np.array([given], np.uint32).view(np.float32)) == [bits]


@pytest.mark.parametrize("given", [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0xFF80FFFF])
def test_nan_stays_nan_in_bfloat16(given):
    (bits,) = stored_bits(np.array([given], np.uint32).view(np.float32))
    assert bits & 0x7F80 == 0x7F80 and bits & 0x7F


@pytest.mark.parametrize("sign", [1, -1])
def test_float64_is_rounded_once_on_its_way_to_bfloat16(sign):
    """A little above and below half way between 1 and the next: float32 would see exactly half way."""
    half, hair = 1 + 2.0**-8, 2.0**-40
    assert stored_bits(sign * np.array([half + hair, half, half - hair]))[0:] == [
        bits | (0x8000 if sign < 0 else 0) for bits in (0x3F81, 0x3F80, 0x3F80)
    ]
    odd = 1 + 3 * 2.0**-8  # half way between 0x3F81 and 0x3F82
    assert stored_bits(sign * np.array([odd - hair, odd])) == [
        bits | (0x8000 if sign < 0 else 0) for bits in (0x3F81, 0x3F82)
    ]


def test_bfloat16_agrees_with_ml_dtypes_on_random_bits():
    ml_dtypes = need_module("ml_dtypes", "onnx")
    numbers = np.random.default_rng(3).integers(0, 2**32, 20000, np.uint64).astype(np.uint32).view(np.float32)
    numbers = numbers[np.isfinite(numbers) & (np.abs(numbers) < 3.38e38)]
    theirs = numbers.astype(ml_dtypes.bfloat16)
    assert stored_bits(numbers) == theirs.view(np.uint16).tolist()
    storage = KVStorage(1, 1, 1, 1, len(numbers), ml_dtypes.bfloat16)
    assert storage.dtype == "bfloat16"
    storage.write(0, [0], theirs[None, None], theirs[None, None])
    assert np.array_equal(storage.read(0, [0])[0].ravel(), theirs.astype(np.float32))
    plain = KVStorage(1, 1, 1, 1, len(numbers))
    plain.write(0, [0], theirs[None, None], theirs[None, None])
    assert np.array_equal(plain.read(0, [0])[1].ravel(), theirs.astype(np.float32))


def test_what_bfloat16_cannot_hold_is_refused():
    storage, keys = new_storage(dtype="bfloat16"), np.ones((1, HEADS, HEAD_DIM))
    before = contents(storage)
    storage.encode(keys * 3.3895e38, keys, (1,))
    for values in (keys * 3.3999e38, keys * -1e300):
        with pytest.raises(ValueError, match=r"values holds .*: bfloat16 ends at 3\.38953e\+38"):
            storage.write(0, [0], keys, values)
    assert contents(storage) == before


# int8: a scale for each token and KV head


def test_int8_loses_at_most_half_a_step_of_its_vectors_scale():
    rng = np.random.default_rng(4)
    storage = KVStorage(LAYERS, 4, 4, HEADS, 16, "int8", poison=True)
    sizes = 10.0 ** rng.integers(-20, 20, (16, HEADS, 1))
    keys, values = rng.standard_normal((2, 16, HEADS, 16)) * sizes
    storage.write(1, range(16), keys, values)
    read = storage.read(1, range(16))
    for name, given, found in zip(("key_scales", "value_scales"), (keys, values), read, strict=True):
        scales = storage.arrays[name][1].reshape(16, HEADS)
        np.testing.assert_allclose(scales, np.abs(given).max(axis=-1) / 127, 1e-6)
        assert (np.abs(found - given) <= scales[..., None] * 0.5001).all()
        assert (np.abs(found).max(axis=-1) <= np.abs(given).max(axis=-1) * 1.00001).all()
    assert set(storage.arrays) == {"keys", "values", "key_scales", "value_scales"}
    assert np.abs(storage.arrays["keys"].astype(int)).max() == 127


def test_vectors_of_zeros_are_fine_in_int8():
    storage = new_storage(dtype="int8")
    zeros = np.zeros((1, HEADS, HEAD_DIM))
    storage.write(0, [3], zeros, zeros)
    assert np.array_equal(storage.read(0, [3]), [zeros, zeros])
    storage.write(0, [3], zeros + 1e-45, zeros)  # the scale is no float32 any more
    assert np.isfinite(storage.read(0, [3])).all()


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 1e39])
def test_int8_refuses_what_is_not_finite_by_name(number):
    storage = new_storage(dtype="int8")
    before, keys = contents(storage), np.ones((2, HEADS, HEAD_DIM))
    values = keys.copy()
    values[1, 0, 0] = number
    with pytest.raises(ValueError, match=r"values holds .*int8 keeps finite numbers only"):
        storage.write(0, [0, 1], keys, values)
    assert contents(storage) == before


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_narrow_pages_are_poisoned_copied_and_moved_like_others(dtype):
    storage = new_storage(dtype=dtype)
    assert np.isnan(storage.read(0, range(16))).all()
    fill(storage, range(4))
    found = storage.read(1, range(4))
    storage.copy_blocks([[0, 2, 3]])
    assert np.array_equal(np.stack(storage.read(1, range(8, 11))), np.stack(found)[:, :3])
    assert np.isnan(storage.read(1, [11])).all()
    storage.set_page(3, storage.page(0))
    assert np.array_equal(storage.read(1, range(12, 16)), found)
    storage.poison([3], start=2)
    assert np.isnan(storage.read(1, [14, 15])).all() and np.isfinite(storage.read(1, [12, 13])).all()


@pytest.mark.parametrize("head_dim", [1, 3, 16])
def test_scales_lie_at_whole_numbers_in_any_buffer(head_dim):
    shape = (1, 1, 1, 1, head_dim)
    memory = np.zeros(KVStorage(*shape, "int8").nbytes + 4, np.uint8)
    storage = KVStorage(*shape, "int8", buffer=memory)
    assert storage.nbytes == 2 * (head_dim + 4)
    assert all(array.flags.aligned for array in storage.arrays.values())
    vector = np.full((1, 1, head_dim), 2.0)
    storage.write(0, [0], vector, -vector)
    found = KVStorage(*shape, "int8", buffer=memory).read(0, [0])
    np.testing.assert_allclose(found, [vector, -vector], 1e-6)
