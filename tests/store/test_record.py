"""One page as bytes: what a checksum sees, and that no other page is ever taken for it."""

import zlib

import numpy as np
import pytest

from pagedkv import KVStorage
from pagedkv.storage import FORMATS
from pagedkv.store import DamagedPage, Layout
from pagedkv.store.record import HEADER_BYTES, as_bytes

KEY, OTHER = bytes(range(32)), bytes(32)


def storage(dtype="float32", **shape):
    shape = {"num_layers": 2, "num_blocks": 3, "block_size": 4, "num_kv_heads": 2, "head_dim": 2} | shape
    random, pages = np.random.default_rng(0), KVStorage(*shape.values(), dtype)
    for array in pages.arrays.values():
        array.view(np.uint8)[...] = random.integers(0, 256, array.view(np.uint8).shape)
    return pages


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"123456789", 0xCBF43926),
        (b"", 0),
        (bytes(32), 0x190A55AD),
        (bytes(64), 0x758D6336),
    ],
)
def test_the_checksum_is_the_crc32_that_everybody_knows(data, crc):
    assert zlib.crc32(data) == crc
    assert zlib.crc32(data[5:], zlib.crc32(data[:5])) == crc  # also when fed in two pieces


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_page_comes_back_bit_for_bit_and_with_its_types(dtype):
    pages = storage(dtype)
    layout = Layout.of(pages, "m")
    page = pages.page(1)
    back = layout.unpack(KEY, layout.pack(KEY, page))
    assert list(back) == list(page)
    for name, array in page.items():
        assert back[name].dtype == array.dtype
        assert back[name].tobytes() == array.tobytes()
    pages.set_page(2, back)


def test_a_layout_goes_through_json_unchanged():
    layout = Layout.of(storage("float16"), "m")
    assert Layout.from_json(layout.to_json()) == layout
    assert Layout.from_json(layout.to_json()).digest == layout.digest


def test_the_checksum_in_a_record_is_of_all_its_other_bytes():
    layout = Layout.of(storage())
    record = layout.pack(KEY, storage().page(0))
    assert int.from_bytes(record[4:8], "little") == zlib.crc32(record[:4] + record[8:])
    assert len(record) == HEADER_BYTES + 2 * storage().page(0)["keys"].nbytes


def test_one_record_is_the_same_as_one_of_many():
    pages = storage()
    layout = Layout.of(pages)
    records = np.zeros(3, layout.record)
    for block in range(3):
        for name, array in pages.page(block).items():
            records[name][block] = array
    layout.seal(records, [KEY] * 3)
    assert [data.tobytes() for data in as_bytes(records)] == [
        layout.pack(KEY, pages.page(b)) for b in range(3)
    ]


def test_every_flipped_bit_is_seen():
    layout = Layout.of(storage())
    record = layout.pack(KEY, storage().page(0))
    for bit in range(8 * len(record)):
        damaged = bytearray(record)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedPage):
            layout.unpack(KEY, bytes(damaged))


def test_every_cut_is_seen():
    layout = Layout.of(storage())
    record = layout.pack(KEY, storage().page(0))
    for length in range(len(record)):
        with pytest.raises(DamagedPage):
            layout.unpack(KEY, record[:length])
    with pytest.raises(DamagedPage):
        layout.unpack(KEY, record + b"\0")


@pytest.mark.parametrize(
    ("key", "layout", "reason"),
    [
        (OTHER, Layout.of(storage()), "another page"),
        (KEY, Layout.of(storage(), "other"), "another model"),
        (KEY, Layout.of(storage("float16")), "another model"),
        (KEY, Layout.of(storage(block_size=2)), "another model"),
        (KEY, Layout.of(storage(num_kv_heads=1, head_dim=4)), "another model"),  # of the same length
    ],
)
def test_an_intact_record_of_something_else_is_refused(key, layout, reason):
    record = Layout.of(storage()).pack(KEY, storage().page(0))
    with pytest.raises(DamagedPage, match=reason):
        layout.unpack(key, record)


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(33), "0" * 32, None, 7])
def test_a_key_is_32_bytes(key):
    with pytest.raises(ValueError, match="32 bytes"):
        Layout.of(storage()).pack(key, storage().page(0))


@pytest.mark.parametrize(
    "change",
    [
        lambda page: page.pop("keys"),
        lambda page: page.update(more=page["keys"]),
        lambda page: page.update(keys=page["keys"][:1]),
        lambda page: page.update(keys=page["keys"].astype(np.float64)),
    ],
)
def test_another_page_cannot_be_packed(change):
    page = storage().page(0)
    change(page)
    with pytest.raises(ValueError, match=r"a page has|of a page is"):
        Layout.of(storage()).pack(KEY, page)
