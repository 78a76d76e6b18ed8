"""What the capstone stands on: your parts around the package's pages, the evening's requests, and six sealed faults.

pool = Pool(mine, model)                   # mine: what `keep.parts` gave
logits = run(model, pool, ["n1"], tokens)  # the first exercise, as the package solves it
sealed(4)                                  # a pool of letters with one fault; sealed(0) is sound
"""

import base64
import functools
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..allocator import BlockAllocator, PoolExhausted, whole_number
from ..attention import softmax
from ..block_table import NOTHING, BlockTables
from ..lm import Llama
from ..manager import BlockManager
from ..serving import Result, simulate
from ..serving.replay import as_requests
from ..serving.synthetic import conversations
from ..storage import KVStorage
from . import pages, story

TEMPERATURE = 0.8
QUESTIONS = {
    "n": story.NIGHT,
    "d": story.DAY,
    "m": story.MORROW,
}  # first letter of a request's name -> prompt
ANSWERS = {"n": (14, 9, 6, 11), "d": (8, 12, 5, 10), "m": (7, 13, 9, 6)}  # letters that each of them gets

# ---- the parts ---------------------------------------------------------------------------------------------------


class Room(NamedTuple):
    """What an extend granted."""

    slots: np.ndarray  # int [tokens]  where the new tokens go, sequence after sequence
    copies: np.ndarray  # int [m, 3]   source block, destination block, filled slots


class Handed:
    """An allocator as lessons 03 and 04 expect theirs: ids come as arrays, a refusal is the package's."""

    def __init__(self, allocator: Any, num_blocks: int):
        self.allocator, self.num_blocks = allocator, num_blocks

    @property
    def num_free(self) -> int:
        return self.allocator.num_free

    def ref_count(self, block: int) -> int:
        return self.allocator.ref_count(int(block))

    def allocate(self, n: int = 1) -> np.ndarray:
        with _refusals(n, self):
            return np.asarray(self.allocator.allocate(int(n)), np.int32)

    def share(self, blocks: Sequence[int]) -> None:
        self.allocator.share(np.asarray(blocks, int).tolist())

    def release(self, blocks: Sequence[int]) -> np.ndarray:
        return np.asarray(self.allocator.release(np.asarray(blocks, int).tolist()), np.int32)


