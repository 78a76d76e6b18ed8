"""What a snapshot says beside its pages: layout, block tables, lengths, tokens. JSON under a checksum."""

import dataclasses
import json
import mmap
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..allocator import whole_number
from ..block_table import NOTHING, SeqId, as_ids
from ..manager import BlockManager
from ..snapshot import Snapshot
from .record import KEY_BYTES, Layout, check_key

MAGIC = b"\x89pagedkv-tables\n"  # a reader finds the tables by them, whatever container they stand in
HEAD = struct.Struct(
    "<16sIQQ"
)  # magic, checksum of all that follows, length of the JSON, where the pages begin
CHECKED = 20  # what the checksum covers begins here
VERSION = 1
DIGEST_BYTES = 32  # of the prefix cache, in a Snapshot


class SnapshotError(ValueError):
    """What is on disk is no snapshot, or none that this cache can take; nothing was changed."""


@dataclass(frozen=True)
class Tables:
    """A snapshot without its pages.

    Args: num_blocks: of the pool that was saved; snapshot: its `indices` are page numbers, from 0; tokens: what
        the caller says about the texts; num_pages; stem: what the keys of this snapshot's pages begin with;
        digests: their keys, where they are named by their contents instead.
    """

    layout: Layout
    num_blocks: int
    snapshot: Snapshot
    tokens: dict[SeqId, list[int]]
    num_pages: int
    stem: bytes = b""
    digests: tuple[bytes, ...] | None = None

    def key(self, number: int) -> bytes:
        """The key that page `number` must have."""
        if self.digests is not None:
            return self.digests[number]
        return self.stem + number.to_bytes(KEY_BYTES - len(self.stem), "little")

    def choose(self, seq_ids: SeqId | Iterable[SeqId] | None) -> "Tables":
        """The same for some of the sequences. KeyError names one that was not saved."""
        if seq_ids is None:
            return self
        place = {seq_id: i for i, seq_id in enumerate(self.snapshot.seq_ids)}
        ids = as_ids(seq_ids)
        for seq_id in ids:
            if seq_id not in place:
                raise KeyError(f"sequence {seq_id!r} is not in the snapshot, which has {list(place)}")
        rows = [place[seq_id] for seq_id in ids]
        return replace(self, snapshot=rebuilt(self.snapshot, rows))

    def known_tokens(self) -> dict[SeqId, list[int]]:
        """The tokens of each sequence, as far as anybody said them."""
        s = self.snapshot
        found = {}
        if s.tokens is not None:
            found = {seq_id: part(s.tokens, s.token_indptr, i).tolist() for i, seq_id in enumerate(s.seq_ids)}
        return found | {seq_id: self.tokens[seq_id] for seq_id in s.seq_ids if seq_id in self.tokens}

    # As bytes

    def to_bytes(self, pages_at: int = 0) -> bytes:
        """The tables as they stand in a file; the length does not depend on `pages_at`."""
        fields = {
            "version": VERSION,
            "layout": self.layout.to_json(),
            "num_blocks": self.num_blocks,
            "snapshot": {name: _plain(getattr(self.snapshot, name)) for name in FIELDS},
            "tokens": [[seq_id, tokens] for seq_id, tokens in self.tokens.items()],
            "num_pages": self.num_pages,
            "stem": self.stem.hex(),
            "digests": self.digests and [digest.hex() for digest in self.digests],
        }
        text = json.dumps(fields).encode()
        rest = struct.pack("<QQ", len(text), pages_at) + text
        return struct.pack("<16sI", MAGIC, zlib.crc32(rest)) + rest


def twice(data: bytes) -> bytes:
    """Tables as they stand in a file of their own: so one damaged byte does not cost everything."""
    return data + data


def find_tables(data: bytes | mmap.mmap) -> tuple[Tables, int, list[str]]:
    """The tables in a file that holds them twice, in whatever container.

    Returns: them, where the pages begin, and what is wrong with one of the copies.
    Raises: SnapshotError if both are damaged or of another version, or each says something else.
    """
    found, wrong = [], []
    for at in dict.fromkeys((data.find(MAGIC), data.rfind(MAGIC))):
        try:
            found.append(parse(data, at))
        except SnapshotError as error:
            wrong.append(str(error))
    if not found:
        raise SnapshotError("; ".join(dict.fromkeys(wrong)))
    if len(found) == 2 and found[0] != found[1]:
        raise SnapshotError("its two copies of the tables disagree")
    if len(found) == 1 and not wrong:
        wrong.append("missing")
    text, pages_at = found[0]
    return _understood(text), pages_at, [f"one copy of the tables: {reason}" for reason in wrong]


def parse(data: bytes | mmap.mmap, at: int) -> tuple[bytes, int]:
    """The JSON of the tables at a place, and where the pages begin. SnapshotError if it is damaged."""
    if at < 0:
        raise SnapshotError("there are no tables in it")
    try:
        magic, written, length, pages_at = HEAD.unpack_from(data, at)
    except struct.error:
        raise SnapshotError("the tables are cut off") from None
    end = at + HEAD.size + length
    if magic != MAGIC or end > len(data) or zlib.crc32(data[at + CHECKED : end]) != written:
        raise SnapshotError("the checksum of the tables is wrong")
    return data[at + HEAD.size : end], pages_at


