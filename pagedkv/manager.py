"""Sequences over one pool of blocks: growth, forks, copy-on-write. Accounting only, no keys or values."""

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from .allocator import (
    BlockAllocator,
    Observed,
    Observer,
    whole_number,
    whole_numbers,
    whole_numbers_below,
)
from .block_table import NOTHING, BlockTables, SeqId, Step, as_ids
from .prefix_cache import (
    TOKEN,
    Commit,
    PrefixIndex,
    PrefixStats,
    Text,
    given_digests,
    root_link,
    token_bytes,
)
from .snapshot import Snapshot, packed_texts

MAX_SLOTS = 2**31  # slot numbers are int32
NO_BLOCKS, NO_COPIES = np.zeros(0, np.int32), np.zeros((0, 3), np.int32)


@dataclass(frozen=True)
class Reservation:
    """Room for new tokens, as `extend` granted it. Valid until one of its sequences changes again."""

    seq_ids: tuple[SeqId, ...]
    start: np.ndarray  # int64 [batch]       position of each sequence's first new token
    counts: np.ndarray  # int64 [batch]      new tokens per sequence
    slots: np.ndarray  # int32 [num_tokens]  where they go, sequence after sequence
    copies: np.ndarray  # int32 [m, 3]       source block, destination block, filled slots
    versions: np.ndarray  # int64 [batch]    of the sequences, after this step

    @functools.cached_property
    def places(self) -> np.ndarray:
        """The slots as indices of NumPy's own type, made once for all layers."""
        return self.slots.astype(np.intp)


@dataclass(frozen=True)
class _Growth:
    """The plan of one extend: everything it needs, computed before anything is touched."""

    seq_ids: tuple[SeqId, ...]
    rows: np.ndarray  # int64 [batch]
    start: np.ndarray  # int64 [batch]   position of the first new token, behind the hits
    tokens: np.ndarray  # int64 [batch]
    hits: dict[int, list[int]]  # place in the batch -> cached blocks that begin its prompt
    revived: int  # free blocks among the hits
    begun: list[int]  # places in the batch of sequences that get their first tokens
    writers: (
        np.ndarray
    )  # int64 [writers]  places in the batch of those who write into a last block that they have
    tails: np.ndarray  # int32 [writers]    that block
    copies: np.ndarray  # bool [writers]    whether it must be copied first, since others own it too
    blocks: np.ndarray  # int64 [batch]     new blocks per sequence, copies not counted
    new: int  # free blocks for copies and new blocks

    @property
    def needed(self) -> int:
        return self.new + self.revived