class Tables:
    """Lesson 03's class from the package's parts: a table per sequence, and the pages that they point to.

    Args: allocator: a BlockAllocator, or a learner's in `Handed`.
    """

    def __init__(self, allocator, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int):
        self.allocator, self._rows = allocator, BlockTables(block_size)
        shape = (num_layers, allocator.num_blocks, block_size, num_kv_heads, head_dim)
        self._storage = KVStorage(*shape, poison=True)

    @property
    def tables(self) -> dict[str, list[int]]:
        return {name: self._rows.entries(self._rows.rows([name])[0]).tolist() for name in self._rows}

    def add(self, name: str) -> None:
        """Register a sequence without tokens."""
        if name in self._rows:
            raise ValueError(f"{name!r} is there already")
        self._rows.add(name)

    def append(self, name: str, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Add tokens of all layers, [num_layers, n, num_kv_heads, head_dim]; returns their slots [n]."""
        row, n = self._rows.rows([name]), np.array([keys.shape[1]])
        start = self._rows.length(row)
        more = -(-(start + n) // self._rows.block_size) - self._rows.num_entries(row)
        self._rows.append(row, more, n, self.allocator.allocate(int(more[0])))
        slots = self._rows.slots(row, start, n)
        for layer in range(len(keys)):
            self._storage.write(layer, slots, keys[layer], values[layer])
        return slots

    def read(self, layer: int, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of one layer: two arrays [length, num_kv_heads, head_dim]."""
        row = self._rows.rows([name])
        return self._storage.read(layer, self._rows.slots(row, np.zeros(1, int), self._rows.length(row)))

    def free(self, name: str) -> None:
        """Forget a sequence and give its blocks back."""
        self.allocator.release(self._rows.owned(self._rows.rows([name])[0]))
        self._rows.remove(name)


class Pool:
    """The parts of lessons 02, 04 and 05 around the package's pages: all that a server needs.

    A learner's manager works on the learner's allocator, if it keeps it in `.allocator` as the lesson's does. Slots
    that nobody owns are poisoned: who reads one finds NaN.

    Args: parts: what `keep.parts` gave, with `allocator`, `manager` and `plan`; model: whose pages; num_blocks,
        block_size: of the pool.
    """

    def __init__(
        self,
        parts: Any,
        model: Llama,
        num_blocks: int = story.NUM_BLOCKS,
        block_size: int = story.BLOCK_SIZE,
    ):
        c = model.config
        self.num_blocks, self.block_size, self.to_text = num_blocks, block_size, model.tokenizer.decode
        self.manager = parts.manager(num_blocks, block_size)
        if parts.allocator is not BlockAllocator and not isinstance(self.manager, BlockManager):
            self.manager.allocator = Handed(parts.allocator(num_blocks), num_blocks)
        self.storage = KVStorage(
            c.num_layers, num_blocks, block_size, c.num_kv_heads, c.head_dim, poison=True
        )
        self.plan = lambda tables, lengths: parts.plan(tables, lengths, block_size)
        self.lengths: dict[str, int] = {}  # name -> tokens

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return int(self.manager.num_free)

    def add(self, name: str) -> None:
        """Register a sequence without tokens."""
        self.manager.add(name)
        self.lengths[name] = 0

    def fork(self, parent: str, child: str) -> None:
        """Let a new sequence go on from what another holds; they share all blocks."""
        self.manager.fork(parent, [child])
        self.lengths[child] = self.lengths[parent]

    def free(self, name: str) -> None:
        """Forget a sequence; what was its own is poisoned."""
        self.manager.free([name])
        del self.lengths[name]
        owned = self.tables(list(self.lengths)).ravel().tolist()
        self.storage.poison([block for block in range(self.num_blocks) if block not in owned])

    def extend(self, names: Sequence[str], n: int = 1) -> Room:
        """Make room for n more tokens of each: all of them, or PoolExhausted and nothing is changed."""
        names = list(names)
        with _refusals(len(names), self):
            room = self.manager.extend(names, n)
        for name in names:
            self.lengths[name] += n
        return Room(np.asarray(room.slots, int), np.asarray(room.copies, int).reshape(-1, 3))

    def tables(self, names: Sequence[str]) -> np.ndarray:
        """Their block tables, padded with −1: int [batch, most blocks]."""
        rows = [[int(b) for b in row if b != NOTHING] for row in self.manager.block_tables(list(names))]
        most = max(map(len, rows), default=0)
        return np.array([row + [NOTHING] * (most - len(row)) for row in rows], int).reshape(len(rows), most)

    def check(self) -> None:
        """Assert that no block is lost, and none is free while somebody's table names it."""
        tables = self.tables(list(self.lengths))
        held = len(set(tables[tables != NOTHING].tolist()))
        free = self.num_free
        assert held + free == self.num_blocks, f"{held} blocks in tables, {free} free, of {self.num_blocks}"

    def strip(self, requests: Sequence["Request"] = (), caption: str | None = None) -> pages.Strip:
        """The pool as a row of boxes, with the letters of these requests."""
        names = list(self.lengths)
        texts = {r.name: self.to_text(r.tokens[: self.lengths[r.name]]) for r in requests if r.name in names}
        tables = {
            name: [b for b in row if b != NOTHING]
            for name, row in zip(names, self.tables(names).tolist(), strict=True)
        }
        return pages.strip_of(
            tables, texts, num_blocks=self.num_blocks, block_size=self.block_size, caption=caption
        )


@contextmanager
def _refusals(requested: int, pool: Any) -> Iterator[None]:
    """Make a refusal of a learner's own class the package's."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "PoolExhausted" or isinstance(error, PoolExhausted):
            raise
        raise PoolExhausted(requested, pool.num_free) from None


def run(model: Llama, pool: Pool, names: Sequence[str], tokens: np.ndarray) -> np.ndarray:
    """Run n tokens of each sequence: a prompt (n of one sequence), or a step of decoding (one of each).

    A prompt is run as a batch of its beginnings: its i-th row sees i tokens, through the same table.

    Args: names: registered sequences; tokens: int [batch, n].
    Returns: logits of each sequence's last token, [batch, vocabulary].
    Raises: PoolExhausted; nothing is changed then.
    """
    n = tokens.shape[1]
    room = pool.extend(names, n)
    pool.storage.copy_blocks(room.copies)
    ends = np.array([[pool.lengths[name]] for name in names]) - np.arange(n)[::-1]  # [batch, n]
    plan = pool.plan(np.repeat(pool.tables(names), n, axis=0), ends.ravel())

    def attend(layer, q, k, v):
        pool.storage.write(layer, room.slots, k, v)
        return plan.run(layer, q, pool.storage)  # [batch * n, q_heads, head_dim]

    return model.decode(tokens.ravel(), ends.ravel() - 1, attend)[n - 1 :: n]


# ---- the evening -------------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class Request:
    """A question, and how many tokens are to be written behind it; its random numbers begin at `seed`."""

    name: str
    prompt: list[int]
    new: int
    seed: int = 0
    text: list[int] = field(default_factory=list)  # tokens written so far

    def __post_init__(self):
        self.stream = np.random.default_rng(self.seed)

    def __repr__(self) -> str:
        return f"Request({self.name!r}, {len(self.prompt)} + {len(self.text)} of {self.new} tokens)"

    @property
    def tokens(self) -> list[int]:
        """The prompt, and what was written behind it."""
        return self.prompt + self.text

    @property
    def done(self) -> bool:
        return len(self.text) >= self.new

    def choose(self, logits: np.ndarray) -> int:  # [vocabulary]
        """The next token, by one number of its stream."""
        ends = np.cumsum(softmax(logits / TEMPERATURE)[0])  # [vocabulary]
        return int(np.searchsorted(ends, self.stream.random() * ends[-1], side="right"))


def evening(model: Llama) -> list[Request]:
    """Twelve requests, four to each of the story's questions, in the order in which they come."""
    return [
        Request(f"{letter}{i}", model.tokenizer.encode(prompt).tolist(), new, seed=10 * i + ord(letter))
        for letter, prompt in QUESTIONS.items()
        for i, new in enumerate(ANSWERS[letter], start=1)
    ]


def again(request: Request) -> Request:
    """The same request, before anybody has answered it."""
    return Request(request.name, list(request.prompt), request.new, request.seed)


def recompute(model: Llama, request: Request) -> list[int]:
    """What a request is answered alone, without any cache: every token is computed again for every letter."""
    request = again(request)
    while not request.done:
        request.text.append(request.choose(model.forward_full(request.tokens)[-1]))
    return request.text


# ---- traffic and a budget ------------------------------------------------------------------------------------------

TOKEN_BYTES = 800 << 10  # keys and values of a token in OPT-13B: 2 × 40 layers × 5120 numbers × 2 bytes
BUDGET = 800 * 16 * TOKEN_BYTES  # bytes: eight hundred blocks of 16 tokens
PROMISE = 1.0  # seconds to the first token, for 95 of 100 requests
BLOCK_SIZES = (16, 32, 64, 128)  # that the kernel takes


@functools.cache
def traffic(seed: int = 1) -> tuple:
    """An evening's conversations, drawn with the statistics of published traces (pagedkv.serving.synthetic)."""
    return tuple(conversations(48, seed, rate=0.62))


@functools.cache
def replay(block_size: int, num_blocks: int, seed: int = 1) -> Result:
    """What happens to the traffic in a pool of that size, on a simulated clock."""
    manager = BlockManager(num_blocks, block_size, prefix_cache=True)
    return simulate(as_requests(traffic(seed), block_size), manager)


def first_token(result: Result) -> float:
    """Seconds within which 95 of 100 requests saw their first token; infinite if one was refused."""
    return float("inf") if result.refused else float(np.quantile(result.ttft, 0.95))


# ---- sealed faults -------------------------------------------------------------------------------------------------

SEALED = Path(__file__).with_name("sealed.txt")


@functools.cache
def _opened() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "sealed"}
    exec(compile(opened(SEALED.read_text("ascii")), "<sealed>", "exec"), names)
    return names


