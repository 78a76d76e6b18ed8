"""to_csr against the layout that flashinfer documents: int32 indptr, indices, last_page_len; and back by restore."""

import numpy as np
import pytest

from pagedkv import BlockManager, Snapshot


def csr(pages_of, lengths, page_size):
    """The layout as its documentation says it, one request at a time.

    Request i owns the pages indices[indptr[i] : indptr[i + 1]], in order; all are full but the last, which
    holds last_page_len[i] entries, 1 … page_size. A request without tokens owns no page.
    """
    indptr, indices, last_page_len = [0], [], []
    for pages, length in zip(pages_of, lengths, strict=True):
        indices.extend(pages)
        indptr.append(len(indices))
        last_page_len.append(length - (len(pages) - 1) * page_size if pages else 0)
    return [np.array(numbers, np.int32) for numbers in (indptr, indices, last_page_len)]


def read(data, indptr, indices, last_page_len, request):
    """What a kernel would read for one request from data [pages, page_size]."""
    pages = data[indices[indptr[request] : indptr[request + 1]]]
    kept = max(len(pages) - 1, 0) * data.shape[1] + last_page_len[request]
    return pages.reshape(-1)[:kept]


def grown(page_size, lengths):
    """A manager whose sequences grew in turns, so that their blocks lie mixed; and a plain model of their tables."""
    manager, tables = BlockManager(64, page_size), {i: [] for i in range(len(lengths))}
    for i in tables:
        manager.add(i)
    done, free = [0] * len(lengths), 0
    while done != list(lengths):
        for i, length in enumerate(lengths):
            step = min(3, length - done[i])
            done[i] += step
            manager.extend(i, step)
            need = -(-done[i] // page_size) - len(tables[i])
            tables[i] += range(free, free + need)
            free += need
    return manager, tables


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_tables_have_the_documented_layout(page_size):
    edges = (
        0,
        1,
        page_size - 1,
        page_size,
        page_size + 1,
        2 * page_size - 1,
        2 * page_size,
        2 * page_size + 1,
    )
    lengths = [edge for edge in edges if edge <= 40][:8]
    manager, tables = grown(page_size, lengths)
    order = [*range(len(lengths))][::-1]
    expected = csr([tables[i] for i in order], [lengths[i] for i in order], page_size)
    for ours, want in zip(manager.to_csr(order), expected, strict=True):
        assert ours.dtype == np.int32
        np.testing.assert_array_equal(ours, want)


def test_forks_name_shared_pages_and_an_empty_batch_is_a_zero():
    manager = BlockManager(8, 4)
    manager.add("a")
    manager.extend("a", 6)
    manager.fork("a", ["b"])
    manager.extend("b", 3)
    for ours, want in zip(manager.to_csr(["a", "b"]), csr([[0, 1], [0, 2, 3]], [6, 9], 4), strict=True):
        np.testing.assert_array_equal(ours, want)
    indptr, indices, last_page_len = manager.to_csr([])
    assert (indptr.tolist(), indices.tolist(), last_page_len.tolist()) == ([0], [], [])
    assert {array.dtype for array in (indptr, indices, last_page_len)} == {np.dtype(np.int32)}


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_a_kernel_reads_is_each_sequence_in_order(page_size):
    lengths = [5, 0, 8, 1]
    manager, _ = grown(page_size, lengths)
    data = np.full((64, page_size), -1)
    for i, length in enumerate(lengths):
        positions = np.arange(length)
        table = manager.block_tables([i])[0]
        data[table[positions // page_size], positions % page_size] = 100 * i + positions
    tables = manager.to_csr(range(4))
    for i, length in enumerate(lengths):
        assert read(data, *tables, i).tolist() == [100 * i + p for p in range(length)]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_tables_written_by_the_reference_are_restored_with_their_sharing(page_size):
    pages_of, lengths = [[9, 4, 7], [9, 4, 2], [], [30]], [3 * page_size, 2 * page_size + 1, 0, 1]
    indptr, indices, last_page_len = csr(pages_of, lengths, page_size)
    pages = np.diff(indptr)
    told = np.where(pages > 0, (pages - 1) * page_size + last_page_len, 0)  # as a kernel counts
    snapshot = Snapshot(page_size, ("a", "b", "c", "d"), indptr, indices, told)
    manager = BlockManager(8, page_size)
    pairs = manager.restore(snapshot)
    assert pairs.tolist() == [[9, 0], [4, 1], [7, 2], [2, 3], [30, 4]]
    new = dict(pairs.tolist())
    expected = csr([[new[page] for page in pages] for pages in pages_of], lengths, page_size)
    for ours, want in zip(manager.to_csr(["a", "b", "c", "d"]), expected, strict=True):
        np.testing.assert_array_equal(ours, want)
    assert manager.num_free == 3
