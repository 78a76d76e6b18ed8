"""Wrong solutions of lesson 11, as learners write them. See ../test_planted.py."""

import zlib

# ---- fenced_write(ledger, worker, token, block, page)


def blocks_of(ledger, worker):
    return {block for name, who in ledger.owner.items() if who == worker for block in ledger.tables[name]}


def fence(*, number=True, lease=False, block=True, first=False, at_least=False, largest=False, told=True):
    """A write that differs from a right one in what is said."""

    def write(ledger, worker, token, block_id, page):
        known = ledger.token.get(worker)
        refused = number and token != known
        if at_least:
            refused = known is None or token < known
        if largest:
            refused = token < max(ledger.token.values())
        if lease:
            refused = ledger.until.get(worker, 0) <= ledger.now
        refused = refused or (block and block_id not in blocks_of(ledger, worker))
        if first:
            ledger.pages[block_id] = page
        if refused and told:
            raise PermissionError(f"number {token} against {known}")
        if not refused:
            ledger.pages[block_id] = page

    return write


def each_number_once(ledger, worker, token, block, page):
    fence()(ledger, worker, token, block, page)
    ledger.token[worker] += 1


# ---- reap(ledger)


def reaper(
    *, shared=True, number=True, lease=True, strict=False, clamp=False, once=True, per_table=True, all_=False
):
    """A reaper that differs from a right one in what is said."""

    def reap(ledger):
        over = [
            w
            for w, until in ledger.until.items()
            if until < ledger.now or (until == ledger.now and not strict)
        ]
        dead = [name for name, who in ledger.owner.items() if who in over or (all_ and over)]
        gone = [block for name in dead for block in ledger.tables[name]]
        if not per_table:
            gone = list(dict.fromkeys(gone))
        if not clamp and any(gone.count(block) > ledger.counts[block] for block in gone) and once:
            raise ValueError("a count is too small")
        freed = []
        for block in gone:
            ledger.counts[block] = max(0, ledger.counts[block] - 1) if clamp else ledger.counts[block] - 1
            if (ledger.counts[block] == 0 or not shared) and block not in freed:
                freed.append(block)
        for name in dead:
            del ledger.tables[name], ledger.owner[name]
        for worker in over:
            ledger.token[worker] += number
            if lease:
                del ledger.until[worker]
        if not once and any(count < 0 for count in ledger.counts):
            raise ValueError("a count is too small")
        ledger.free += freed
        return freed

    return reap


# ---- PageBox(store)


class Box:
    """A box that differs from a right one in what its class says."""

    checksum, named, refuses, lives, raises = True, True, True, True, False

    def __init__(self, store):
        self.store = store

    def put(self, key, page, seconds=None):
        if self.refuses and seconds is not None and seconds <= 0:
            raise ValueError("a page must live for some time")
        body = (key if self.named else b"") + page
        crc = zlib.crc32(body).to_bytes(4, "little") if self.checksum else bytes(4)
        self.store.set(key, crc + body, seconds if self.lives and (seconds or 0) > 0 else None)

    def get(self, key):
        record = self.store.get(key)
        if record is None:
            return None
        crc, body = record[:4], record[4:]
        whole = not self.checksum or zlib.crc32(body).to_bytes(4, "little") == crc
        if not whole or (self.named and not body.startswith(key)):
            if self.raises:
                raise ValueError("damaged")
            return None
        return body[len(key) if self.named else 0 :]


class NoChecksum(Box):
    checksum = False


class NoName(Box):
    named = False


class AnyTime(Box):
    refuses = False


class ForEver(Box):
    lives = False


class Raises(Box):
    raises = True


class TwoKeys:
    """The page under one key, its checksum under another."""

    def __init__(self, store):
        self.store = store

    def put(self, key, page, seconds=None):
        if seconds is not None and seconds <= 0:
            raise ValueError("a page must live for some time")
        self.store.set(key + b":page", page, seconds)
        self.store.set(key + b":meta", zlib.crc32(key + page).to_bytes(4, "little"), seconds)

    def get(self, key):
        meta, page = self.store.get(key + b":meta"), self.store.get(key + b":page")
        if meta is None or page is None:
            return None
        return page if zlib.crc32(key + page).to_bytes(4, "little") == meta else None


class TwoKeysTidy(TwoKeys):
    """The same; what is left of a page that has lost a part is removed."""

    def get(self, key):
        page = super().get(key)
        if page is None:
            self.store.delete(key + b":meta")
            self.store.delete(key + b":page")
        return page


class DeletedFirst(Box):
    def put(self, key, page, seconds=None):
        self.store.delete(key)
        super().put(key, page, seconds)


BUGS = [
    ("late_writes", "the nap is refused", ("ABE", "CD", "ABCDE"), "was its lease, good until 13, over then"),
    ("late_writes", "the lease stops it", ("ABCE", "", "ABCE"), "who is there to stop it"),
    ("late_writes", "sent though it is over", ("ABCE", "DF", "ABCDEF"), "and it looks at 14: does it send"),
    ("late_writes", "it lands all the same", ("ABCDE", "", "ABCDE"), "what happened between"),
    ("late_writes", "refused without being sent", ("ABCE", "DF", "ABCDE"), "what nobody sends"),
    ("late_writes", "a worker banned", ("ABC", "DE", "ABCDE"), "was this worker ever given up"),
    ("late_writes", "a list of lists", [["A"], ["D"], ["E"]], "three words"),
    ("fenced_write", "number not compared", fence(number=False), "whose is it"),
    ("fenced_write", "the lease instead", fence(lease=True), "whose is it"),
    ("fenced_write", "at least the one on record", fence(at_least=True), "who gave out that number"),
    ("fenced_write", "the largest of all", fence(largest=True), "is a number a rank"),
    ("fenced_write", "block not compared", fence(block=False), "is the block"),
    ("fenced_write", "writes first", fence(first=True), "what had happened when it refused"),
    ("fenced_write", "each number once", each_number_once, "this write is in order"),
    ("fenced_write", "silent", fence(told=False), "expected PermissionError"),
    ("reap", "shared blocks too", reaper(shared=False), "which blocks do c and d still read"),
    ("reap", "number stays", reaper(number=False), "what will stop it"),
    ("reap", "lease stays", reaper(lease=False), "who was given up has no lease"),
    ("reap", "a second too late", reaper(strict=True), "which blocks do c and d still read"),
    ("reap", "clamped", reaper(clamp=True), "is that a state to go on from"),
    ("reap", "refuses too late", reaper(once=False), "what comes first"),
    ("reap", "each block once", reaper(per_table=False), "which blocks do c and d still read"),
    ("reap", "everybody", reaper(all_=True), "which blocks do c and d still read"),
    ("page_box", "two keys", TwoKeys, "how many things can vanish one by one"),
    ("page_box", "two keys, tidy", TwoKeysTidy, "between two writes to the store"),
    ("page_box", "no checksum", NoChecksum, "who notices a damaged page"),
    ("page_box", "no name", NoName, "whose page it is"),
    ("page_box", "any time", AnyTime, "no time at all"),
    ("page_box", "for ever", ForEver, "who was told when it ends"),
    ("page_box", "raises", Raises, "who recomputes it"),
    ("page_box", "deleted first", DeletedFirst, "between two writes to the store"),
    ("racing_lines", "the deed", (4, 8), "who made sure that the block is still in use"),
    ("racing_lines", "the moment", (3, 8), "does it still hold"),
    ("racing_lines", "the return", (2, 10), "keeps that from being heard"),
    ("racing_lines", "one line", 2, "two numbers of lines"),
]
