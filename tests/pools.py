"""What must hold after every operation on a pool, and a plain list model to compare with: in one place.

`pool` is a BlockManager or a PagedKVCache throughout (the invariants also take a bare BlockAllocator).
"""

import itertools
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest

from pagedkv import BlockAllocator, BlockManager, PagedKVCache, PoolExhausted

LAYERS, HEADS, HEAD_DIM = 2, 2, 2


def manager_of(pool):
    return pool.manager if isinstance(pool, PagedKVCache) else pool


def table(pool, seq):
    """The block ids of one sequence, −1 where one was left behind."""
    return pool.block_tables([seq])[0].tolist()


def refs(pool):
    return manager_of(pool).allocator.ref_counts.tolist()


def queue(pool):
    return manager_of(pool).allocator.queue()


def owners_of_blocks(pool):
    """Table entries that name each block, counted the slow way."""
    return Counter(block for seq in pool.seq_ids for block in table(pool, seq) if block >= 0)


def check_invariants(pool):
    """The invariants of an allocator, a manager or a cache; called after every step of every test of state."""
    if isinstance(pool, BlockAllocator):
        return check_free_exactly_once(pool)
    manager = manager_of(pool)
    check_free_exactly_once(manager.allocator)
    owners = owners_of_blocks(pool)
    assert refs(pool) == [owners[block] for block in range(pool.num_blocks)]
    assert pool.num_free == pool.num_blocks - len(owners)
    for seq in pool.seq_ids:
        entries, length = table(pool, seq), pool.length(seq)
        assert len(entries) == -(-length // pool.block_size)
        held = [block for block in entries if block >= 0]
        assert len(set(held)) == len(held)
        assert entries == [-1] * (len(entries) - len(held)) + held  # blocks are left behind in front only
        assert length % pool.block_size == 0 or entries[-1] >= 0  # the next token has a block to go to
    check_unused_rows(manager.tables)
    check_prefix_index(manager)
    if isinstance(pool, PagedKVCache) and pool.storage.poisoned:
        cached = np.array(queue(pool), int)[pool.num_free - manager.allocator.num_cached :]
        for array in pool.storage.arrays.values():
            plain = array[:, queue(pool)[: pool.num_free - len(cached)]]
            assert np.isnan(plain).all(), "a free block holds numbers"
            assert not np.isnan(array[:, cached]).any(), "a cached block has lost its numbers"
    return None


def check_free_exactly_once(allocator):
    owners = allocator.ref_counts.tolist()
    assert sorted(allocator.queue()) == [block for block, count in enumerate(owners) if count == 0]
    assert allocator.num_free == owners.count(0)
    assert min(owners) >= 0


def check_unused_rows(tables):
    """Behind every table, and in rows without a sequence, stands −1; every row has one use."""
    used = [tables._row_of[seq] for seq in tables]
    assert sorted(used + tables._vacant) == list(range(len(tables._entries)))
    entries = tables.num_entries(np.arange(len(tables._entries)))
    behind = np.arange(tables._entries.shape[1]) >= entries[:, None]
    assert (tables._entries[behind] == -1).all()
    assert (tables._lengths[tables._vacant] == 0).all()


def check_prefix_index(manager):
    """What can be found is found from both sides, and a free block is cached exactly when it can be found."""
    index, allocator = manager.prefix_index, manager.allocator
    by_digest = {block: digest for digest, blocks in index._blocks.items() for block in blocks}
    assert by_digest == {block: link.digest for block, link in index._links.items()}
    assert np.flatnonzero(index._sealed).tolist() == sorted(by_digest)
    assert all(index._blocks.values()), "a digest without a block"
    free = allocator.queue()
    cached = free[len(free) - allocator.num_cached :]
    assert {block for block in free if block in index} == set(cached)
    assert set(manager._texts) == set(manager.seq_ids)


def state_of(pool):
    """Everything an operation could change, as values that can be compared: the deep copy of a pool."""
    if isinstance(pool, BlockAllocator):
        return pool.queue(), pool.num_cached, pool.ref_counts.tolist()
    manager = manager_of(pool)
    tables = manager.tables
    state = {
        "tables": [(seq, table(pool, seq), pool.length(seq)) for seq in pool.seq_ids],
        "versions": pool.versions(pool.seq_ids).tolist(),
        "rows": (dict(tables._row_of), list(tables._vacant), tables._entries.tolist(), tables._changes),
        "next id": manager._next_id,
        "blocks": state_of(manager.allocator),
        "texts": {seq: dict(vars(text)) for seq, text in manager._texts.items()},
        "found": [(digest, list(blocks)) for digest, blocks in manager.prefix_index._blocks.items()],
        "stats": {**vars(manager.prefix_stats), "_recent": list(manager.prefix_stats._recent)},
    }
    if isinstance(pool, PagedKVCache):
        state["pages"] = {name: array.tobytes() for name, array in pool.storage.arrays.items()}
    return state


@contextmanager
def refused(pool, error=PoolExhausted, match=None):
    """The block raises `error` and leaves the pool equal to a deep copy of it."""
    before = state_of(pool)
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert state_of(pool) == before
    check_invariants(pool)


def vectors(layer, tokens):
    """Keys and values that tell token, layer, head and component apart, in whole numbers exact in float16."""
    tokens = np.asarray(tokens, np.float32).reshape(-1, 1, 1)
    place = np.arange(HEADS * HEAD_DIM).reshape(1, HEADS, HEAD_DIM)
    keys = tokens * 8 + layer * 4 + place  # [tokens, HEADS, HEAD_DIM]
    return keys, -keys


def all_layers(tokens, num_layers=LAYERS):
    """The same for `append`: two arrays [layers, tokens, HEADS, HEAD_DIM]."""
    per_layer = [vectors(layer, tokens) for layer in range(num_layers)]
    return np.stack([keys for keys, _ in per_layer]), np.stack([values for _, values in per_layer])


def new_cache(num_blocks, block_size, **options):
    """A small cache in poison mode whose vectors `vectors` makes."""
    return PagedKVCache(num_blocks, block_size, HEADS, HEAD_DIM, num_layers=LAYERS, poison=True, **options)


def contents(root, tokens):
    """What the slots of a text hold in these tests: numbers that depend on all tokens so far and on the root."""
    number, numbers = int.from_bytes(root[:4], "little"), []
    for token in tokens:
        number = (number * 31 + token + 7) % 241
        numbers.append(number + 1)
    return numbers


class Model:
    """A cache beside a plain list of tokens per sequence; every operation ends with every check.

    A token is a small number, None where a sliding window left it behind. Operations are those of the pool;
    a refusal passes through and leaves the model as it was.
    """

    def __init__(self, num_blocks, block_size, **options):
        self.pool = self.new_pool(num_blocks, block_size, **options)
        self.tokens = {}
        self._next = itertools.count(1)

    # What a pool with pages does; CheckedManager has none

    def new_pool(self, num_blocks, block_size, **options):
        return new_cache(num_blocks, block_size, **options)

    def store(self, seqs, counts, tokens):
        return self.pool.append(seqs, *all_layers(tokens), counts)

    def read(self, seq, first=0):
        """The tokens of a sequence from position `first` on, after checking that all layers hold them."""
        pool, length = self.pool, self.pool.length(seq)
        tokens = None
        for layer in range(LAYERS):
            if first == 0:
                keys, values = pool.gather(layer, seq)
            else:
                slots = [
                    table(pool, seq)[p // pool.block_size] * pool.block_size + p % pool.block_size
                    for p in range(first, length)
                ]
                keys, values = pool.storage.read(layer, slots)
            tokens = (keys[:, 0, 0] - layer * 4) / 8
            expected = vectors(layer, tokens)
            assert np.array_equal(keys, expected[0]) and np.array_equal(values, expected[1])
        return tokens.tolist()

    def restore(self, snapshot, source):
        return self.pool.restore(snapshot, source.pool)

    def page(self, block):
        """The tokens that a whole block holds, in its first layer."""
        return (self.pool.storage.page(block)["keys"][0, :, 0, 0] / 8).tolist()

    # Texts: what a slot holds is made of the whole text so far, so that a wrong hit is seen

    def start(self, prompt, seq=None, *, chunk=None, commit=True, **options):
        """A new sequence with a prompt, of which `chunk` tokens behind the hits (None: all) are computed."""
        seq = self.pool.add(seq, tokens=prompt, **options)
        self.tokens[seq] = []
        self.text(seq, prompt, chunk, commit=commit)
        return seq

    def text(self, seq, text, counts=None, *, commit=True):
        """Compute a text's tokens that are not stored yet, and commit them: returns the reservation."""
        numbers = contents(manager_of(self.pool)._texts[seq].root.digest, text)
        first = self.pool.match(seq) if not self.tokens[seq] else len(self.tokens[seq])
        end = len(text) if counts is None else first + counts
        reservation = self.store([seq], end - first, numbers[first:end])
        assert reservation.start.tolist() == [first]
        self.tokens[seq] = [*self.tokens[seq], *numbers[len(self.tokens[seq]) : end]]
        if commit:
            self.pool.commit(seq, text[first:end])
        self.check()
        return reservation

    # Operations

    def alloc(self, n, seq=None):
        """A new sequence of n tokens; returns its id."""
        seq = self.add(seq)
        self.append(seq, n)
        return seq

    def add(self, seq=None):
        seq = self.pool.add(seq)
        self.tokens[seq] = []
        self.check()
        return seq

    def append(self, seqs, counts=1):
        """Extend sequences and write new tokens: returns the reservation."""
        seqs = seqs if isinstance(seqs, list) else [seqs]
        each = counts if isinstance(counts, list) else [counts] * len(seqs)
        new = [[next(self._next) % 120 + 1 for _ in range(n)] for n in each]
        reservation = self.store(seqs, counts, list(itertools.chain(*new)))
        for seq, tokens in zip(seqs, new, strict=True):
            self.tokens[seq] = self.tokens[seq] + tokens
        self.check()
        return reservation

    def fork(self, parent, children=1):
        ids = self.pool.fork(parent, children)
        self.tokens.update({child: list(self.tokens[parent]) for child in ids})
        self.check()
        return ids

    def reorder(self, seqs, parents):
        freed = self.pool.reorder(seqs, parents)
        self.tokens.update({seq: self.tokens[seqs[p]] for seq, p in zip(seqs, list(parents), strict=True)})
        self.check()
        return freed.tolist()

    def truncate(self, seq, length):
        freed = self.pool.truncate(seq, length)
        self.tokens[seq] = self.tokens[seq][:length]
        self.check()
        return freed.tolist()

    def release_before(self, seq, position):
        freed = self.pool.release_before(seq, position)
        left = position - position % self.pool.block_size
        self.tokens[seq] = [None] * left + self.tokens[seq][left:]
        self.check()
        return freed.tolist()

    def free(self, seqs):
        freed = self.pool.free(seqs)
        for seq in seqs if isinstance(seqs, list) else [seqs]:
            del self.tokens[seq]
        self.check()
        return freed.tolist()

    def swap_in(self, source, seqs):
        """Take sequences over from another model: restore, copy, free there. Returns the pairs of blocks."""
        pairs = self.restore(source.pool.snapshot(seqs), source)
        self.tokens.update({seq: source.tokens[seq] for seq in seqs})
        source.free(seqs)
        self.check()
        return pairs.tolist()

    def check(self):
        check_invariants(self.pool)
        assert self.pool.seq_ids == list(self.tokens)
        for seq, tokens in self.tokens.items():
            left = tokens.count(None)
            assert self.pool.length(seq) == len(tokens)
            assert self.read(seq, left) == tokens[left:]
        for block, link in manager_of(self.pool).prefix_index._links.items():
            links = [link]
            while links[-1].parent is not None:
                links.append(links[-1].parent)
            if link.tokens is not None:
                text = np.frombuffer(b"".join(part.tokens for part in links[-2::-1]), np.int64)
                held = contents(links[-1].digest, text.tolist())[-self.pool.block_size :]
                assert self.page(block) == held, f"block {block} is found by a text that it does not hold"

    # Shorthands of the scenarios

    def table(self, seq):
        return table(self.pool, seq)

    @property
    def refs(self):
        return refs(self.pool)

    @property
    def queue(self):
        return queue(self.pool)

    @property
    def num_cached(self):
        return manager_of(self.pool).allocator.num_cached

    @property
    def num_free(self):
        return self.pool.num_free


class ManagerModel(Model):
    """The same over a bare BlockManager: a dict from slots to tokens stands for the pages."""

    def new_pool(self, num_blocks, block_size, **options):
        self.memory = {}
        return BlockManager(num_blocks, block_size, **options)

    def store(self, seqs, counts, tokens):
        reservation = self.pool.extend(seqs, counts)
        self.copy(reservation.copies.tolist(), self.memory)
        self.memory.update(zip(reservation.slots.tolist(), tokens, strict=True))
        return reservation

    def read(self, seq, first=0):
        size, entries = self.pool.block_size, table(self.pool, seq)
        return [
            self.memory[entries[p // size] * size + p % size] for p in range(first, self.pool.length(seq))
        ]

    def page(self, block):
        size = self.pool.block_size
        return [self.memory[block * size + offset] for offset in range(size)]

    def restore(self, snapshot, source):
        pairs = self.pool.restore(snapshot)
        self.copy([(*pair, self.pool.block_size) for pair in pairs.tolist()], source.memory)
        return pairs

    def copy(self, copies, memory):
        size = self.pool.block_size
        for origin, destination, filled in copies:
            for offset in range(filled):
                if (origin * size + offset) in memory:
                    self.memory[destination * size + offset] = memory[origin * size + offset]
