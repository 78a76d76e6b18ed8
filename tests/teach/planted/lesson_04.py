"""Wrong solutions of lesson 04, as learners write them. See ../test_planted.py."""

from collections import Counter, namedtuple

from pagedkv.allocator import BlockAllocator, PoolExhausted
from pagedkv.block_table import slots_of

# ---- fork(pool, parent, children)


def refuse_names_in_use(pool, children):
    for i, child in enumerate(children):
        if child in pool.tables or child in children[:i]:
            raise ValueError(child)


def same_list(pool, parent, children):
    refuse_names_in_use(pool, children)
    for child in children:
        pool.allocator.share(pool.tables[parent])
        pool.tables[child], pool.lengths[child] = pool.tables[parent], pool.lengths[parent]


def one_list_for_all_children(pool, parent, children):
    refuse_names_in_use(pool, children)
    pool.allocator.share(pool.tables[parent] * len(children))
    own = list(pool.tables[parent])
    pool.tables.update(dict.fromkeys(children, own))
    pool.lengths.update(dict.fromkeys(children, pool.lengths[parent]))


def no_count(pool, parent, children):
    refuse_names_in_use(pool, children)
    for child in children:
        pool.tables[child], pool.lengths[child] = list(pool.tables[parent]), pool.lengths[parent]


def counts_once(pool, parent, children):
    refuse_names_in_use(pool, children)
    pool.allocator.share(pool.tables[parent])
    for child in children:
        pool.tables[child], pool.lengths[child] = list(pool.tables[parent]), pool.lengths[parent]


def copies_the_pages(pool, parent, children):
    refuse_names_in_use(pool, children)
    for child in children:
        table = []
        for block in pool.tables[parent]:
            try:
                [new] = pool.allocator.allocate(1).tolist()
                pool.memory.copy_blocks([[block, new]])
            except PoolExhausted:
                new = block
                pool.allocator.share([block])
            table.append(new)
        pool.tables[child], pool.lengths[child] = table, pool.lengths[parent]


def forgets_the_length(pool, parent, children):
    refuse_names_in_use(pool, children)
    for child in children:
        pool.allocator.share(pool.tables[parent])
        pool.tables[child], pool.lengths[child] = list(pool.tables[parent]), 0


def looks_while_acting(pool, parent, children):
    for child in children:
        if child in pool.tables:
            raise ValueError(child)
        pool.allocator.share(pool.tables[parent])
        pool.tables[child], pool.lengths[child] = list(pool.tables[parent]), pool.lengths[parent]


# ---- write(pool, name, letter)


def put(pool, name, letter):
    slot = slots_of(pool.tables[name], [pool.lengths[name]], pool.block_size)
    pool.memory.write(slot, letter)
    pool.lengths[name] += 1


def write(
    pool,
    name,
    letter,
    *,
    shared=lambda pool, block: pool.allocator.ref_count(block) > 1,
    filled=None,
    repoint=True,
    release=1,
):
    """A right write; the wrong ones change one thing each."""
    table, offset = pool.tables[name], pool.lengths[name] % pool.block_size
    if offset == 0:
        table += pool.allocator.allocate(1).tolist()
    elif shared(pool, table[-1]):
        old, [new] = table[-1], pool.allocator.allocate(1).tolist()
        pool.memory.copy_blocks([[old, new, offset if filled is None else filled]])
        if repoint:
            table[-1] = new
        pool.allocator.release([old] * min(release, pool.allocator.ref_count(old)))
    put(pool, name, letter)


def never_copies(pool, name, letter):
    write(pool, name, letter, shared=lambda pool, block: False)


def always_copies(pool, name, letter):
    write(pool, name, letter, shared=lambda pool, block: True)


def frees_the_old_block(pool, name, letter):
    write(pool, name, letter, release=99)


def keeps_the_old_block(pool, name, letter):
    write(pool, name, letter, release=0)


def copies_all_four_slots(pool, name, letter):
    write(pool, name, letter, filled=pool.block_size)


def forgets_to_repoint(pool, name, letter):
    write(pool, name, letter, repoint=False)


def copies_full_blocks_too(pool, name, letter):
    """Privatises whatever is shared, then looks for room."""
    table, length = pool.tables[name], pool.lengths[name]
    if table and pool.allocator.ref_count(table[-1]) > 1:
        old, [new] = table[-1], pool.allocator.allocate(1).tolist()
        pool.memory.copy_blocks([[old, new, (length - 1) % pool.block_size + 1]])
        table[-1] = new
        pool.allocator.release([old])
    write(pool, name, letter)


