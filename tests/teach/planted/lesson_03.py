"""Wrong solutions of lesson 03, as learners write them. See ../test_planted.py."""

import numpy as np

# ---- slots(table, positions, block_size)


def swapped(table, positions, block_size):
    return table[positions % block_size] * block_size + positions // block_size


def one_late(table, positions, block_size):
    """The first position of a block is looked up in the block before."""
    return table[(positions - 1) // block_size] * block_size + positions % block_size


def positions_themselves(table, positions, block_size):
    return positions


def blocks_in_id_order(table, positions, block_size):
    return np.sort(table)[positions // block_size] * block_size + positions % block_size


def always_four(table, positions, block_size):
    return table[positions // 4] * 4 + positions % 4


def one_by_one(table, positions, block_size):
    return [table[p // block_size] * block_size + p % block_size for p in positions]


def forgets_the_factor(table, positions, block_size):
    return table[positions // block_size] + positions % block_size


def floats(table, positions, block_size):
    return (table[positions // block_size] + positions % block_size / block_size) * block_size


# ---- read(pages, table, length)


def sorted_ids(pages, table, length):
    return pages[np.sort(table)].reshape(-1, *pages.shape[2:])[:length]


def whole_blocks(pages, table, length):
    needed = -(-length // pages.shape[1])
    return pages[table[:needed]].reshape(-1, *pages.shape[2:])


def full_blocks_only(pages, table, length):
    return pages[table[: length // pages.shape[1]]].reshape(-1, *pages.shape[2:])


def blocks_stay_apart(pages, table, length):
    return pages[table][:length]


def everything_flat(pages, table, length):
    """Right for letters, where a slot is one number."""
    return pages[table].reshape(-1)[:length]


def tail_of_zeros(pages, table, length):
    """Reads whole blocks, and makes what is not filled look harmless."""
    rows = pages[table[: -(-length // pages.shape[1])]].reshape(-1, *pages.shape[2:])
    rows[length:] = 0
    return rows


def positions_as_slots(pages, table, length):
    return pages.reshape(-1, *pages.shape[2:])[:length]


# ---- new_blocks(length, more, block_size)


def ceil_of_more(length, more, block_size):
    return -(-more // block_size)


def floor_difference(length, more, block_size):
    return (length + more) // block_size - length // block_size


def one_ahead(length, more, block_size):
    """Fetches the next block as soon as the last one is full."""
    return (length + more) // block_size + 1 - -(-length // block_size)


def one_at_most(length, more, block_size):
    return int(length % block_size + more > block_size or (length % block_size == 0 and more > 0))


def all_of_them(length, more, block_size):
    return -(-(length + more) // block_size)


def free_slots_from_modulo(length, more, block_size):
    """length % block_size is taken for the number of free slots."""
    return max(0, -(-(more - length % block_size) // block_size))


# ---- MyTables


class Tables:
    """A right one; the wrong ones below change one thing each."""

    def __init__(self, allocator, num_layers, block_size, num_kv_heads, head_dim):
        self.allocator, self.block_size = allocator, block_size
        shape = (2, num_layers, allocator.num_blocks * block_size, num_kv_heads, head_dim)
        self.kv = np.full(shape, np.nan, np.float32)
        self.tables, self.lengths = {}, {}

    def add(self, name):
        self.tables[name], self.lengths[name] = [], 0

    def slots(self, name, positions):
        table = np.array(self.tables[name], int)
        return table[positions // self.block_size] * self.block_size + positions % self.block_size

    def first(self, name):
        """The position of the next token."""
        return self.lengths[name]

    def write(self, slots, keys, values):
        self.kv[0][:, slots], self.kv[1][:, slots] = keys, values

    def more_blocks(self, length, n):
        return -(-(length + n) // self.block_size) - -(-length // self.block_size)

    def append(self, name, keys, values):
        start, n = self.first(name), keys.shape[1]
        self.tables[name] += self.allocator.allocate(self.more_blocks(self.lengths[name], n)).tolist()
        self.lengths[name] = start + n
        slots = self.slots(name, np.arange(start, start + n))
        self.write(slots, keys, values)
        return slots

    def read(self, layer, name):
        slots = self.slots(name, np.arange(self.lengths[name]))
        return self.kv[0, layer, slots], self.kv[1, layer, slots]

    def free(self, name):
        self.allocator.release(self.tables.pop(name))
        del self.lengths[name]


class NextPositionOffByOne(Tables):
    """A token is counted before its position is taken (nano-vllm, pull request 67)."""

    def first(self, name):
        return self.lengths[name] + 1 if self.lengths[name] else 0


class OverwritesTheLast(Tables):
    def first(self, name):
        return max(0, self.lengths[name] - 1)


class OneMemory(Tables):
    """One table for keys and values, and one array as well: V = K."""

    def write(self, slots, keys, values):
        self.kv[:, :, slots] = keys


class OneLayer(Tables):
    """Every layer writes where the last one wrote."""

    def write(self, slots, keys, values):
        for layer in range(len(keys)):
            self.kv[0][:, slots], self.kv[1][:, slots] = keys[layer], values[layer]


class BlocksPerLayer(Tables):
    def more_blocks(self, length, n):
        return super().more_blocks(length, n) * len(self.kv[0])


class LengthBeforeTheRefusal(Tables):
    def append(self, name, keys, values):
        length = self.lengths[name]
        self.lengths[name] += keys.shape[1]  # the allocator has not been asked yet
        for _ in range(self.more_blocks(length, keys.shape[1])):
            self.tables[name] += self.allocator.allocate(1).tolist()
        slots = self.slots(name, np.arange(length, self.lengths[name]))
        self.write(slots, keys, values)
        return slots


class ReadsWholeBlocks(Tables):
    def read(self, layer, name):
        slots = self.slots(name, np.arange(len(self.tables[name]) * self.block_size))
        return self.kv[0, layer, slots], self.kv[1, layer, slots]


class KeepsItsBlocks(Tables):
    def free(self, name):
        del self.tables[name], self.lengths[name]


BUGS = [
    (
        "slots_by_hand",
        "position used as slot",
        [0, 4, 11, 12],
        "where in the memory does its first block begin",
    ),
    ("slots_by_hand", "blocks", [5, 6, 7, 0], "how many slots lie before block 5"),
    ("slots_by_hand", "id order", [0, 20, 27, 28], "what does entry 0 say"),
    ("slots_by_hand", "counted from 1", [21, 25, 32, 1], "how many letters of that block come before it"),
    ("slots_by_hand", "offsets forgotten", [20, 24, 28, 0], "Position 11: you have slot 28"),
    ("slots", "// and % swapped", swapped, "position 4 is the first letter of the second block"),
    ("slots", "(p - 1) // bs", one_late, "position 0 is the first letter of the text"),
    ("slots", "position used as slot", positions_themselves, "position 0 is the first letter"),
    ("slots", "ids sorted", blocks_in_id_order, "in which block, at which place"),
    ("slots", "block size written in", always_four, "what is left of the offset"),
    ("slots", "a loop", one_by_one, "found one by one"),
    ("slots", "no factor", forgets_the_factor, "gave [5], expected [20]"),
    ("slots", "floats", floats, "can you index an array with 20.0"),
    ("read", "ids sorted", sorted_ids, "in which order does the text go through its blocks"),
    ("read", "whole last block", whole_blocks, "how many slots of its last block are its own"),
    ("read", "last block dropped", full_blocks_only, "how many whole blocks are these"),
    ("read", "blocks stay apart", blocks_stay_apart, "two axes of the pages are gone"),
    ("read", "flat", everything_flat, "which axes stay as they are"),
    ("read", "tail of zeros", tail_of_zeros, "how many slots of its last block are its own"),
    ("read", "position used as slot", positions_as_slots, "where is that written down"),
    ("new_blocks", "ceil(more / bs)", ceil_of_more, "how many slots of night's last block are free"),
    ("new_blocks", "floor difference", floor_difference, "gave 1, expected 0"),
    ("new_blocks", "one ahead", one_ahead, "expected 0"),
    ("new_blocks", "one at most", one_at_most, "how many does Good night need"),
    ("new_blocks", "all blocks", all_of_them, "who takes it, and who does not fit"),
    ("new_blocks", "modulo taken for free", free_slots_from_modulo, "gave 0, expected 1"),
    ("tables", "next position off by one", NextPositionOffByOne, "what is the position of the next"),
    ("tables", "last token overwritten", OverwritesTheLast, "what is the position of the next"),
    ("tables", "V = K", OneMemory, "one table; and how many memories"),
    ("tables", "one layer", OneLayer, "another layer's"),
    ("tables", "blocks for each layer", BlocksPerLayer, "does a second layer need more of them"),
    ("tables", "half a refusal", LengthBeforeTheRefusal, "the pool has said no"),
    ("tables", "whole blocks read", ReadsWholeBlocks, "how many slots has its last block"),
    ("tables", "blocks not given back", KeepsItsBlocks, "forgot to give it back"),
]
