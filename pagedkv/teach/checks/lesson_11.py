"""Checks of lesson 11: late writes by hand, a fenced write, a reaper, a page as one value, two faulty lines."""

import copy
from dataclasses import dataclass, field
from typing import Any

from pagedkv.store.record import Layout
from pagedkv.teach import pages, story, variants

from ._core import SETTING, Learner, Wrong, _Raised, check, expect, expect_refusal, seeded, show, sizes


@dataclass
class Ledger:
    """What the one place keeps, as the lesson builds it."""

    free: list = field(default_factory=list)
    counts: list = field(default_factory=list)
    tables: dict = field(default_factory=dict)  # sequence -> block ids
    owner: dict = field(default_factory=dict)  # sequence -> worker
    until: dict = field(default_factory=dict)  # worker -> when its lease ends
    token: dict = field(default_factory=dict)  # worker -> the number that its writes must carry
    pages: dict = field(default_factory=dict)  # block -> letters
    now: int = 0

    def __repr__(self) -> str:
        return f"<ledger at second {self.now}>"


def two_workers() -> Ledger:
    """The wall: worker 1 has a and b, worker 2 has c and d; both leases end at second 9, both numbers are 1."""
    pool = story.at_the_wall()
    tables = {name: pool.table(name) for name in story.ANSWERS}
    return Ledger(
        free=pool.manager.allocator.queue(),
        counts=pool.owners(),
        tables=tables,
        owner={"a": 1, "b": 1, "c": 2, "d": 2},
        until={1: 9, 2: 9},
        token={1: 1, 2: 1},
        pages={block: pool.letters.block(block) for table in tables.values() for block in table},
        now=5,
    )


def _changed(before: Ledger, after: Ledger) -> list[str]:
    """What differs, in words; the order of the free list counts for nothing."""
    found = []
    for name, was in vars(before).items():
        now = getattr(after, name)
        same = sorted(was) == sorted(now) if name == "free" else was == now
        if not same:
            found.append(f"{name} is {show(now)}, expected {show(was)}")
    return found


def _drawing(ledger: Ledger) -> Any:
    memory = pages.Letters(len(ledger.counts), 4)
    try:
        for block, letters in ledger.pages.items():
            memory.write(range(4 * block, 4 * block + len(letters)), letters)
        return pages.strip_of(
            ledger.tables,
            num_blocks=len(ledger.counts),
            letters=memory,
            free=ledger.free,
            caption="The pool now",
        )
    except (ValueError, TypeError):
        return None


# ---- by hand


@check("late writes", wants="value")
def late_writes(learner: Learner) -> str:
    """Which of six writes land, which are refused, and which land if nobody compares tokens."""
    case, answer = variants.late_writes(SETTING.variant), learner.value
    fits = isinstance(answer, tuple | list) and len(answer) == 3 and all(type(word) is str for word in answer)
    letters = {letter for letter, *_ in case.writes}
    if not fits or not all(set(word) <= letters for word in answer):
        raise Wrong(
            f"answer is {show(answer)}; it takes three words made of the letters {''.join(sorted(letters))}."
        )
    lands, refused, alone = (set(word) for word in answer)
    truth_lands, truth_refused, truth_alone = map(set, case.answer)
    for letter, worker, looked, arrives in case.writes:
        end = case.ends(worker, looked)
        if (letter in alone) != (letter in truth_alone):
            question = (
                "its worker sent it: who is there to stop it?"
                if letter in truth_alone
                else f"its lease ended at {end}, and it looks at {looked}: does it send?"
            )
            raise Wrong(f"Without tokens, write {letter} is not as you say.", question)
        if letter in lands and letter in refused:
            raise Wrong(f"Write {letter} cannot both land and be refused.")
        if (letter in lands) == (letter in truth_lands) and (letter in refused) == (letter in truth_refused):
            continue
        if letter in truth_refused:
            question = f"the lease ended at {end} and the write arrives at {arrives}: what happened between?"
        elif letter in truth_lands and arrives > looked:
            question = f"it slept from {looked} to {arrives}: was its lease, good until {end}, over then?"
        elif letter in truth_lands:
            question = f"its lease is good until {end}: was this worker ever given up?"
        else:
            question = "can a store refuse what nobody sends?"
        raise Wrong(f"With tokens, write {letter} is not as you say.", question)
    return (
        "Who looks at the lease too late stops by itself. Who looked in time and comes late needs the token."
    )


