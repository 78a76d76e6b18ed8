"""Logical to physical: slots, padded and CSR tables, versions."""

import numpy as np
import pytest
from pools import check_unused_rows

from pagedkv import BlockTables, slots_of


def test_a_slot_is_block_times_size_plus_offset():
    """The next token after 7 goes to position 7: the second block's slot 3."""
    assert slots_of([5, 2], [0, 3, 4, 7], 4).tolist() == [20, 23, 8, 11]
    assert slots_of([5, 2], [7], 4).dtype == np.int32


@pytest.mark.parametrize(
    "table, positions, block_size, says",
    [
        ([5, 2], [8], 4, "position 8 is outside a table of 2 blocks of 4"),
        ([5, 2], [-1], 4, "position -1"),
        ([], [0], 4, "position 0"),
        ([5, -1], [0, 5], 4, "position 5 has no block"),
        ([5, 2], [1.5], 4, "1.5"),
        ([5, 2], [1.0], 4, "1.0"),
        ([5, 2], ["1"], 4, "'1'"),
        ([5, 2], [True], 4, "True"),
        ([5.0, 2.0], [1], 4, "5.0"),
        ([5, 2], [1], 0, "block_size .* got 0"),
        ([5, 2], [1], 2.5, "block_size .* got 2.5"),
    ],
)
def test_positions_without_a_slot_are_named(table, positions, block_size, says):
    with pytest.raises(ValueError, match=says):
        slots_of(table, positions, block_size)


@pytest.mark.parametrize("number", [0, -1, 2.5, "4", True, None])
def test_a_block_has_a_whole_number_of_slots(number):
    with pytest.raises(ValueError, match=f"block_size must be a whole number of at least 1, got {number!r}"):
        BlockTables(number)


@pytest.mark.parametrize("number", [0, -1, 2.5, "4", True])
def test_the_longest_length_is_a_whole_number(number):
    with pytest.raises(ValueError, match=f"max_length .* got {number!r}"):
        BlockTables(4, max_length=number)


def filled_tables():
    """a: 9 tokens in [7, 3, 5]; b: none; c: 4 tokens in [7]."""
    tables = BlockTables(4)
    for seq, entries, length in (("a", [7, 3, 5], 9), ("b", [], 0), ("c", [7], 4)):
        tables.put(tables.add(seq), np.array(entries, np.int32), length)
    return tables


def test_padded_and_csr_tables_say_the_same():
    tables = filled_tables()
    rows = tables.rows(["c", "b", "a"])
    assert tables.padded(rows).tolist() == [[7, -1, -1], [-1, -1, -1], [7, 3, 5]]
    indptr, indices = tables.csr(rows)
    assert indptr.tolist() == [0, 1, 1, 4] and indices.tolist() == [7, 7, 3, 5]
    assert {tables.padded(rows).dtype, indptr.dtype, indices.dtype} == {np.dtype(np.int32)}


def test_an_empty_batch_has_empty_tables():
    tables = filled_tables()
    rows = tables.rows([])
    assert tables.padded(rows).shape == (0, 0)
    indptr, indices = tables.csr(rows)
    assert indptr.tolist() == [0] and indices.tolist() == []


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_a_table_has_as_many_entries_as_its_length_needs(block_size):
    tables = BlockTables(block_size)
    bs = block_size
    for length in sorted({0, 1, bs - 1, bs, bs + 1, 2 * bs - 1, 2 * bs, 2 * bs + 1}):
        row = tables.add(length)
        entries = np.arange(-(-length // bs), dtype=np.int32)
        tables.put(row, entries, length)
        assert tables.entries(row).tolist() == entries.tolist()
        positions = np.arange(length)
        assert tables.slots(np.array([row]), np.array([0]), np.array([length])).tolist() == positions.tolist()
    check_unused_rows(tables)


def test_unknown_ids_are_named_not_their_neighbours():
    tables = filled_tables()
    for unknown in ("d", 0, 2.5, None, ("a",), [1]):
        with pytest.raises(KeyError, match="never added, or freed already") as caught:
            tables.rows(["a", unknown, "e"])
        assert repr(unknown) in str(caught.value)


def test_a_vacant_row_is_used_again_and_clean():
    tables = filled_tables()
    row = int(tables.rows(["a"])[0])
    tables.remove("a")
    assert "a" not in tables and len(tables) == 2 and list(tables) == ["b", "c"]
    assert tables.add("d") == row
    assert tables.length(row) == 0 and tables.entries(row).tolist() == []
    check_unused_rows(tables)


def test_rows_and_columns_grow_with_need():
    tables = BlockTables(1)
    for seq in range(50):
        tables.put(tables.add(seq), np.arange(seq, dtype=np.int32), seq)
    assert [tables.entries(int(row)).tolist() for row in tables.rows(range(50))] == [
        list(range(seq)) for seq in range(50)
    ]
    check_unused_rows(tables)


def test_a_version_never_comes_back():
    tables = filled_tables()
    seen = tables.version(tables.rows(["a", "b", "c"])).tolist()
    tables.remove("a")
    tables.add("a")
    tables.put(int(tables.rows(["b"])[0]), np.array([1], np.int32), 1)
    after = tables.version(tables.rows(["a", "b", "c"])).tolist()
    assert after[2] == seen[2] and not set(after[:2]) & set(seen)


def test_what_is_read_can_be_changed_without_harm():
    tables = filled_tables()
    rows = tables.rows(["a"])
    for array in (tables.entries(rows[0]), tables.owned(rows[0]), tables.padded(rows), tables.length(rows)):
        array[:] = 99
    assert tables.entries(rows[0]).tolist() == [7, 3, 5] and tables.length(rows).tolist() == [9]


def test_a_name_that_moves_to_another_row_does_not_meet_its_old_version():
    """An old plan of "a" must not pass for one of the new "a"."""
    tables, nothing = BlockTables(4), np.zeros(0, np.int32)
    row = tables.add("a")
    tables.add("b")
    seen = set()
    for _ in range(4):
        tables.put(row, nothing, 0)
        seen.add(int(tables.version(np.array([row]))[0]))
    tables.remove("a"), tables.remove("b")
    other = tables.add("a")
    assert other != row
    for _ in range(4):
        assert int(tables.version(np.array([other]))[0]) not in seen
        tables.put(other, nothing, 0)