class BlockManager(Observed):
    """Block tables over one allocator, with copy-on-write (Kwon et al. 2023, sections 4.2 to 4.4).

    The count of a block always equals the number of table entries that name it, and a slot is only ever
    granted in a block with one owner. Every call computes its whole need first: a refusal changes nothing.
    Not locked: `PagedKVCache` adds the lock that also covers the copies.

    Args: max_length: tokens that a sequence may have; prefix_cache: keep full, committed blocks findable, so
        that a prompt that begins with their text need not be computed again; namespace: what keys and values
        depend on beside the text, such as the model: prompts of another namespace find nothing.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_length: int | None = None,
        prefix_cache: bool = False,
        namespace: bytes | str = b"",
        observers: Iterable[Observer] = (),
    ):
        super().__init__(observers)
        self.tables = BlockTables(block_size, max_length=max_length)
        if whole_number("num_blocks", num_blocks, minimum=1) * self.block_size > MAX_SLOTS:
            raise ValueError(
                f"{num_blocks} blocks of {block_size} exceed the 2**31 slots that int32 can number"
            )
        self.allocator = BlockAllocator(num_blocks)
        self.prefix_cache = bool(prefix_cache)
        self.prefix_stats = PrefixStats()
        self.prefix_index = PrefixIndex(self.num_blocks)
        self._namespace = namespace
        self._root = root_link(self.block_size, namespace=namespace)
        self._texts: dict[SeqId, Text] = {}
        self._next_id = 0

    @property
    def num_blocks(self) -> int:
        return self.allocator.num_blocks

    @property
    def block_size(self) -> int:
        return self.tables.block_size

    @property
    def num_free(self) -> int:
        """Blocks that no sequence uses, cached ones included."""
        return self.allocator.num_free

    @property
    def seq_ids(self) -> list[SeqId]:
        """All registered sequences, oldest first."""
        return list(self.tables)

    def __repr__(self) -> str:
        from .teach import pages  # only here: a drawing needs what stands above the engine

        return pages.drawn(self)

    def _repr_html_(self) -> str | None:
        from .teach import pages

        return pages.drawn_html(self)

    # Reading

    def length(self, seq_id: SeqId) -> int:
        """Tokens of one sequence. KeyError if it is not registered."""
        return int(self.lengths([seq_id])[0])

    def lengths(self, seq_ids: Iterable[SeqId]) -> np.ndarray:
        """Tokens per sequence: int64 [batch]."""
        return self.tables.length(self._rows(seq_ids)[1])

    def versions(self, seq_ids: Iterable[SeqId]) -> np.ndarray:
        """A number per sequence that changes with its table or length: int64 [batch]."""
        return self.tables.version(self._rows(seq_ids)[1])

    def block_tables(self, seq_ids: Iterable[SeqId]) -> np.ndarray:
        """Tables padded with −1: int32 [batch, max_blocks]."""
        return self.tables.padded(self._rows(seq_ids)[1])

    def to_csr(self, seq_ids: Iterable[SeqId]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tables in flashinfer's form: indptr [batch + 1], indices [entries], last_page_len [batch], all int32.

        last_page_len is 1 … block_size, or 0 for a sequence without tokens.
        """
        _, rows = self._rows(seq_ids)
        indptr, indices = self.tables.csr(rows)
        lengths = self.tables.length(rows)
        return indptr, indices, np.where(lengths > 0, (lengths - 1) % self.block_size + 1, 0).astype(np.int32)

    def blocks_needed(
        self, seq_ids: SeqId | Iterable[SeqId], num_tokens: int | Sequence[int | None] | None = 1
    ) -> int:
        """Free blocks that `extend` with the same arguments would take: new ones, copies and revived ones."""
        return int(self._plan_growth(*self._rows(seq_ids, once=True), num_tokens).needed)

    def can_extend(
        self, seq_ids: SeqId | Iterable[SeqId], num_tokens: int | Sequence[int | None] | None = 1
    ) -> bool:
        """Whether `extend` with the same arguments would find enough free blocks."""
        return self.blocks_needed(seq_ids, num_tokens) <= self.num_free

    # Growing

    def add(
        self,
        seq_id: SeqId | None = None,
        *,
        tokens: ArrayLike | None = None,
        block_hashes: Sequence[bytes | str | int] | None = None,
        num_tokens: int | None = None,
        cache_salt: bytes | str | None = None,
        adapter: bytes | str | None = None,
    ) -> SeqId:
        """Register an empty sequence; it takes no block yet.

        Args: seq_id: an int or str that is not in use, None picks an unused int; tokens: its prompt [n], the
            beginning of which may be found in the prefix cache; block_hashes, num_tokens: the same for a trace:
            a hash per block that covers all before it, and the length of the prompt; cache_salt, adapter:
            only sequences with equal ones share blocks through the prefix cache.
        Returns: the id.
        Raises: ValueError if the id is in use or of another type, or the prompt is none.
        """
        started = self._clock()
        text = self._announced(tokens, block_hashes, num_tokens, cache_salt, adapter)
        (seq_id,) = self._new_ids([seq_id])
        self.tables.add(seq_id)
        self._texts[seq_id] = text
        self._tell("add", started, (seq_id,))
        return seq_id

    def match(self, seq_id: SeqId) -> int:
        """Tokens of its prompt that the first `extend` of a sequence would find in the cache; touches nothing.

        At least one token of a prompt is always left to compute: its output is what the model goes on from.
        """
        _, rows = self._rows([seq_id])
        unbegun = [0] if self.tables.length(rows)[0] == 0 else []
        return sum(map(len, self._found([seq_id], unbegun).values())) * self.block_size

    def extend(
        self, seq_ids: SeqId | Iterable[SeqId], num_tokens: int | Sequence[int | None] | None = 1
    ) -> Reservation:
        """Make room for new tokens at the end of sequences: all of them, or none.

        The first call for a prompt also attaches the cached blocks that it begins with, and the new tokens
        follow behind them (`start`). A shared last block is copied for every writer but the last owner, who
        writes in place. The caller carries out `copies` before it writes to `slots` (`PagedKVCache.extend` does).

        Args: seq_ids: one or several, each once; num_tokens: per sequence, or one number for all, at least 0;
            None: what its prompt still lacks.
        Returns: a Reservation.
        Raises: PoolExhausted if the blocks do not suffice, ValueError beyond max_length; nothing is changed.
        Source: section 4.4 and figure 8.
        """
        started = self._clock()
        ids, rows = self._rows(seq_ids, once=True)
        if _is_step(num_tokens, len(ids)) and (reservation := self._step(started, ids, rows)):
            return reservation
        plan = self._plan_growth(ids, rows, num_tokens)
        if plan.needed > self.num_free:
            self._refuse(started, plan.needed, self.num_free, plan.seq_ids)
        attached = self._attach(plan)  # before anything is taken: a block that was found must not be evicted
        taken, evicted = self._take(plan.new)
        copies, new = self._copy_tails(plan, taken)
        self.tables.append(plan.rows, plan.blocks, plan.tokens, new)
        slots = self.tables.slots(plan.rows, plan.start, plan.tokens)
        if self.prefix_cache:
            self._count_prompts(plan)
        if self.observers:
            self._tell_growth(started, plan.seq_ids, plan.tokens, new, copies, attached, evicted)
        return Reservation(
            plan.seq_ids, plan.start, plan.tokens, slots, copies, self.tables.version(plan.rows)
        )

    def commit(
        self,
        seq_ids: SeqId | Iterable[SeqId],
        tokens: ArrayLike | Sequence[ArrayLike] | None = None,
        *,
        block_hashes: Sequence | None = None,
    ) -> None:
        """Say that keys and values of the next tokens are written and final: full blocks become findable.

        Drafts are extended and not committed before they are accepted.

        Args: seq_ids: one or several, each once; tokens: for one sequence a row of token ids, for several a row
            or a single id for each; None: what of its prompt has room by now; block_hashes: for a trace, the
            hashes of the next full blocks, a row per sequence in the same way.
        Raises: ValueError for more tokens than there is room for, others than announced, or a block whose text
            is another one already; nothing is changed.
        """
        started = self._clock()
        several = isinstance(seq_ids, Iterable) and not isinstance(seq_ids, str)
        ids, rows = self._rows(seq_ids, once=True)
        if tokens is not None and block_hashes is not None:
            raise ValueError("a text goes on by tokens or by block_hashes, not by both")
        if block_hashes is not None:
            given = _one_each("block_hashes", block_hashes if several else [block_hashes], ids)
        elif tokens is not None:
            given = _token_rows(tokens if several else [tokens], ids)
        else:
            given = [None] * len(ids)
        lengths = self.tables.length(rows).tolist()
        plans = [
            self._plan_commit(seq_id, length, row, by_hash=block_hashes is not None)
            for seq_id, length, row in zip(ids, lengths, given, strict=True)
        ]
        places = [
            self.tables.some_entries(row, p.first, len(p.filled)).tolist() if p.filled else []
            for row, p in zip(rows, plans, strict=True)
        ]
        self._check_contents(ids, plans, places)
        sealed = []
        for plan, blocks in zip(plans, places, strict=True):
            sealed += self.prefix_index.carry_out(plan, blocks if self.prefix_cache else None)
        self._tell("commit", started, ids, {"sealed": np.array(sealed, np.int32)})

    # Sharing

    def fork(self, parent: SeqId, children: int | Iterable[SeqId] = 1) -> list[SeqId]:
        """Let children continue a parent's text; they share all its blocks and nothing is copied.

        Write what was reserved first: a child shares unwritten slots too, and copies them as they are.

        Args: parent: a registered sequence; children: how many, or their ids.
        Returns: the children's ids.
        Raises: KeyError for an unknown parent, ValueError for ids in use; nothing is changed.
        Source: section 4.4, parallel sampling.
        """
        started = self._clock()
        _, (row,) = self._rows([parent])
        if not isinstance(children, Iterable):
            children = [None] * whole_number("the number of children", children, minimum=1)
        ids = self._new_ids(as_ids(children))
        owned = self.tables.owned(row)
        if ids:
            self.allocator.share(owned, len(ids))
        self.tables.fork(row, ids)
        self._texts.update((child, self._texts[parent].copy()) for child in ids)
        self._tell("fork", started, (parent, *ids), {"shared": owned})
        return ids

    def reorder(self, seq_ids: Iterable[SeqId], parents: Sequence[int]) -> np.ndarray:
        """Let row i continue what seq_ids[parents[i]] holds now: one step of a beam search.

        Args: seq_ids: sequences, each once; parents: one row number per sequence, repeats allowed.
        Returns: int32 ids of the blocks that became free.
        Raises: ValueError for a parent outside 0 … len(seq_ids) − 1; nothing is changed.
        Source: section 4.4, beam search.
        """
        started = self._clock()
        ids, rows = self._rows(seq_ids, once=True)
        parents = whole_numbers("parents", parents)
        if parents.shape != (len(ids),) or ((parents < 0) | (parents >= len(ids))).any():
            raise ValueError(
                f"parents must be {len(ids)} numbers of 0 … {len(ids) - 1}, got {parents.tolist()}"
            )
        moved = np.flatnonzero(parents != np.arange(len(ids))).tolist()
        new = [(self.tables.entries(rows[parents[i]]), self.tables.length(rows[parents[i]])) for i in moved]
        old = [self.tables.owned(rows[i])[::-1] for i in moved]
        self.allocator.share(
            _joined([entries[entries != NOTHING] for entries, _ in new])
        )  # before any release
        freed = self._release(_joined(old))
        texts = [self._texts[ids[parents[i]]].copy() for i in moved]
        for i, (entries, length), text in zip(moved, new, texts, strict=True):
            self.tables.put(rows[i], entries, length)
            self._texts[ids[i]] = text
        self._tell("reorder", started, ids, {"freed": freed}, free=self.num_free)
        return freed

    # Shrinking

    def truncate(self, seq_id: SeqId, length: int) -> np.ndarray:
        """Forget the tokens from position `length` on, the rest of an announced prompt included.

        Whole blocks that were committed stay findable; one that is cut in two does not, unless others own it too.

        Returns: int32 ids of the blocks that became free.
        Raises: ValueError for more than the sequence holds, or an end in a block that was left behind.
        """
        started = self._clock()
        ids, (row,) = self._rows([seq_id])
        length, held = whole_number("length", length), self.length(seq_id)
        if length > held:
            raise ValueError(f"sequence {seq_id!r} has {held} tokens, cannot truncate it to {length}")
        keep = -(-length // self.block_size)
        entries = self.tables.entries(row)
        if length % self.block_size and entries[keep - 1] == NOTHING:
            raise ValueError(
                f"position {length - 1} of sequence {seq_id!r} was left behind by release_before"
            )
        cut = entries[keep:]
        freed = self._release(cut[cut != NOTHING][::-1])
        if length < held:
            self.tables.put(row, entries[:keep], length)
            self._texts[seq_id].cut(length, self.block_size)
            if length % self.block_size and self.allocator.ref_counts[entries[keep - 1]] == 1:
                self.prefix_index.unseal(entries[keep - 1 : keep])
        self._tell("truncate", started, ids, {"freed": freed}, tokens=held - length, free=self.num_free)
        return freed

    def release_before(self, seq_id: SeqId, position: int) -> np.ndarray:
        """Give up the whole blocks below a position, for attention with a sliding window.

        Positions keep their numbers; the table entries become −1.

        Returns: int32 ids of the blocks that became free.
        Raises: ValueError for a position beyond the length.
        """
        started = self._clock()
        ids, (row,) = self._rows([seq_id])
        position = whole_number("position", position)
        if position > self.length(seq_id):
            raise ValueError(f"sequence {seq_id!r} has {self.length(seq_id)} tokens, none at {position}")
        entries = self.tables.entries(row)[: position // self.block_size]
        left = entries[entries != NOTHING]
        freed = self._release(left[::-1])
        if left.size:
            self.tables.drop(row, len(entries))
        self._tell("release_before", started, ids, {"freed": freed}, free=self.num_free)
        return freed

    def free(self, seq_ids: SeqId | Iterable[SeqId]) -> np.ndarray:
        """Forget sequences; their blocks are released last one first.

        Returns: int32 ids of the blocks that became free.
        Raises: KeyError for a sequence that is not registered; nothing is changed.
        """
        started = self._clock()
        ids, rows = self._rows(seq_ids, once=True)
        freed = self._release(_joined([self.tables.owned(row)[::-1] for row in rows]))
        for seq_id in ids:
            self.tables.remove(seq_id)
            del self._texts[seq_id]
        self._tell("free", started, ids, {"freed": freed}, free=self.num_free)
        return freed

    # The prefix cache

    def is_cached(self, blocks: ArrayLike) -> np.ndarray:
        """Which blocks hold a text that a prompt may find: bool [n]."""
        return self.prefix_index.sealed(whole_numbers_below("block", blocks, self.num_blocks))

    def reset_prefix_cache(self) -> bool:
        """Forget every cached text, as after new weights. False, and nothing changes, while a block is in use."""
        started = self._clock()
        if self.num_free < self.num_blocks:
            return False
        self.allocator.forget_cached()
        self.prefix_index.clear()
        self.prefix_stats.reset()
        self._tell("reset_prefix_cache", started)
        return True

    # Moving

    def snapshot(self, seq_ids: Iterable[SeqId] | None = None) -> Snapshot:
        """Tables, lengths and texts of sequences (all if None) as plain arrays."""
        ids, rows = self._rows(self.seq_ids if seq_ids is None else seq_ids, once=True)
        tables = (*self.tables.csr(rows), self.tables.length(rows), self.tables.version(rows))
        return Snapshot(
            self.block_size, ids, *tables, **packed_texts([self._texts[seq] for seq in ids], self.block_size)
        )

    def restore(self, snapshot: Snapshot) -> np.ndarray:
        """Build the sequences of a snapshot in this pool; blocks that they shared are shared again.

        A swap to another pool: pairs = host.restore(device.snapshot(ids)); copy the pairs; device.free(ids).
        With a prefix cache, the committed blocks can be found here too.

        Returns: int32 [m, 2], block in the snapshot and block here.
        Raises: PoolExhausted, or ValueError for ids in use and arrays that do not fit; nothing is changed.
        Source: section 4.5, swapping.
        """
        started = self._clock()
        indptr, indices, lengths = snapshot.checked_tables(self.block_size, self.tables.max_length)
        texts = snapshot.texts(self._root, self.prefix_index)
        ids = self._new_ids(snapshot.seq_ids)
        kept = indices != NOTHING
        old, first, which, times = np.unique(
            indices[kept], return_index=True, return_inverse=True, return_counts=True
        )
        if len(old) > self.num_free:
            self._refuse(started, len(old), self.num_free, ids)
        order = np.argsort(first)  # blocks are taken in the order of their first appearance
        new = np.empty(len(old), np.int64)
        new[order], evicted = self._take(len(old))
        self.allocator.share(np.repeat(new, times - 1))
        indices[kept] = new[which]
        for seq_id, start, stop, length, text in zip(ids, indptr, indptr[1:], lengths, texts, strict=False):
            self.tables.put(self.tables.add(seq_id), indices[start:stop], length)
            self._texts[seq_id] = text
            if self.prefix_cache:
                self._seal(indices[start:stop].tolist(), text)
        told = {"new": new[order], "evicted": evicted} if self.prefix_cache else {"new": new[order]}
        self._tell("restore", started, ids, told, free=self.num_free)
        return np.column_stack([old[order], new[order]]).astype(np.int32)

    # The plan, and what callers may say

    def _step(self, started: float, ids: tuple[SeqId, ...], rows: np.ndarray) -> Reservation | None:
        """The usual step of decoding in a few array operations: a token for each sequence, in blocks of its own.

        None, and nothing changes, where there is more to it: a sequence begins, a last block is shared, the pool or
        max_length is too small.
        """
        step, limit = self.tables.next_step(rows), self.tables.max_length
        start, growing = step.positions, step.growing
        if len(growing) > self.num_free or (limit is not None and np.count_nonzero(start >= limit)):
            return None
        if not self.tables.just_stepped(rows):  # else nobody can have come to share or find their last blocks
            if not np.count_nonzero(start) == len(ids) > 0:
                return None
            tails = step.slots[start % self.block_size > 0] // self.block_size
            if np.count_nonzero(self.allocator.ref_counts[tails] > 1):
                return None
            self.prefix_index.unseal(tails)  # what is written in place opens
        new, evicted = self._take(len(growing)) if len(growing) else (NO_BLOCKS, NO_BLOCKS)
        return self._stepped(started, ids, step, new, evicted)

    def _stepped(self, started, ids, step: Step, new, evicted=NO_BLOCKS, free=None) -> Reservation:
        """Carry out a step with these new blocks."""
        self.tables.step(step, new)
        tokens = np.ones(len(ids), np.int64)
        if self.observers:
            self._tell_growth(started, ids, tokens, new, NO_COPIES, NO_BLOCKS, evicted, free)
        version = self.tables.version(step.rows)
        return Reservation(ids, step.positions, tokens, step.slots, NO_COPIES, version)

    def _plan_growth(
        self, ids: tuple[SeqId, ...], rows: np.ndarray, num_tokens: int | Sequence[int | None] | None
    ) -> _Growth:
        start = self.tables.length(rows)
        unbegun = (start == 0).nonzero()[0].tolist()
        hits = self._found(ids, unbegun)
        for i, blocks in hits.items():
            start[i] = len(blocks) * self.block_size
        tokens = self._counts(ids, start, num_tokens)
        for i in [i for i in hits if not tokens[i]]:  # nothing to do is done
            del hits[i]
            start[i] = 0
        after = start + tokens
        self._check_room(ids, unbegun, start, tokens, after)
        attached = [block for blocks in hits.values() for block in blocks]
        revived = np.count_nonzero(self.allocator.ref_counts[list(set(attached))] == 0) if attached else 0
        writers = ((start % self.block_size > 0) & (tokens > 0)).nonzero()[0]
        tails = self.tables.last(rows[writers])
        copies = self._must_copy(tails, attached)
        blocks = -(-after // self.block_size) - -(-start // self.block_size)
        new = int(blocks.sum()) + np.count_nonzero(copies)
        begun = [i for i in unbegun if tokens[i]]
        return _Growth(ids, rows, start, tokens, hits, revived, begun, writers, tails, copies, blocks, new)

    def _found(self, ids: Sequence[SeqId], unbegun: list[int]) -> dict[int, list[int]]:
        """The cached blocks that begin the prompts of sequences without tokens, by their places among `ids`."""
        found = {}
        for i in unbegun if self.prefix_cache else ():
            text = self._texts[ids[i]]
            at_most = (text.prompt_length - 1) // self.block_size  # the last token is computed in any case
            blocks = self.prefix_index.find(text, self.block_size, at_most)
            if blocks:
                found[i] = blocks
        return found

    def _counts(
        self, ids: Sequence[SeqId], start: np.ndarray, num_tokens: int | Sequence[int | None] | None
    ) -> np.ndarray:
        """New tokens per sequence: int64 [batch]; None becomes what its prompt lacks."""
        if num_tokens is None:
            num_tokens = [None] * len(ids)
        if isinstance(num_tokens, list | tuple) and any(n is None for n in num_tokens):
            lacking = [
                self._texts[s].prompt_length - first for s, first in zip(ids, start.tolist(), strict=True)
            ]
            if len(num_tokens) == len(ids):
                num_tokens = [
                    lack if n is None and lack > 0 else n for n, lack in zip(num_tokens, lacking, strict=True)
                ]
        if type(num_tokens) is int and 0 <= num_tokens < MAX_SLOTS:  # the usual step
            return np.full(len(ids), num_tokens)
        tokens = whole_numbers("num_tokens", num_tokens)
        if tokens.shape not in ((), (len(ids),)) or ((tokens < 0) | (tokens >= MAX_SLOTS)).any():
            raise ValueError(
                f"num_tokens must be one number or {len(ids)}, each of 0 … 2**31 − 1, got {num_tokens!r}"
            )
        return tokens if tokens.shape else np.full(len(ids), tokens)

    def _check_room(self, ids, unbegun, start, tokens, after) -> None:
        """ValueError for a sequence beyond max_length, or a first step beyond its prompt."""
        limit = self.tables.max_length
        if limit is not None and (after > limit).any():
            i = int(np.argmax(after > limit))
            raise ValueError(f"sequence {ids[i]!r} would hold {after[i]} tokens, max_length is {limit}")
        for i in unbegun:
            prompt = self._texts[ids[i]].prompt_length
            if tokens[i] and 0 < prompt < after[i]:
                raise ValueError(
                    f"sequence {ids[i]!r} has {start[i]} of its prompt's {prompt} tokens in the cache: "
                    f"num_tokens can be {prompt - start[i]} at most, got {tokens[i]}"
                )

    def _must_copy(self, tails: np.ndarray, attached: list[int]) -> np.ndarray:
        """Which writers find their last block owned by others too when their turn comes: bool [writers]."""
        owners = self.allocator.ref_counts[tails]
        copies = np.zeros(len(tails), bool)
        if attached:  # prompts of this very step may find a last block and own it too
            gained = Counter(attached)
            owners = owners + [gained[tail] for tail in tails.tolist()]
        moved_away: dict[int, int] = {}
        for i in (owners > 1).nonzero()[0].tolist():
            gone = moved_away.get(int(tails[i]), 0)
            copies[i] = owners[i] - gone > 1
            moved_away[int(tails[i])] = gone + 1
        return copies

    def _attach(self, plan: _Growth) -> np.ndarray:
        """Let new prompts own the cached blocks that they begin with; returns these: int32."""
        attached = np.array([block for blocks in plan.hits.values() for block in blocks], np.int32)
        if not attached.size:
            return attached
        self.allocator.share(attached)
        for i, blocks in plan.hits.items():
            row, text = plan.rows[[i]], self._texts[plan.seq_ids[i]]
            self.tables.append(row, np.array([len(blocks)]), plan.start[[i]], np.array(blocks))
            text.tip, text.committed = self.prefix_index.link(blocks[-1]), int(plan.start[i])
        return attached

    def _count_prompts(self, plan: _Growth) -> None:
        """Tell the statistics about prompts that begin with this step."""
        lengths = [self._texts[plan.seq_ids[i]].prompt_length for i in plan.begun]
        asked = [length for length in lengths if length]
        if asked:
            found = sum(map(len, plan.hits.values()))
            self.prefix_stats.observe(len(asked), sum(asked), found * self.block_size)

    def _take(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """n free blocks with one owner each, and those of them whose cached text is lost by that: int32."""
        taken = self.allocator.allocate(n)
        return taken, self.prefix_index.unseal(taken)

    def _copy_tails(self, plan: _Growth, taken: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Give each writer of a shared last block one of its own; a sealed block that is written in place opens.

        Args: taken: for sequence after sequence, a block for its copy before its new blocks.
        Returns: the copies, and the blocks that are not for them.
        """
        self.prefix_index.unseal(plan.tails[~plan.copies])
        if not np.count_nonzero(plan.copies):
            return NO_COPIES, taken
        places, sources = plan.writers[plan.copies], plan.tails[plan.copies]
        is_copy = np.zeros(len(taken), bool)
        is_copy[(np.cumsum(plan.blocks) - plan.blocks)[places] + np.arange(len(places))] = True
        rows, destinations = plan.rows[places], taken[is_copy]
        self.tables.replace(rows, self.tables.num_entries(rows) - 1, destinations)
        self.allocator.release(sources)
        filled = plan.start[places] % self.block_size
        return np.column_stack([sources, destinations, filled]).astype(np.int32), taken[~is_copy]

    def _tell_growth(self, started, ids, tokens, new, copies, attached, evicted, free=None) -> None:
        blocks = {"new": new, "copies": copies}
        counts = {"tokens": int(tokens.sum()), "free": self.num_free if free is None else free}
        if self.prefix_cache:
            blocks |= {"hits": attached, "evicted": evicted}
            counts["hit_tokens"] = len(attached) * self.block_size
        self._tell("extend", started, ids, blocks, **counts)

    def _seal(self, table: list[int], text: Text) -> None:
        """Let the committed blocks of a sequence that was restored be found."""
        for block, link in zip(table, text.links(), strict=False):
            if block != NOTHING:
                self.prefix_index.seal(block, link)

    def _release(self, blocks: np.ndarray) -> np.ndarray:
        """Give blocks back; those that can be found stay cached."""
        return self.allocator.release(blocks, cached=blocks[self.prefix_index.sealed(blocks)])

    # Texts

    def _announced(self, tokens, block_hashes, num_tokens, cache_salt, adapter) -> Text:
        """The text of a new sequence, as `add` is told it."""
        if tokens is not None and block_hashes is not None:
            raise ValueError("a prompt is given by tokens or by block_hashes, not by both")
        if (block_hashes is None) != (num_tokens is None):
            raise ValueError("block_hashes and num_tokens, the length of the prompt, go together")
        root = self._root
        if cache_salt is not None or adapter is not None:
            root = root_link(
                self.block_size, namespace=self._namespace, cache_salt=cache_salt, adapter=adapter
            )
        text = Text(root)
        if tokens is not None:
            text.announce(token_bytes("tokens", tokens), self.block_size, hashed=self.prefix_cache)
        if block_hashes is not None:
            digests = given_digests(root.digest, block_hashes)
            text.announce_hashes(digests, whole_number("num_tokens", num_tokens), self.block_size)
        return text

    def _plan_commit(
        self, seq_id: SeqId, length: int, given: bytes | Sequence | None, *, by_hash: bool
    ) -> Commit:
        text = self._texts[seq_id]
        try:
            if by_hash:
                digests = given_digests(text.root.digest, given)
                return text.goes_on_by(digests, length, self.block_size)
            return text.goes_on(given, length, self.block_size)
        except ValueError as error:
            raise ValueError(f"sequence {seq_id!r}: {error}") from None

    def _check_contents(self, ids: Sequence[SeqId], plans: list[Commit], places: list[list[int]]) -> None:
        """A block has one text: forks that share it cannot commit two."""
        said: dict[int, bytes] = {}
        for seq_id, plan, blocks in zip(ids, plans, places, strict=True):
            for (digest, _), block in zip(plan.filled, blocks, strict=True):
                link = self.prefix_index.link(block)
                if block != NOTHING and said.setdefault(block, link.digest if link else digest) != digest:
                    raise ValueError(f"sequence {seq_id!r}: its block {block} holds another text already")

    def _rows(self, seq_ids: SeqId | Iterable[SeqId], *, once: bool = False) -> tuple[tuple, np.ndarray]:
        """The ids as a tuple, and their rows. With `once`, a repeated id is a ValueError."""
        ids = as_ids(seq_ids)
        return ids, self.tables.rows(ids, once=once)

    def _new_ids(self, wanted: Iterable[SeqId | None]) -> list[SeqId]:
        """Ids to register: each unused, of the right type, and different; None becomes the next unused int."""
        ids: dict[SeqId, None] = {}  # a dict finds a repeated id faster than a list
        next_id = self._next_id
        for seq_id in wanted:
            if seq_id is None:
                while next_id in self.tables or next_id in ids:
                    next_id += 1
                ids[next_id] = None
                next_id += 1
                continue
            if isinstance(seq_id, np.integer):
                seq_id = int(seq_id)
            if not isinstance(seq_id, SeqId) or isinstance(seq_id, bool):
                raise ValueError(f"a sequence id must be an int or a str, got {seq_id!r}")
            if seq_id in self.tables or seq_id in ids:
                raise ValueError(f"sequence {seq_id!r} exists already")
            ids[seq_id] = None
        self._next_id = next_id
        return list(ids)


def _is_step(num_tokens, batch: int) -> bool:
    """Whether `extend` is asked for one token of each sequence."""
    if isinstance(num_tokens, np.ndarray) and num_tokens.dtype.kind in "iu":
        return num_tokens.shape == (batch,) and np.count_nonzero(num_tokens == 1) == batch
    return type(num_tokens) is int and num_tokens == 1


def _joined(arrays: Sequence[ArrayLike]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *arrays]).astype(np.int64)


def _one_each(name: str, values, ids: Sequence[SeqId]) -> Sequence:
    """Values as a sequence with one item per id."""
    if (
        isinstance(values, str | bytes)
        or not isinstance(values, Sequence | np.ndarray)
        or len(values) != len(ids)
    ):
        raise ValueError(f"{name} must be one row for each of {len(ids)} sequences, got {values!r}")
    return values


def _token_rows(tokens, ids: Sequence[SeqId]) -> list[bytes]:
    """A row of tokens per sequence, as bytes; a bare number is a row of one."""
    tokens = _one_each("tokens", tokens, ids)
    try:
        flat = np.asarray(tokens)
    except ValueError:  # rows of different lengths
        flat = np.zeros((1, 1))
    if flat.ndim == 1:  # the usual step: one token each
        flat = token_bytes("tokens", flat)
        return [flat[i : i + TOKEN.itemsize] for i in range(0, len(flat), TOKEN.itemsize)]
    return [token_bytes("tokens", np.atleast_1d(row)) for row in tokens]