def gives_up_before_it_has(pool, name, letter):
    table, offset = pool.tables[name], pool.lengths[name] % pool.block_size
    if offset and pool.allocator.ref_count(table[-1]) > 1:
        old = table[-1]
        pool.allocator.release([old])
        [table[-1]] = pool.allocator.allocate(1).tolist()
        pool.memory.copy_blocks([[old, table[-1], offset]])
        put(pool, name, letter)
    else:
        write(pool, name, letter)


# ---- extend_all(pool, letters)


def need(pool, name, moved_out=0):
    if pool.lengths[name] % pool.block_size == 0:
        return 1
    return int(pool.allocator.ref_count(pool.tables[name][-1]) - moved_out > 1)


def loops_and_raises(pool, letters):
    for name, letter in letters.items():
        write(pool, name, letter)


def undo(pool, before):
    """Puts tables, lengths and counts back; the free list comes back in another order."""
    for name, (table, length) in before.items():
        pool.allocator.share([block for block in table if block not in pool.tables[name]])
        pool.allocator.release([block for block in pool.tables[name] if block not in table])
        pool.tables[name][:], pool.lengths[name] = table, length


def undoes(pool, letters):
    before = {name: (list(pool.tables[name]), pool.lengths[name]) for name in letters}
    try:
        loops_and_raises(pool, letters)
    except PoolExhausted:
        undo(pool, before)
        raise


def counts_new_blocks_only(pool, letters):
    needed = sum(pool.lengths[name] % pool.block_size == 0 for name in letters)
    if needed > pool.allocator.num_free:
        raise PoolExhausted(needed, pool.allocator.num_free)
    loops_and_raises(pool, letters)


def asks_the_counts_before_the_batch(pool, letters):
    """Everybody sees the count that it had when the batch began, and copies by that."""
    owners = {name: need(pool, name) for name in letters}
    needed = sum(owners.values())
    if needed > pool.allocator.num_free:
        raise PoolExhausted(needed, pool.allocator.num_free)
    for name, letter in letters.items():
        write(pool, name, letter, shared=lambda pool, block, copies=owners[name]: bool(copies))


def plans_with_the_counts_before_the_batch(pool, letters):
    """Writes rightly, but asks for a block too many when all owners write."""
    needed = sum(need(pool, name) for name in letters)
    if needed > pool.allocator.num_free:
        raise PoolExhausted(needed, pool.allocator.num_free)
    loops_and_raises(pool, letters)


def a_block_for_everybody(pool, letters):
    """A free block for each of them, needed or not."""
    if len(letters) > pool.allocator.num_free:
        raise PoolExhausted(len(letters), pool.allocator.num_free)
    loops_and_raises(pool, letters)


def looks_at_each_alone(pool, letters):
    for name in letters:
        if need(pool, name) > pool.allocator.num_free:
            raise PoolExhausted(1, pool.allocator.num_free)
    loops_and_raises(pool, letters)


def last_owner_is_forgotten(pool, letters):
    """One less for every block that several writers share, whoever stays behind."""
    needed = 0
    tails = Counter(pool.tables[name][-1] for name in letters if pool.lengths[name] % pool.block_size)
    for name in letters:
        if pool.lengths[name] % pool.block_size == 0:
            needed += 1
    needed += sum(times - 1 for times in tails.values())
    if needed > pool.allocator.num_free:
        raise PoolExhausted(needed, pool.allocator.num_free)
    loops_and_raises(pool, letters)


# ---- drafts(pool, names, parents)


def row_by_row(pool, names, parents):
    for name, parent in zip(names, parents, strict=True):
        new, length = list(pool.tables[names[parent]]), pool.lengths[names[parent]]
        pool.allocator.share(new)
        pool.allocator.release(pool.tables[name][::-1])
        pool.tables[name], pool.lengths[name] = new, length


def losers_first(pool, names, parents):
    new = [(list(pool.tables[names[p]]), pool.lengths[names[p]]) for p in parents]
    for name in names:
        pool.allocator.release(pool.tables[name][::-1])
    for name, (table, length) in zip(names, new, strict=True):
        pool.allocator.share(table)
        pool.tables[name], pool.lengths[name] = table, length


