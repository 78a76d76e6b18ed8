"""Checks of lesson 08: the wall by hand, who gives way, coming back, and who is let in."""

import functools
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagedkv.attention import softmax
from pagedkv.cache import PagedKVCache
from pagedkv.lm import Llama
from pagedkv.manager import BlockManager
from pagedkv.serving import Engine, Scheduler
from pagedkv.teach import pages, story, variants

from ._core import SETTING, Learner, Wrong, check, expect, seeded, show

# ---- by hand


@check("the wall by hand", wants="value")
def the_wall(learner: Learner) -> str:
    """Both walls of the story: who gives way, blocks that come free, tokens to compute again."""
    case, answer = variants.giving_way(SETTING.variant), learner.value
    rows = list(answer) if isinstance(answer, tuple | list) else []
    if len(rows) != 2 or not all(isinstance(row, tuple | list) and len(row) == 3 for row in rows):
        raise Wrong(
            f"answer is {show(answer)}; it takes two rows of three: (who, blocks that come free, tokens again)."
        )
    for number, row in enumerate(rows, start=1):
        pool, running, _ = case.wall(number)
        victim = running[-1]
        held, tokens = len(pool.table(victim)), pool.manager.length(victim)
        strip = pool.strip(f"Wall {number}")
        who, freed, again = row
        if who != victim:
            raise Wrong(
                f"Wall {number}: you let {who!r} give way.",
                f"{', '.join(case.answers)} came in this order: who of those that run came last?",
                strip,
            )
        if freed != (truth := len(pool.free(victim))):
            hint = f"{victim} has {held} blocks in its table: who else reads them?"
            if freed != held:
                hint = f"which of {victim}'s blocks have no owner but {victim}?"
            raise Wrong(f"Wall {number}: you say {show(freed)} blocks come free, not {truth}.", hint, strip)
        if again != tokens:
            raise Wrong(
                f"Wall {number}: you say {show(again)} tokens must be computed again.",
                f"{victim} comes back to an empty table: which positions hold keys and values now?",
                strip,
            )
    told = "; ".join(
        f"{who}: {freed} {'block' if freed == 1 else 'blocks'}, {again} tokens" for who, freed, again in rows
    )
    return f"{told}. What others still read does not come free."


# ---- preempt_until(server)


@dataclass(eq=False)
class _Request:
    name: str
    prompt: list
    new: int
    text: list = field(default_factory=list)

    @property
    def known(self) -> int:
        return len(self.prompt) + len(self.text)


class _Server:
    """Like the lesson's: a manager, those that wait and those that run, the oldest first."""

    def __init__(self, manager: BlockManager, running: list[_Request], waiting: list[_Request]):
        self.manager, self.running, self.waiting = manager, list(running), deque(waiting)

    @property
    def names(self) -> tuple[list[str], list[str]]:
        return [request.name for request in self.running], [request.name for request in self.waiting]

    def __repr__(self) -> str:
        return "server"


def _server(manager: BlockManager, waiting: tuple[str, ...] = ()) -> _Server:
    """Everybody in the manager runs and has written two tokens."""
    running = [_Request(name, list(range(manager.length(name) - 1)), 99, [7, 8]) for name in manager.seq_ids]
    return _Server(manager, running, [_Request(name, [1, 2, 3], 9) for name in waiting])


def _victims(manager: BlockManager) -> list[str]:
    """Who gives way, on a copy of a manager."""
    copy = BlockManager(manager.num_blocks, manager.block_size)
    copy.restore(manager.snapshot())
    names, victims = copy.seq_ids, []
    while names and not copy.can_extend(names):
        victims.append(names.pop())
        copy.free(victims[-1])
    return victims