# ---- fenced_write(ledger, worker, token, block, page)


@check("fenced_write")
def fenced_write(learner: Learner) -> str:
    """`fenced_write(ledger, worker, token, block, page)`: a script that writes a page, or refuses."""
    ledger = two_workers()
    _writes(learner, ledger, 1, 1, 3, "ht? ", "worker 1 writes a's last page", "this write is in order")
    _writes(learner, ledger, 1, 1, 4, "ht? ", "and b's", "it may write more than once")
    _writes(learner, ledger, 2, 1, 5, "ht? ", "worker 2 writes c's", "its number is 1, too")
    ledger.token = {1: 33, 2: 34}
    question = "worker 2 has a higher number, and its own blocks: is a number a rank?"
    _writes(learner, ledger, 1, 33, 3, "ht: ", "numbers 33 and 34 are on record, 33 writes", question)
    _refused(
        learner,
        _given_up(),
        *(1, 1, 3, "ht, "),
        "worker 1 wakes: number 1 against 2",
        "which number is on record for worker 1?",
    )
    restarted = _given_up()
    restarted.until[1], restarted.owner["e"] = 20, 1
    restarted.tables["e"] = [restarted.tables["c"].pop()]
    _refused(
        learner,
        restarted,
        *(1, 1, 3, "ht, "),
        "worker 1 was started again, has a lease, and e in block 3; now the old process wakes with number 1",
        "the lease is good: whose is it?",
    )
    rejoined = _given_up()
    rejoined.until[1] = 20
    _refused(
        learner,
        rejoined,
        *(1, 2, 3, "ht, "),
        "worker 1 has joined again, number 2 is right; block 3 is c's now",
        "the number is right: is the block?",
    )
    _refused(
        learner,
        two_workers(),
        *(1, 2, 3, "ht, "),
        "a number that was never given to worker 1",
        "who gave out that number?",
    )
    _refused(
        learner,
        two_workers(),
        *(3, 1, 3, "ht, "),
        "a worker that never joined",
        "what is on record for worker 3?",
    )
    _refused(
        learner,
        two_workers(),
        *(2, 1, 3, "ht; "),
        "worker 2 writes into a's block",
        "whose sequence has block 3?",
    )
    _refused(
        learner,
        two_workers(),
        *(1, 1, 6, "ht; "),
        "block 6 is free",
        "which sequence has block 6 in its table?",
    )
    rng, high = seeded(11), two_workers()
    for _ in range(200):
        ledger = copy.deepcopy(high)
        ledger.token = {worker: int(rng.integers(1, 5)) for worker in (1, 2)}
        worker, token = int(rng.integers(1, 3)), int(rng.integers(1, 5))
        block = int(rng.integers(2, 8))
        case = (learner, ledger, worker, token, block, "now ")
        about = f"on record are {ledger.token}, a and b are 1's, c and d are 2's"
        question = "two questions: is it the worker's present number, and is it the worker's block?"
        if token == ledger.token[worker] and block in ({3, 4} if worker == 1 else {2, 5}):
            _writes(*case, about, question)
        else:
            _refused(*case, about, question)
    return "Old numbers, numbers of nobody, other people's blocks: refused, and nothing changed."


def _given_up() -> Ledger:
    """Worker 1 was given up, a and b are gone, and c and d have gone on in blocks 3 and 4."""
    ledger = two_workers()
    ledger.now, ledger.token[1], ledger.until = 12, 2, {2: 15}
    for name, block in (("c", 3), ("d", 4)):
        ledger.tables[name].append(block)
        ledger.pages[block] = "no··"
    for name in "ab":
        del ledger.tables[name], ledger.owner[name]
    ledger.counts[:2] = [2, 2]
    return ledger


def _writes(learner, ledger, worker, token, block, page, about, question) -> None:
    expected = copy.deepcopy(ledger)
    expected.pages[block] = page
    try:
        learner(ledger, worker, token, block, page)
    except _Raised as raised:
        if isinstance(raised.error, PermissionError):
            raise Wrong(f"{about}: refused ({raised.error}).", question, _drawing(ledger)) from None
        raise
    if changed := _changed(expected, ledger):
        raise Wrong(f"{about}: afterwards {changed[0]}.", question, _drawing(ledger))