def _understood(text: bytes) -> Tables:
    """The checksum is right, so this is what somebody wrote; it may be nonsense or of another version still."""
    try:
        fields = json.loads(text)
        if fields["version"] != VERSION:
            raise SnapshotError(f"version {fields['version']!r} of the format; known is {VERSION}")
        return _checked(fields)
    except SnapshotError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
        raise SnapshotError(f"the tables make no sense ({type(error).__name__}: {error})") from error


def _checked(fields: dict) -> Tables:
    snapshot = Snapshot(**{name: _unplain(fields["snapshot"][name]) for name in FIELDS})
    snapshot = replace(snapshot, seq_ids=tuple(snapshot.seq_ids))
    num_pages = whole_number("num_pages", fields["num_pages"])
    if snapshot.indices.max(initial=NOTHING) >= num_pages:
        raise ValueError(f"page {snapshot.indices.max()} of {num_pages}")
    # A rehearsal in a pool of its own: whatever no pool can hold is a ValueError.
    BlockManager(max(1, num_pages), snapshot.block_size).restore(snapshot)
    digests = fields["digests"] and tuple(map(bytes.fromhex, fields["digests"]))
    for digest in digests or ():
        check_key(digest)
    if digests is not None and len(digests) != num_pages:
        raise ValueError(f"{len(digests)} digests for {num_pages} pages")
    layout = Layout.from_json(fields["layout"])
    if layout.block_size != snapshot.block_size or not layout.record.itemsize:
        raise ValueError(f"blocks of {layout.block_size} and of {snapshot.block_size}")
    return Tables(
        layout,
        whole_number("num_blocks", fields["num_blocks"], minimum=1),
        snapshot,
        {seq_id: [int(token) for token in tokens] for seq_id, tokens in fields["tokens"]},
        num_pages,
        bytes.fromhex(fields["stem"]),
        digests,
    )


# Every field of a Snapshot but the versions, which mean something only in the pool that it was taken from.
FIELDS = tuple(field.name for field in dataclasses.fields(Snapshot) if field.name != "versions")


def _plain(value):
    """A field as JSON: arrays as {type: numbers}, digests as {"hex": […]}."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == np.uint8:
        return {"hex": [row.tobytes().hex() for row in value]}
    return {value.dtype.name: value.tolist()}


def _unplain(value):
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind == "hex":
        return np.frombuffer(bytes.fromhex("".join(items)), np.uint8).reshape(-1, DIGEST_BYTES)
    if kind not in ("int32", "int64"):
        raise ValueError(f"an array of {kind!r}")
    return np.array(items, kind).reshape(len(items))


# Parts of snapshots


def part(items: np.ndarray, indptr: np.ndarray, row: int) -> np.ndarray:
    """Row `row` of rows that stand end to end."""
    return items[indptr[row] : indptr[row + 1]]


def rebuilt(snapshot: Snapshot, rows: Sequence[int], lengths: Mapping[int, int] | None = None) -> Snapshot:
    """Some rows of a snapshot, some of them shorter: `lengths` has whole numbers of blocks, by row."""
    lengths = lengths or {}
    length = np.array([lengths.get(row, int(snapshot.lengths[row])) for row in rows], np.int64)
    entries = -(-length // snapshot.block_size)
    tables = [part(snapshot.indices, snapshot.indptr, row)[:n] for row, n in zip(rows, entries, strict=True)]
    indices, indptr = _joined(tables, snapshot.indices, np.int32)
    changed = {"indptr": indptr, "indices": indices, "lengths": length}
    changed["seq_ids"] = tuple(snapshot.seq_ids[row] for row in rows)
    if snapshot.committed is not None:
        changed |= _rebuilt_texts(snapshot, list(rows), length)
    return replace(snapshot, **changed)


def _rebuilt_texts(snapshot: Snapshot, rows: list[int], length: np.ndarray) -> dict:
    """What is known of the texts of some rows; a row that was cut forgets what was announced behind its end."""
    cut = length < snapshot.lengths[rows]
    committed = np.minimum(snapshot.committed[rows], length)
    prompts = np.where(cut, np.minimum(snapshot.prompts[rows], length), snapshot.prompts[rows])
    known = np.maximum(committed, prompts)
    tokens = [
        part(snapshot.tokens, snapshot.token_indptr, row)[:n] for row, n in zip(rows, known, strict=True)
    ]
    digests = []
    for i, row in enumerate(rows):
        covered = (
            committed[i] if len(tokens[i]) else known[i]
        )  # with digests alone, they cover the prompt too
        digests.append(part(snapshot.digests, snapshot.digest_indptr, row)[: covered // snapshot.block_size])
    texts = {"roots": snapshot.roots[rows], "committed": committed, "prompts": prompts}
    texts["tokens"], texts["token_indptr"] = _joined(tokens, snapshot.tokens, np.int64)
    texts["digests"], texts["digest_indptr"] = _joined(digests, snapshot.digests, np.int64)
    return texts


def _joined(parts: list[np.ndarray], like: np.ndarray, kind) -> tuple[np.ndarray, np.ndarray]:
    """Rows end to end, and where each begins."""
    indptr = np.zeros(len(parts) + 1, kind)
    np.cumsum([len(items) for items in parts], out=indptr[1:])
    return np.concatenate([like[:0], *parts]), indptr