def sealed(number: int) -> Any:
    """A pool of letters with a fault; number 0 has none.

    It has `add`, `append`, `fork`, `free` and `read`; to look into it there are `tables`, `lengths`, `owners`,
    `queue` and `strip()`.

    Raises: ValueError for a number that is not 0 … 6.
    """
    faults = _opened()["FAULTS"]
    if whole_number("the number of a sealed pool", number) not in faults:
        raise ValueError(f"there is no sealed pool {number}: the numbers are 0 … {max(faults)}")
    return _opened()["Pool"](faults[number])


def has_fault(number: int, letter: str) -> bool:
    """Whether that pool's fault is the one that the exercise calls by this letter."""
    return _opened()["FAULTS"].get(number) == letter


def sealed_text(source: str) -> str:
    """Source code, packed so that nobody reads it by accident."""
    packed = base64.b85encode(zlib.compress(source.encode("utf-8"), 9)).decode("ascii")
    return "\n".join(packed[i : i + 100] for i in range(0, len(packed), 100)) + "\n"


def opened(text: str) -> str:
    """The source code that was sealed."""
    return zlib.decompress(base64.b85decode("".join(text.split()))).decode("utf-8")


if __name__ == "__main__":
    SEALED.write_text(sealed_text(Path(sys.argv[1]).read_text("utf-8")), "ascii", newline="\n")