def _refused(learner, ledger, worker, token, block, page, about, question) -> None:
    before = copy.deepcopy(ledger)
    try:
        expect_refusal(learner, ledger, worker, token, block, page, error=PermissionError, question=question)
    except Wrong as wrong:
        raise Wrong(f"{about}: {wrong.seen}", question, _drawing(ledger)) from None
    if changed := _changed(before, ledger):
        raise Wrong(f"{about}: refused, but {changed[0]}.", "what had happened when it refused?")


# ---- reap(ledger)


@check("reap")
def reap(learner: Learner) -> str:
    """`reap(ledger)`: give up every worker whose lease is over; returns the blocks that came free."""
    ledger = two_workers()
    ledger.now, ledger.until[2] = 9, 13
    _reaps(
        learner, ledger, "the lease of worker 1 ends at 9, and it is 9", "which blocks do c and d still read?"
    )
    again = copy.deepcopy(ledger)
    _reaps(learner, again, "the reaper looks a second time", "what is left of worker 1 to be given up?")
    ledger.until[1], ledger.now = 14, 10
    _reaps(
        learner, ledger, "worker 1 has joined again and is alive", "its lease is good until 14: what is over?"
    )
    early = two_workers()
    early.now = 8
    _reaps(learner, early, "it is 8, and both leases end at 9", "whose lease is over?")
    late = two_workers()
    late.now = 30
    _reaps(learner, late, "both leases are over", "who still reads block 0 when all four are gone?")
    handed = two_workers()
    handed.owner["b"], handed.now, handed.until[2] = 2, 9, 13
    _reaps(learner, handed, "b was handed over to worker 2 before", "whose is b now?")
    idle = two_workers()
    idle.until[3], idle.token[3] = 4, 1
    _reaps(learner, idle, "worker 3 had no sequence, and its lease is over", "may worker 3 still write?")
    _broken_counts(learner)
    rng = seeded(110)
    for _ in range(150):
        ledger = _random_ledger(rng, int(rng.choice(sizes(6, 8, 12))))
        _reaps(
            learner,
            ledger,
            f"a random pool, it is {ledger.now}, leases end at {ledger.until}",
            "count by hand",
        )
        _reaps(learner, ledger, "the same pool a second time", "what is left to be given up?")
    return "Shared blocks stay, each block comes free once, and the number of whoever is given up grows."


def _broken_counts(learner: Learner) -> None:
    """A count that is too small already: the ledger is wrong, and somebody must hear of it."""
    ledger = two_workers()
    ledger.counts[1], ledger.now, ledger.until[2] = 1, 9, 13
    before = copy.deepcopy(ledger)
    question = "two tables to be given up name block 1, and its count is 1: is that a state to go on from?"
    expect_refusal(learner, ledger, question=question, drawing=_drawing(before))
    if changed := _changed(before, ledger):
        raise Wrong(
            f"It refused the wrong count of block 1, but {changed[0]}.", "all or nothing: what comes first?"
        )


def _reaps(learner: Learner, ledger: Ledger, about: str, question: str) -> None:
    """One call against the rule; the ledger goes on as the learner left it."""
    expected = copy.deepcopy(ledger)
    freed = _reap(expected)
    drawing = _drawing(ledger)
    got = learner(ledger)
    if not isinstance(got, list | tuple) or sorted(got) != sorted(freed):
        raise Wrong(f"{about}: it returned {show(got)}, expected {show(freed)}.", question, drawing)
    if changed := _changed(expected, ledger):
        told = f"{about}: afterwards {changed[0]}."
        if changed[0].startswith("token"):
            question = "the worker may be asleep and wake: what will stop it?"
        elif changed[0].startswith("until"):
            question = "who was given up has no lease; who was not has the one it had: which is it?"
        raise Wrong(told, question, drawing)


def _reap(ledger: Ledger) -> list[int]:
    freed = []
    for worker in [worker for worker, until in ledger.until.items() if until <= ledger.now]:
        del ledger.until[worker]
        ledger.token[worker] += 1
        for name in [name for name, who in ledger.owner.items() if who == worker]:
            del ledger.owner[name]
            for block in ledger.tables.pop(name):
                ledger.counts[block] -= 1
                if ledger.counts[block] == 0:
                    freed.append(block)
    ledger.free += freed
    return freed