def _gives_way(learner: Learner, server: _Server, about: str) -> None:
    manager = server.manager
    running, waiting = server.names
    requests = {request.name: request for request in [*server.running, *server.waiting]}
    need, free = manager.blocks_needed(running), manager.num_free
    victims = _victims(manager)
    survivors = [name for name in running if name not in victims]
    before = pages.strip(manager, caption=f"Before: {', '.join(running)} want one token each")
    learner(server)
    after, queue = server.names
    state = f"{about}: {', '.join(running)} run and need {need} blocks, {free} are free.\nAfterwards"
    gone = [name for name in running if name not in after]
    if after != [name for name in running if name not in gone] or set(gone) & set(after):
        raise Wrong(f"{state} {after} run.", "who stays, and in which order had they come?", before)
    if gone != [name for name in running if name in victims]:
        raise Wrong(
            f"{state} {gone or 'nobody'} gave way; expected {victims[::-1] or 'nobody'}.",
            _why_others(gone, victims, running),
            before,
        )
    if registered := [name for name in gone if name in manager.seq_ids]:
        raise Wrong(f"{state} the manager still holds {registered}.", "who gives their blocks back?", before)
    if set(manager.seq_ids) != set(survivors):
        raise Wrong(f"{state} the manager holds {manager.seq_ids}.", "who still needs their table?", before)
    expected = victims[::-1] + waiting
    if queue != expected:
        raise Wrong(
            f"{state} {queue} wait in this order, expected {expected}.",
            "of those that wait, who came first?",
        )
    for name in victims:
        if len(requests[name].text) != 2 or requests[name] not in server.waiting:
            raise Wrong(
                f"{state} {name} has written {show(requests[name].text)}, expected [7, 8] as before.",
                "the reader of this text has seen it already: may it change?",
            )
    if survivors and not manager.can_extend(survivors):
        raise Wrong(f"{state} the rest still finds no room.", "did the pool change as you thought?", before)


def _why_others(gone: list[str], victims: list[str], running: list[str]) -> str:
    if not gone:
        return "who goes on if nobody gives way?"
    if not victims:
        return "is there room for everybody already?"
    if gone != running[len(running) - len(gone) :]:
        return "who has run longest, and loses most if it must begin again?"
    if len(gone) < len(victims):
        return "one has left: ask the pool again, is there room for the rest now?"
    return "who has left needs no block any more: what do the others need now?"


@check("preempt_until", forbidden=(Scheduler,))
def preempt_until(learner: Learner) -> str:
    """`preempt_until(server)`: the last that arrived give way, until all that still run find room for a token."""
    _gives_way(learner, _server(story.at_the_wall().manager), "The wall of lesson 04")
    _gives_way(learner, _server(story.second_wall().manager), "The next wall")
    _gives_way(learner, _server(story.diverged().manager), "Room for all")
    small = BlockManager(4, 4)
    small.add("a")
    small.extend("a", 10)
    small.fork("a", [*"bcd"])
    _gives_way(learner, _server(small), "A pool of 4 blocks; d and c share all of theirs")
    full = BlockManager(8, 4)
    for name in "abcd":
        full.add(name)
        full.extend(name, 8)
    _gives_way(learner, _server(full, ("late", "later")), "Four texts that fill their blocks")
    rng = seeded(8)
    for trial in range(60):
        _gives_way(learner, _random_server(rng), f"Random server {trial}")
    return "Both walls of the story, a victim that frees nothing, and 60 random servers."


def _random_server(rng: np.random.Generator) -> _Server:
    size = int(rng.choice([1, 2, 4]))
    manager = BlockManager(int(rng.integers(10, 16)), size)
    for name in "abcdef"[: rng.integers(1, 7)]:
        others = manager.seq_ids
        if others and rng.random() < 0.4:
            manager.fork(str(rng.choice(others)), [name])
        else:
            manager.add(name)
        tokens = int(rng.integers(1, 2 * size + 1))
        if manager.can_extend(name, tokens):
            manager.extend(name, tokens)
    return _server(manager, ("late",) * int(rng.integers(0, 2)))


# ---- resume(model, cache, request)


class _Writer(_Request):
    """A request with random numbers of its own, as the lesson's."""

    def __init__(self, name: str, prompt: list[int], new: int, seed: int):
        super().__init__(name, prompt, new)
        self.seed, self.stream = seed, np.random.default_rng(seed)

    def choose(self, logits: np.ndarray) -> int:
        """Draw the next token; takes one number from the stream."""
        logits = np.asarray(logits, float)
        if logits.ndim != 1:
            raise ValueError(f"choose takes the logits of one token [vocabulary], got {logits.shape}")
        ends = np.cumsum(softmax(logits / 0.8)[0])
        return min(int(np.searchsorted(ends, self.stream.random() * ends[-1], side="right")), len(logits) - 1)

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self.prompt)} + {len(self.text)} tokens>"


