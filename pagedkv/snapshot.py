"""Sequences as plain arrays: what moves between pools, into files and out of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from .allocator import whole_numbers
from .block_table import NOTHING, SeqId
from .prefix_cache import DIGEST_SIZE, TOKEN, Link, PrefixIndex, Text, token_bytes


@dataclass(frozen=True)
class Snapshot:
    """Sequences as plain arrays: what is needed to build them again, here or elsewhere.

    What is known of their texts may be missing as a whole: then nothing of them is committed. `checked_tables`
    and `texts` read it for a pool, and refuse what no pool has.
    """

    block_size: int
    seq_ids: tuple[SeqId, ...]
    indptr: np.ndarray  # int32 [batch + 1]
    indices: np.ndarray  # int32 [entries]   −1 where a sliding window left a block behind
    lengths: np.ndarray  # int64 [batch]
    versions: np.ndarray | None = None  # int64 [batch]  in the pool that it was taken from
    roots: np.ndarray | None = None  # uint8 [batch, 32]  where each chain of digests begins
    committed: np.ndarray | None = None  # int64 [batch]  tokens that are final
    prompts: np.ndarray | None = None  # int64 [batch]  tokens that were announced
    token_indptr: np.ndarray | None = None  # int64 [batch + 1]
    tokens: np.ndarray | None = None  # int64 [known tokens]  committed, then announced ones
    digest_indptr: np.ndarray | None = None  # int64 [batch + 1]
    digests: np.ndarray | None = None  # uint8 [known digests, 32]  of the full committed blocks

    def checked_tables(
        self, block_size: int, max_length: int | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """indptr, indices and lengths as new int64 arrays; ValueError if they are not the tables of a pool."""
        if self.block_size != block_size:
            raise ValueError(f"the snapshot has blocks of {self.block_size!r}, this pool {block_size}")
        indptr = whole_numbers("indptr", self.indptr)
        indices = whole_numbers("indices", self.indices)
        lengths = whole_numbers("lengths", self.lengths)
        batch = len(self.seq_ids)
        if indptr.shape != (batch + 1,) or lengths.shape != (batch,):
            raise ValueError(f"{batch} sequences need {batch + 1} numbers in indptr and {batch} lengths")
        if indices.ndim != 1:
            raise ValueError(f"indices must be one row of block ids, got the shape {indices.shape}")
        if indptr[0] != 0 or indptr[-1] != len(indices) or (np.diff(indptr) < 0).any():
            raise ValueError(f"indptr must rise from 0 to {len(indices)}, got {indptr.tolist()}")
        for seq_id, start, stop, length in zip(self.seq_ids, indptr, indptr[1:], lengths, strict=False):
            table = indices[start:stop]
            if length < 0 or stop - start != -(-length // block_size):
                raise ValueError(f"sequence {seq_id!r} has {stop - start} pages for {length} tokens")
            if max_length is not None and length > max_length:
                raise ValueError(f"sequence {seq_id!r} has {length} tokens, max_length is {max_length}")
            if not _is_table(table, length // block_size):
                raise ValueError(f"sequence {seq_id!r} has an impossible table {table.tolist()}")
        return indptr, indices, lengths

    def texts(self, root: Link, index: PrefixIndex) -> list[Text]:
        """What is known of each text; `root` is where the chains begin if nothing is.

        Raises: ValueError for arrays that do not fit each other, and for digests that are not those of the tokens.
        """
        arrays = {name: getattr(self, name) for name in TEXT_ARRAYS}
        missing = [name for name, array in arrays.items() if array is None]
        if len(missing) == len(arrays):
            return [Text(root) for _ in self.seq_ids]
        if missing:
            raise ValueError(f"the snapshot has no {', '.join(missing)}")
        batch = len(self.seq_ids)
        roots, digests = (_digests(name, arrays[name]) for name in ("roots", "digests"))
        committed, prompts = (whole_numbers(name, arrays[name]) for name in ("committed", "prompts"))
        if len(roots) != batch or committed.shape != (batch,) or prompts.shape != (batch,):
            raise ValueError(f"{batch} sequences need as many roots, committed and prompts")
        tokens = _pieces(token_bytes("tokens", arrays["tokens"]), self.token_indptr, batch, TOKEN.itemsize)
        digests = _pieces(digests, self.digest_indptr, batch, 1)
        texts = []
        for *known, length in zip(
            roots, tokens, digests, committed.tolist(), prompts.tolist(), self.lengths, strict=True
        ):
            try:
                texts.append(_text(*known, int(length), self.block_size, index))
            except ValueError as error:
                raise ValueError(f"sequence {self.seq_ids[len(texts)]!r}: {error}") from None
        self._check_shared_blocks(texts)
        return texts

    def _check_shared_blocks(self, texts: list[Text]) -> None:
        """ValueError for a block that belongs to two texts which say different things about it."""
        said: dict[int, bytes] = {}
        for seq_id, text, first in zip(self.seq_ids, texts, self.indptr, strict=False):
            for block, link in zip(self.indices[int(first) :], text.links(), strict=False):
                if block != NOTHING and said.setdefault(int(block), link.digest) != link.digest:
                    raise ValueError(f"sequence {seq_id!r}: another text shares its block {block}")


TEXT_ARRAYS = ("roots", "committed", "prompts", "token_indptr", "tokens", "digest_indptr", "digests")


def packed_texts(texts: Sequence[Text], block_size: int) -> dict[str, np.ndarray]:
    """Texts as plain arrays: their tokens and digests stand end to end, as blocks do in CSR tables."""
    tokens, digests = [], []
    for text in texts:
        links = text.links()
        digests.append([link.digest for link in links])
        if text.prompt is None:
            digests[-1] += text.digests[text.committed // block_size :]
            tokens.append(b"")
        else:
            tokens.append(b"".join(link.tokens for link in links) + text.rest + text.due(text.prompt_length))
    return {
        "roots": _digest_rows([text.root.digest for text in texts]),
        "committed": np.array([text.committed for text in texts], np.int64),
        "prompts": np.array([text.prompt_length for text in texts], np.int64),
        "token_indptr": _indptr([len(row) // TOKEN.itemsize for row in tokens]),
        "tokens": np.frombuffer(b"".join(tokens), TOKEN).astype(np.int64),
        "digest_indptr": _indptr([len(row) for row in digests]),
        "digests": _digest_rows([digest for row in digests for digest in row]),
    }


def _text(root, tokens, digests, committed, prompt, length, block_size, index) -> Text:
    """One text from its packed parts, or ValueError."""
    text = Text(Link(None, root, None))
    if not 0 <= committed <= length or prompt < 0:
        raise ValueError(f"{committed} of {length} tokens cannot be committed, nor {prompt} announced")
    if digests and not tokens:
        if len(digests) != max(committed, prompt) // block_size or committed % block_size:
            raise ValueError(f"{len(digests)} digests do not fit {max(committed, prompt)} tokens")
        text.announce_hashes(digests[: prompt // block_size], prompt, block_size)
        plan = text.goes_on_by(digests[: committed // block_size], committed, block_size)
    else:
        if len(tokens) != max(committed, prompt) * TOKEN.itemsize:
            raise ValueError(f"{len(tokens) // TOKEN.itemsize} tokens are not {max(committed, prompt)}")
        text.announce(tokens[: prompt * TOKEN.itemsize], block_size, hashed=True)
        plan = text.goes_on(tokens[: committed * TOKEN.itemsize], committed, block_size)
        if digests != [digest for digest, _ in plan.filled]:
            raise ValueError("its digests are not those of its tokens")
    index.carry_out(plan)
    return text


def _is_table(entries: np.ndarray, full: int) -> bool:
    """No block twice, and blocks left behind only in front and never the unfilled one."""
    left = min(np.count_nonzero(entries == NOTHING), full)
    blocks = entries[left:].tolist()
    return (
        (entries[:left] == NOTHING).all() and min(blocks, default=0) >= 0 and len(set(blocks)) == len(blocks)
    )


def _indptr(counts: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _digest_rows(digests: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_SIZE)


def _digests(name: str, rows: np.ndarray) -> list[bytes]:
    rows = np.asarray(rows)
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != DIGEST_SIZE:
        raise ValueError(f"{name} must be uint8 (n, {DIGEST_SIZE}), got {rows.dtype} {rows.shape}")
    return [row.tobytes() for row in rows]


def _pieces(flat: bytes | list, indptr: ArrayLike, batch: int, size: int) -> list:
    """One piece of `flat` per sequence; an item of it is `size` long."""
    indptr = whole_numbers("indptr", indptr)
    ends = (0, len(flat) // size)
    if indptr.shape != (batch + 1,) or (indptr[0], indptr[-1]) != ends or (np.diff(indptr) < 0).any():
        raise ValueError(f"{batch + 1} numbers must rise from 0 to {ends[1]}, got {indptr.tolist()}")
    return [flat[a * size : b * size] for a, b in zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)]