def _random_ledger(rng, num_blocks: int) -> Ledger:
    tables = {
        name: rng.permutation(num_blocks)[: rng.integers(1, 5)].tolist()
        for name in "abcdef"[: rng.integers(2, 7)]
    }
    counts = [sum(table.count(block) for table in tables.values()) for block in range(num_blocks)]
    return Ledger(
        free=[block for block, count in enumerate(counts) if not count],
        counts=counts,
        tables=tables,
        owner={name: int(rng.integers(1, 4)) for name in tables},
        until={worker: int(rng.integers(3, 9)) for worker in (1, 2, 3)},
        token={worker: int(rng.integers(1, 6)) for worker in (1, 2, 3)},
        now=int(rng.integers(3, 9)),
    )


# ---- PageBox(store): put(key, page, seconds=None), get(key)

KEYS = [b"evening" + bytes([number]) for number in range(8)]


class Shelf:
    """A small Redis of values: `set(key, value, seconds=None)`, `get(key)`, `delete(key)`; anything may vanish.

    It remembers the state after each call that changed it, in `states`.
    """

    def __init__(self):
        self.values: dict[bytes, tuple[bytes, float | None]] = {}
        self.now = 0.0
        self.states: list[dict] = []

    def set(self, key: bytes, value: bytes, seconds: float | None = None) -> None:
        if type(key) is not bytes or type(value) is not bytes:
            raise TypeError(f"keys and values are bytes, got {type(key).__name__} and {type(value).__name__}")
        if seconds is not None and seconds <= 0:
            raise RuntimeError(f"invalid expire time: {seconds}")
        self.values[key] = value, None if seconds is None else self.now + seconds
        self.states.append(dict(self.values))

    def get(self, key: bytes) -> bytes | None:
        value, until = self.values.get(key, (None, None))
        return None if until is not None and until <= self.now else value

    def delete(self, key: bytes) -> None:
        self.values.pop(key, None)
        self.states.append(dict(self.values))

    def __repr__(self) -> str:
        return "<shelf>"


@check("PageBox", wants="class", forbidden=(Layout.fault, Layout.pack))
def page_box(learner: Learner) -> str:
    """`PageBox(store)` with `put(key, page, seconds=None)` and `get(key)`: the page that was put, or None."""
    shelf = Shelf()
    box = learner(shelf)
    if box.get(KEYS[1]) is not None:
        raise Wrong(
            "Nothing was put yet, and get found something.", "what does get say of a page that is not there?"
        )
    for key, page in ((KEYS[1], b" nig"), (KEYS[0], bytes(4)), (KEYS[2], b"")):
        box.put(key, page)
        expect(box.get, key, gives=page, question="what goes in must come out", about=f"{show(page)} was put")
    _vanishing(learner)
    _replaced(learner)
    _damaged(learner)
    _expiring(learner)
    rng = seeded(111)
    for _ in range(60):
        shelf = Shelf()
        box, put = learner(shelf), {}
        for _ in range(12):
            key = KEYS[int(rng.integers(8))]
            put[key] = rng.bytes(int(rng.choice(sizes(1, 4, 16))))
            box.put(key, put[key])
        for key in KEYS:
            expect(box.get, key, gives=put.get(key), question="the last page that was put under this key")
    return "One value a page: it is there whole and under its own name, or it is not there."


def _vanishing(learner: Learner) -> None:
    shelf = Shelf()
    box = learner(shelf)
    box.put(KEYS[1], b" nig")
    for gone in list(shelf.values):
        rest = Shelf()
        rest.values = {key: value for key, value in shelf.values.items() if key != gone}
        got = _got(learner, rest, KEYS[1], f"the store dropped {show(gone)} to make room")
        if got is not None:
            question = "the page has lost a part: what do you hand out?"
            raise Wrong(f"The store dropped {show(gone)} to make room: get gave {show(got)}.", question)
        if rest.values:
            raise Wrong(
                f"The store dropped {show(gone)} to make room, and {show(list(rest.values))} stays there for ever.",
                "of one page, how many things can vanish one by one?",
            )


def _replaced(learner: Learner) -> None:
    shelf = Shelf()
    learner(shelf).put(KEYS[1], b" nig")
    learner(shelf).put(KEYS[3], b"ht, ")
    before = len(shelf.states)
    learner(shelf).put(KEYS[1], b" day")
    for state in shelf.states[before:]:
        half = Shelf()
        half.values = dict(state)
        got = _got(learner, half, KEYS[1], "a reader comes in the middle of a put")
        if got not in (b" nig", b" day"):
            question = "between two writes to the store, what does a reader find?"
            raise Wrong(
                f"A reader in the middle of a put got {show(got)}, expected the old or the new.", question
            )