def drafts(pool, names, parents, *, copy=list, share=True, release=True, lengths=True):
    """Right; the wrong ones change one thing each."""
    new = [(copy(pool.tables[names[p]]), pool.lengths[names[p]]) for p in parents]
    for table, _ in new:
        pool.allocator.share(table if share else [])
    for name in names:
        pool.allocator.release(pool.tables[name][::-1] if release else [])
    for name, (table, length) in zip(names, new, strict=True):
        pool.tables[name] = table
        pool.lengths[name] = length if lengths else pool.lengths[name]


def two_names_for_one_list(pool, names, parents):
    drafts(pool, names, parents, copy=lambda table: table)


def tables_only(pool, names, parents):
    drafts(pool, names, parents, share=False, release=False)


def never_releases(pool, names, parents):
    drafts(pool, names, parents, release=False)


def old_lengths(pool, names, parents):
    drafts(pool, names, parents, lengths=False)


def drops_only_the_dropped(pool, names, parents):
    """Frees the drafts that nobody continues, and counts a new owner where one draft is continued twice."""
    new = [(list(pool.tables[names[p]]), pool.lengths[names[p]]) for p in parents]
    for row, times in Counter(parents).items():
        pool.allocator.share(pool.tables[names[row]] * (times - 1))
    for row in set(range(len(names))) - set(parents):
        pool.allocator.release(pool.tables[names[row]])
    for name, (table, length) in zip(names, reversed(new), strict=True):
        pool.tables[name], pool.lengths[name] = table, length


# ---- MyManager


Room = namedtuple("Room", "slots copies")