class _Cache(PagedKVCache):
    def __repr__(self) -> str:
        return "cache"


class _Model(Llama):
    def __init__(self):
        self.__dict__.update(_shipped().__dict__)

    def __repr__(self) -> str:
        return "model"


@functools.cache
def _shipped() -> Llama:
    return Llama.load()


def _new_cache(model: Llama, num_blocks: int) -> _Cache:
    c = model.config
    return _Cache(num_blocks, 4, c.num_kv_heads, c.head_dim, num_layers=c.num_layers, poison=True)


def _alone(model: Llama, prompt: list[int], new: int, seed: int) -> _Writer:
    request, cache = _Writer("alone", prompt, new, seed), _new_cache(model, 16)
    cache.add("alone")
    _write(model, cache, request, prompt)
    while len(request.text) < new:
        _write(model, cache, request, request.text[-1:])
    return request


def _write(model: Llama, cache: PagedKVCache, request: _Writer, tokens: list[int]) -> None:
    request.text.append(request.choose(model.next_logits(cache, request.name, [tokens])[0]))


def _comes_back(learner: Learner, model: Llama, prompt: str, new: int, seed: int, times: tuple[int, ...]):
    """Begin with the learner's function, and begin again with it after `times` tokens."""
    tokens, decode = model.tokenizer.encode(prompt).tolist(), model.tokenizer.decode
    alone = _alone(model, tokens, new, seed)
    cache = _new_cache(model, 16)
    cache.add("neighbour")
    model.next_logits(cache, "neighbour", [tokens])
    request = _Writer("d", list(tokens), new, seed)
    stops = [0, *times]
    for written in range(new):
        if written in stops:
            if written:
                cache.free("d")
            before = list(request.text)
            learner(model, cache, request)
            _right_so_far(request, before, alone, cache, decode)
        else:
            _write(model, cache, request, request.text[-1:])
    if request.text != alone.text:
        raise Wrong(
            f"d goes on as {decode(request.text)!r}, alone it writes {decode(alone.text)!r}.",
            "what does the model read when it chooses a letter, and is all of it in the cache again?",
        )


def _right_so_far(request: _Writer, before: list, alone: _Writer, cache: PagedKVCache, decode) -> None:
    n, wanted = len(before), alone.text[: len(before) + 1]
    said = f"After {n} letters d was preempted, then resumed." if n else "d begins."
    if list(request.text[:n]) != before:
        raise Wrong(
            f"{said} Its text was {decode(before)!r}, now it is {decode(request.text)!r}.",
            "the reader of this text has seen it already: may it change?",
        )
    if "d" not in cache.seq_ids:
        raise Wrong(f"{said} The cache does not know d.", "what does add do, and what does extend?")
    held, needed = cache.length("d"), len(request.prompt) + n
    if held != needed:
        question = "of which tokens does the next letter need keys and values?"
        if n and held == len(request.prompt):
            question = "the prompt is back: who remembers what d wrote itself?"
        raise Wrong(f"{said} The cache holds {held} of its tokens, expected {needed}.", question)
    if len(request.text) != n + 1:
        raise Wrong(
            f"{said} Its text has {len(request.text)} letters, expected {n + 1}.",
            "the last token's logits say something about the next letter: who chooses it?",
        )
    untouched = np.random.default_rng(request.seed)
    untouched.random(n + 1)
    if request.stream.bit_generator.state != untouched.bit_generator.state:
        raise Wrong(
            f"{said} It has written {n + 1} letters, one random number each, but its stream stands elsewhere.",
            "which numbers would d have drawn if nobody had disturbed it?",
        )
    if request.text != wanted:
        raise Wrong(
            f"{said} It says {decode(request.text)!r}, alone {decode(wanted)!r}.",
            "which tokens, at which positions, does the cache hold now?",
        )