def _damaged(learner: Learner) -> None:
    shelf = Shelf()
    box = learner(shelf)
    box.put(KEYS[1], b" nig")
    box.put(KEYS[3], b"ht, ")
    for key, (value, _) in list(shelf.values.items()):
        cuts = [(value[:length], f"cut to {length} bytes") for length in range(len(value))]
        flips = [
            (
                value[: bit // 8] + bytes([value[bit // 8] ^ 1 << bit % 8]) + value[bit // 8 + 1 :],
                f"bit {bit} flipped",
            )
            for bit in range(8 * len(value))
        ]
        for data, what in cuts + flips:
            other = Shelf()
            other.values = {**shelf.values, key: (data, None)}
            for wanted, page in ((KEYS[1], b" nig"), (KEYS[3], b"ht, ")):
                got = _got(learner, other, wanted, what)
                if got not in (page, None):
                    raise Wrong(f"{what}: get gave {show(got)}.", "who notices a damaged page?")
    keys = list(shelf.values)
    swapped = Shelf()
    swapped.values = dict(zip(keys, reversed(shelf.values.values()), strict=True))
    got = _got(learner, swapped, KEYS[1], "two values changed places")
    if got not in (b" nig", None):
        question = "the checksum is right: how do you know whose page it is?"
        raise Wrong(f"Two values changed places, and get gave {show(got)}.", question)


def _expiring(learner: Learner) -> None:
    for seconds in (0, -10):
        shelf = Shelf()
        box = learner(shelf)
        expect_refusal(
            box.put, KEYS[1], b" nig", seconds, question="a page that is to live for no time at all?"
        )
        if shelf.values:
            raise Wrong(
                f"put refused {seconds} seconds, and {show(list(shelf.values))} is there.", "what came first?"
            )
    shelf = Shelf()
    box = learner(shelf)
    box.put(KEYS[1], b" nig", 600)
    for shelf.now in (0, 599):
        about = f"after {shelf.now} of its 600 seconds"
        expect(box.get, KEYS[1], gives=b" nig", about=about, question="how long is the page to be kept?")
    shelf.now = 600
    if (got := box.get(KEYS[1])) is not None:
        raise Wrong(f"After 600 of its 600 seconds get gave {show(got)}.", "who was told when it ends?")
    if alive := [key for key, (_, until) in shelf.values.items() if until is None]:
        raise Wrong(
            f"The page is over, and {show(alive)} stays for ever.", "does the time hold for the whole record?"
        )


def _got(learner: Learner, shelf: Shelf, key: bytes, about: str) -> Any:
    """What `get` finds; an exception is no answer to damage."""
    try:
        return learner(shelf).get(key)
    except _Raised as raised:
        kind = type(raised.error).__name__
        raise Wrong(
            f"{about}: {kind}: {raised.error}, expected None.",
            "a page that cannot be read is a miss: who recomputes it?",
        ) from None


# ---- the faulty lines

FAULTY = 2, (7, 8)


@check("the faulty lines", wants="value")
def racing_lines(learner: Learner) -> str:
    """The line that lets two workers go wrong, and the line that hides it."""
    answer = learner.value
    fits = isinstance(answer, tuple | list) and len(answer) == 2
    if not fits or not all(type(line) is int and 1 <= line <= 10 for line in answer):
        raise Wrong(f"answer is {show(answer)}; it takes two numbers of lines, 1 to 10.")
    race, hidden = answer
    if race != FAULTY[0]:
        questions = {
            3: "nothing goes wrong in this moment by itself: what was found out before it, and does it still hold?",
            4: "adding one in a single command is right: who made sure that the block is still in use?",
            6: "one command that reads and writes: can anything come between?",
            10: "the block has no reader, as far as this worker knows: who might know otherwise?",
        }
        raise Wrong(
            f"Line {race} does what it should.",
            questions.get(race, "where is a question apart from the deed?"),
        )
    if hidden not in FAULTY[1]:
        question = (
            "a count below 0 says that somebody was wrong before: which line keeps that from being heard?"
        )
        raise Wrong(f"The first is right. Line {hidden} hides nothing.", question)
    return "Ask and act in one script. And a count below 0 is an error to be told, not a number to be mended."