class Manager:
    """A right one; the wrong ones below change one thing each."""

    def __init__(self, num_blocks, block_size):
        self.allocator, self.block_size = BlockAllocator(num_blocks), block_size
        self.tables, self.lengths = {}, {}

    @property
    def num_free(self):
        return self.allocator.num_free

    def block_tables(self, names):
        return [self.tables[name] for name in names]

    def add(self, name):
        self.tables[name], self.lengths[name] = [], 0

    def fork(self, parent, children):
        for child in children:
            self.allocator.share(self.tables[parent])
            self.tables[child], self.lengths[child] = list(self.tables[parent]), self.lengths[parent]

    def free(self, names):
        for name in names:
            self.allocator.release(self.tables.pop(name)[::-1])
            del self.lengths[name]

    def must_copy(self, table, moved_out):
        return int(self.allocator.ref_count(table[-1]) - moved_out[table[-1]] > 1)

    def plan(self, names, num_tokens):
        moved_out, needs = Counter(), []
        for name in names:
            table, length = self.tables[name], self.lengths[name]
            copies = self.must_copy(table, moved_out) if length % self.block_size else 0
            moved_out[table[-1] if table else None] += copies
            needs.append((copies, -(-(length + num_tokens) // self.block_size) - len(table)))
        return needs

    def extend(self, names, num_tokens=1):
        needs = self.plan(names, num_tokens)
        ids = iter(self.allocator.allocate(sum(map(sum, needs))).tolist())
        slots, copies = [], []
        for name, (copy, new) in zip(names, needs, strict=True):
            self.grow(name, copy, new, num_tokens, ids, slots, copies)
        return Room(slots, copies)

    def grow(self, name, copy, new, num_tokens, ids, slots, copies):
        table, start = self.tables[name], self.lengths[name]
        if copy:
            old, table[-1] = table[-1], next(ids)
            copies.append((old, table[-1], start % self.block_size))
            self.allocator.release([old])
        table += [next(ids) for _ in range(new)]
        self.lengths[name] += num_tokens
        slots += slots_of(table, range(start, start + num_tokens), self.block_size).tolist()

    def reorder(self, names, parents):
        drafts(self, names, parents)


class NeverCopies(Manager):
    def must_copy(self, table, moved_out):
        return 0


class AsksBeforeTheBatch(Manager):
    def must_copy(self, table, moved_out):
        return int(self.allocator.ref_count(table[-1]) > 1)


class OneAfterTheOther(Manager):
    def extend(self, names, num_tokens=1):
        slots, copies = [], []
        for name in names:
            room = super().extend([name], num_tokens)
            slots += room.slots
            copies += room.copies
        return Room(slots, copies)


class NoCountsInFork(Manager):
    def fork(self, parent, children):
        for child in children:
            self.tables[child], self.lengths[child] = list(self.tables[parent]), self.lengths[parent]


class PagesForEveryFork(Manager):
    """Copies the last page already when it forks."""

    def fork(self, parent, children):
        for child in children:
            self.allocator.share(self.tables[parent][:-1])
            own = self.allocator.allocate(min(1, len(self.tables[parent]))).tolist()
            self.tables[child], self.lengths[child] = self.tables[parent][:-1] + own, self.lengths[parent]


class RowByRow(Manager):
    def reorder(self, names, parents):
        row_by_row(self, names, parents)


class CopiesNothing(Manager):
    """Moves the table to a new block and forgets to say what must be copied."""

    def extend(self, names, num_tokens=1):
        return Room(super().extend(names, num_tokens).slots, [])


class FreesWithoutCounting(Manager):
    def free(self, names):
        for name in names:
            del self.tables[name], self.lengths[name]


BUGS = [
    ("fork", "same list", same_list, "how many lists are there"),
    ("fork", "one list for all children", one_list_for_all_children, "how many names for each"),
    ("fork", "no count", no_count, "has the count 1, and 4 table entries name it"),
    ("fork", "counts once", counts_once, "has the count 2, and 4 table entries name it"),
    ("fork", "copies the pages", copies_the_pages, "0 blocks are free, expected 5"),
    ("fork", "forgets the length", forgets_the_length, "the length of b is 0"),
    ("fork", "looks while acting", looks_while_acting, "when do you look at the second name"),
    ("write", "never copies", never_copies, "what will the others read"),
    ("write", "always copies", always_copies, "how many tables name the last block"),
    ("write", "old block freed", frees_the_old_block, "block 2 has the count 0, and 3 table entries"),
    ("write", "old block kept", keeps_the_old_block, "block 2 has the count 4, and 3 table entries"),
    ("write", "copies all four slots", copies_all_four_slots, "which of the four slots of block 2"),
    ("write", "table not re-pointed", forgets_to_repoint, "block 3 has the count 1, and 0 table entries"),
    ("write", "copies full blocks too", copies_full_blocks_too, "will anybody write there again"),
    (
        "write",
        "gives up before it has",
        gives_up_before_it_has,
        "what may have changed before the pool said no",
    ),
    ("extend_all", "loops and raises", loops_and_raises, "what will a say then"),
    ("extend_all", "undo forgets the free order", undoes, "the free list changed"),
    ("extend_all", "new blocks but no copies", counts_new_blocks_only, "what else takes a free one"),
    ("extend_all", "counts before the batch", asks_the_counts_before_the_batch, "when d's turn comes"),
    (
        "extend_all",
        "plans a copy for the last",
        plans_with_the_counts_before_the_batch,
        "who is left with the old block",
    ),
    ("extend_all", "a block for everybody", a_block_for_everybody, "does position 11 need a block"),
    ("extend_all", "each alone", looks_at_each_alone, "was refused, but the"),
    ("extend_all", "one less always", last_owner_is_forgotten, "what else takes a free one"),
    ("drafts", "row by row", row_by_row, "is b's old table still to be found"),
    ("drafts", "losers first", losers_first, "for a moment nobody owned that block"),
    ("drafts", "two names for one list", two_names_for_one_list, "two drafts share one list"),
    ("drafts", "tables only", tables_only, "block 1 has the count 1, and 2 table entries name it"),
    ("drafts", "never releases", never_releases, "whose count changes when a table stops"),
    ("drafts", "old lengths", old_lengths, "the length of"),
    ("drafts", "only the dropped, rows reversed", drops_only_the_dropped, "expected {'a': [0, 1]"),
    ("faulty_line", "fixes the code", 7, "whom would a copy protect"),
    ("faulty_line", "no second write", 3, "does what it says"),
    ("faulty_line", "another text", 4, "what does the failing line expect instead"),
    ("faulty_line", "the line itself", "assert", "the number of one line"),
    ("manager", "never copies", NeverCopies, "how many of them must copy"),
    ("manager", "counts before the batch", AsksBeforeTheBatch, "and who is left with the old block"),
    ("manager", "one after the other", OneAfterTheOther, "who gets one"),
    ("manager", "fork without counts", NoCountsInFork, "who still reads these blocks"),
    ("manager", "pages for every fork", PagesForEveryFork, "do the children need that is not in memory yet"),
    ("manager", "row by row", RowByRow, "is every table read before one is written"),
    ("manager", "copies not reported", CopiesNothing, "0 blocks were copied"),
    ("manager", "free without release", FreesWithoutCounting, "which of d's three blocks"),
]