@check("resume", forbidden=(Engine, Scheduler))
def resume(learner: Learner) -> str:
    """`resume(model, cache, request)`: run what a request needs and choose its next token, as if nothing had been."""
    model = _Model()
    _comes_back(learner, model, story.NIGHT, 6, 4, (2,))
    _comes_back(learner, model, story.DAY, 8, 5, (1, 4, 7))
    for seed, prompt in enumerate((story.MORROW, "G", story.TWICE)):
        _comes_back(learner, model, prompt, 12, seed, (3, 4, 9))
    return "Five texts, preempted eleven times in all: letter for letter what they say alone."


# ---- admit(waiting, free, budget, block_size, watermark)


def _admitted(waiting: list, free: int, budget: int, block_size: int, watermark: int) -> list:
    names = []
    for name, tokens, hit in waiting:
        blocks = -(-tokens // block_size) - hit // block_size
        if blocks > free - watermark or tokens - hit > budget:
            break
        names.append(name)
        free, budget = free - blocks, budget - (tokens - hit)
    return names


@check("admit", forbidden=(Scheduler,))
def admit(learner: Learner) -> str:
    """`admit(waiting, free, budget, block_size, watermark)`: names from the head of the queue."""
    three = [(name, len(text), 0) for name, text in story.REQUESTS.items()]
    long_first = [("long", 30, 0), ("short", 3, 0)]
    shared = [("x", 10, 8), ("y", 10, 8), ("z", 12, 8)]
    cases: list[tuple[tuple[Any, ...], str]] = [
        (
            (three, 8, 100, 4, 0),
            "how many blocks does each prompt need, and who still fits behind the others?",
        ),
        ((three, 7, 100, 4, 0), "which blocks are left when those in front have taken theirs?"),
        ((long_first, 5, 100, 4, 0), "short fits and long does not: who has waited longer?"),
        ((long_first, 9, 20, 4, 0), "the step has a budget of tokens: may anybody overtake for its sake?"),
        ((three, 8, 20, 4, 0), "how many tokens has this step left when those in front are in?"),
        ((three, 8, 100, 4, 2), "how many blocks must be free after the admission?"),
        ((three, 8, 100, 4, 3), "how many blocks must be free after the admission?"),
        ((shared, 3, 100, 4, 0), "which blocks of a prompt does nobody have to give it?"),
        ((shared, 8, 8, 4, 0), "which tokens of a prompt need not be computed?"),
        (([], 8, 100, 4, 0), "who waits?"),
        (([("a", 8, 0)], 2, 8, 4, 0), "8 tokens, blocks of 4: is there a third block?"),
    ]
    for case, question in cases:
        expect(learner, *case, gives=_admitted(*case), question=question)
    rng = seeded(80)
    for _ in range(200):
        size = int(rng.choice([1, 2, 4, 16]))
        waiting = [_random_waiting(rng, name, size) for name in "abcdef"[: rng.integers(0, 7)]]
        case = waiting, int(rng.integers(0, 60)), int(rng.integers(1, 200)), size, int(rng.integers(0, 4))
        expect(
            learner, *case, gives=_admitted(*case), question="blocks, tokens, watermark: which of them is it?"
        )
    return "Blocks, hits, budget and watermark; nobody overtakes; 200 random queues."


def _random_waiting(rng: np.random.Generator, name: str, size: int) -> tuple[str, int, int]:
    tokens = int(rng.integers(1, 50))
    return name, tokens, size * int(rng.integers(0, (tokens - 1) // size + 1))


# ---- the faulty line


FAULTY = 8


@check("the faulty line", wants="value")
def crowded_line(learner: Learner) -> str:
    """The line that lets a request in for its first piece's sake."""
    answer = learner.value
    if isinstance(answer, bool) or not isinstance(answer, int) or not 1 <= answer <= 12:
        raise Wrong(f"answer is {show(answer)}; it takes the number of one line, 1 to 12.")
    if answer != FAULTY:
        if answer in (2, 3, 4):
            question = "late had to give way each time, and rightly: was there room? Why was it there at all?"
        elif answer in (5, 6, 10, 11, 12):
            question = "pieces are fine as long as they get to the end: what does this line promise?"
        else:
            question = "at the moment when late is let in: what is it going to need?"
        raise Wrong(f"Line {answer} does what it should.", question)
    return "It asks for the first piece. Who lets a prompt in must have room for all of it."
