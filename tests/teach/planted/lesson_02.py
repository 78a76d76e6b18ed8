"""Wrong solutions of lesson 02, as learners write them. See ../test_planted.py."""

from collections import Counter

from pagedkv.teach.checks._core import ERROR


class PoolExhausted(Exception):
    pass


# ---- release(pool, ids)


def clamps(pool, ids):
    """A block that is free already stays free: nobody is told."""
    for block in ids:
        if pool.in_use[block]:
            pool.in_use[block] = False
            pool.free.append(block)


def trusts(pool, ids):
    for block in ids:
        pool.in_use[block] = False
    pool.free = list(ids) + pool.free


def validates_while_releasing(pool, ids):
    taken = []
    for block in ids:
        if not 0 <= block < len(pool.in_use) or not pool.in_use[block]:
            raise ValueError(f"block {block} is not in use")
        pool.in_use[block] = False
        taken.append(block)
    pool.free = taken + pool.free


def validates_then_appends_twice(pool, ids):
    for block in ids:
        if not 0 <= block < len(pool.in_use) or not pool.in_use[block]:
            raise ValueError(f"block {block} is not in use")
    for block in ids:
        pool.in_use[block] = False
    pool.free = list(ids) + pool.free


def forgets_negative_ids(pool, ids):
    if len(set(ids)) < len(ids) or any(b >= len(pool.in_use) or not pool.in_use[b] for b in ids):
        raise ValueError(f"{ids} are not all in use")
    for block in ids:
        pool.in_use[block] = False
    pool.free = list(ids) + pool.free


def lets_the_list_complain(pool, ids):
    """IndexError from inside instead of an error that names the block."""
    if len(set(ids)) < len(ids) or not all(pool.in_use[block] for block in ids):
        raise ValueError(f"{ids} are not all in use")
    for block in ids:
        pool.in_use[block] = False
    pool.free = list(ids) + pool.free


def one_by_one_to_the_front(pool, ids):
    for block in ids:
        pool.in_use[block] = False
        pool.free.insert(0, block)


def forgets_the_flags(pool, ids):
    pool.free = list(ids) + pool.free


# ---- broken(free, owners, tables)


def compares_totals(free, owners, tables):
    used = sum(count > 0 for count in owners)
    return {"lost"} if len(free) + used != len(owners) else set()


def right(free, owners, tables, *, without=()):
    blocks, named = range(len(owners)), [block for table in tables.values() for block in table]
    found = set()
    if any(block not in blocks for block in free + named):
        found.add("unknown")
    if len(set(free)) < len(free):
        found.add("twice")
    if any(owners[block] > 0 for block in free if block in blocks):
        found.add("held")
    if any(owners[block] == 0 and block not in free for block in blocks):
        found.add("lost")
    if any(owners[block] != named.count(block) for block in blocks):
        found.add("count")
    return found - set(without)


def forgets_twice(free, owners, tables):
    return right(free, owners, tables, without=["twice"])


def counts_tables_only_once(free, owners, tables):
    found = right(free, owners, tables, without=["count"])
    named = {block for table in tables.values() for block in table}
    if any((count > 0) != (block in named) for block, count in enumerate(owners)):
        found.add("count")
    return found


def stops_at_the_first(free, owners, tables):
    return set(sorted(right(free, owners, tables))[:1])


def indexes_unknown_ids(free, owners, tables):
    named = Counter(block for table in tables.values() for block in table)
    found = {"held"} if any(owners[block] > 0 for block in free) else set()
    found |= {"lost"} if any(n == 0 and b not in free for b, n in enumerate(owners)) else set()
    found |= {"twice"} if len(set(free)) < len(free) else set()
    found |= {"count"} if any(n != named[b] for b, n in enumerate(owners)) else set()
    return found


def only_the_free_list(free, owners, tables):
    """Looks for unknown ids in the free list, not in the tables."""
    found = right(free, owners, tables, without=["unknown"])
    return found | ({"unknown"} if any(not 0 <= block < len(owners) for block in free) else set())


def says_held_for_shared(free, owners, tables):
    """Takes a block with two owners for a fault."""
    return right(free, owners, tables) | ({"held"} if max(owners) > 1 else set())


def one_name(free, owners, tables):
    return next(iter(right(free, owners, tables)), "")


# ---- test_allocator(make)


def refuses(call, *args):
    try:
        call(*args)
    except Exception:
        return True
    return False


def happy_path(make):
    pool = make(8)
    ids = list(pool.allocate(3))
    pool.release(ids)
    assert pool.num_free == 8


def only_totals(make):
    """Looks at the refusal and at a second release, but never at who got what."""
    pool = make(4)
    ids = pool.allocate(3)
    assert refuses(pool.allocate, 5)
    pool.release(ids)
    assert pool.num_free == 4


def refusal_without_looking_after(make):
    pool = make(8)
    first, second = pool.allocate(3), pool.allocate(3)
    assert not set(map(int, first)) & set(map(int, second))
    assert refuses(pool.allocate, 4)
    pool.release(first)
    assert refuses(pool.release, first)


def never_gives_back_twice(make):
    pool = make(8)
    first, second = pool.allocate(3), pool.allocate(3)
    assert not set(map(int, first)) & set(map(int, second))
    assert refuses(pool.allocate, 4)
    assert pool.num_free == 2


def demands_an_order(make):
    assert list(make(8).allocate(3)) == [0, 1, 2]


def demands_too_much(make):
    pool = make(8)
    pool.allocate(8)
    assert not refuses(pool.allocate, 1)


# ---- MyAllocator


class Allocator:
    """A right one; the wrong ones below change one thing each."""

    def __init__(self, num_blocks):
        self.free = list(range(num_blocks))
        self.owners = [0] * num_blocks

    @property
    def num_free(self):
        return len(self.free)

    def queue(self):
        return list(self.free)

    def ref_count(self, block):
        return self.owners[block]

    def allocate(self, n=1):
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > len(self.free):
            raise PoolExhausted(f"requested {n}, free {len(self.free)}")
        ids, self.free = self.free[:n], self.free[n:]
        for block in ids:
            self.owners[block] = 1
        return ids

    def share(self, ids):
        for block in ids:
            if not 0 <= block < len(self.owners) or self.owners[block] == 0:
                raise ValueError(f"block {block} is not in use")
        for block in ids:
            self.owners[block] += 1

    def release(self, ids):
        for block, times in Counter(ids).items():
            if not 0 <= block < len(self.owners) or self.owners[block] < times:
                raise ValueError(f"block {block} cannot be released {times} times")
        freed = []
        for block in ids:
            self.owners[block] -= 1
            if self.owners[block] == 0:
                freed.append(block)
        self.free = freed + self.free
        return freed


class Grows(Allocator):
    def allocate(self, n=1):
        while n > len(self.free):
            self.free.append(len(self.owners))
            self.owners.append(0)
        return super().allocate(n)


class RefusesHalfWay(Allocator):
    def allocate(self, n=1):
        ids = []
        for _ in range(n):
            ids += super().allocate(1)
        return ids


class ClampsAtZero(Allocator):
    def release(self, ids):
        freed = []
        for block in ids:
            if self.owners[block] == 1:
                freed.append(block)
            self.owners[block] = max(self.owners[block] - 1, 0)
        self.free = freed + self.free
        return freed


class FirstReaderFreesThePage(Allocator):
    def release(self, ids):
        if len(set(ids)) < len(ids) or any(
            b not in range(len(self.owners)) or not self.owners[b] for b in ids
        ):
            raise ValueError(f"{ids} are not all in use")
        for block in ids:
            self.owners[block] = 0
        self.free = list(ids) + self.free
        return list(ids)


class SharesFreeBlocks(Allocator):
    def share(self, ids):
        for block in ids:
            self.owners[block] += 1


class ToTheBack(Allocator):
    def release(self, ids):
        front = self.free
        freed = super().release(ids)
        self.free = front + freed
        return freed


class RepeatsCountOnce(Allocator):
    def share(self, ids):
        super().share(list(dict.fromkeys(ids)))


class NegativeSlices(Allocator):
    def allocate(self, n=1):
        if n > len(self.free):
            raise PoolExhausted
        ids, self.free = self.free[:n], self.free[n:]
        for block in ids:
            self.owners[block] = 1
        return ids


BUGS = [
    ("free_list", "three handed out", ([0, 1, 2], []), "went to a request that was turned away"),
    ("free_list", "reversed", ([2, 1, 0], [2, 1, 0]), "did night name first"),
    ("free_list", "day's blocks too", ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), "who holds the others"),
    ("free_list", "refusal lengthens the pool", ([0, 1, 2], [0, 1, 2, 8]), "what may a refusal change"),
    ("free_list", "numbers", (3, 3), "a list for each of the two moments"),
    ("release", "clamps at 0", clamps, "was accepted"),
    ("release", "no validation", trusts, "who holds block 0 at that moment"),
    ("release", "validates while releasing", validates_while_releasing, "whose is 3 now"),
    ("release", "appends an id twice", validates_then_appends_twice, "how many owners has block 1"),
    ("release", "negative id", forgets_negative_ids, "what does a list say to index -1"),
    ("release", "error from inside", lets_the_list_complain, "raised IndexError"),
    ("release", "reversed group", one_by_one_to_the_front, "expected [0, 1, 2]"),
    ("release", "flags forgotten", forgets_the_flags, "the flag of a block"),
    ("broken", "compares totals", compares_totals, "may a block be in the free list while somebody owns it"),
    ("broken", "duplicates not seen", forgets_twice, "what will two requests get from this list"),
    ("broken", "set of table entries", counts_tables_only_once, "how many tables name each block"),
    ("broken", "stops at the first", stops_at_the_first, "it misses something"),
    ("broken", "indexes unknown ids", indexes_unknown_ids, "IndexError", ERROR),
    ("broken", "tables not searched", only_the_free_list, "which ids does a pool of this size have"),
    ("broken", "sharing taken for a fault", says_held_for_shared, "but nothing is 'held' here"),
    ("broken", "one name instead of a set", one_name, "expected a set of names"),
    ("allocator_test", "happy path", happy_path, "finds 0 of 3"),
    ("allocator_test", "only totals", only_totals, "finds 1 of 3"),
    ("allocator_test", "not looked after the refusal", refusal_without_looking_after, "refuses too late"),
    ("allocator_test", "no second release", never_gives_back_twice, "takes back everything it is given"),
    ("allocator_test", "demands an order", demands_an_order, "the highest ids first"),
    ("allocator_test", "demands too much", demands_too_much, "does it ask for more than was promised"),
    ("allocator", "grows", Grows, "where should a ninth come from"),
    ("allocator", "refuses half way", RefusesHalfWay, "what has it lost"),
    ("allocator", "clamps at zero", ClampsAtZero, "who owns block 0 at that moment"),
    ("allocator", "first reader frees the page", FirstReaderFreesThePage, "a second reader is left"),
    ("allocator", "shares free blocks", SharesFreeBlocks, "read in a free block"),
    ("allocator", "repeats count once", RepeatsCountOnce, "an id that is named twice"),
    ("allocator", "to the back", ToTheBack, "[4, 3, 0, 1, 2]"),
    ("allocator", "negative slices", NegativeSlices, "what does a slice do with -1"),
]
