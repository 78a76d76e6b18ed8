"""Which full blocks hold which text: digests in a chain, and the index that finds them. No policy, no K/V."""

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .allocator import whole_numbers

FORMAT = "pagedkv-1"  # part of every digest: change it when digests change
DIGEST_SIZE = 32  # bytes of SHA-256
TOKEN = np.dtype("<i8")  # tokens are hashed, compared and kept as little-endian int64


class Link:
    """The text of one full block *and of everything before it*: one link of a hash chain.

    Two prompts that begin alike have equal digests as far as they are alike, and none behind. Immutable; forks share
    their links.
    """

    __slots__ = ("digest", "parent", "tokens")

    def __init__(self, parent: "Link | None", digest: bytes, tokens: bytes | None):
        self.parent = parent  # None: this is a root, which stands before the first block
        self.digest = digest
        self.tokens = tokens  # of this block; None where only the digest is known (traces)

    def __repr__(self) -> str:
        return f"Link({self.digest.hex()[:8]})"

    def __deepcopy__(self, memo) -> "Link":
        return self  # a long chain would be too deep to copy, and nobody can change it


def tagged(**fields: bytes | str | int | None) -> bytes:
    """Fields as bytes: each with its name, type and length, so that no other fields give the same; None is left out.

    Raises: ValueError for a value of another type.
    """
    parts = []
    for name, value in fields.items():
        if value is None:
            continue
        if isinstance(value, bytes):
            data = value
        elif isinstance(value, str):
            data = value.encode("utf-8", "surrogatepass")
        elif isinstance(value, int | np.integer) and not isinstance(value, bool):
            value, data = int(value), b"%d" % value
        else:
            raise ValueError(f"{name} must be str, bytes or a whole number, got {value!r}")
        parts.append(f"{name}:{type(value).__name__}:{len(data)}:".encode() + data)
    return b"".join(parts)


def root_link(
    block_size: int,
    *,
    namespace: bytes | str = b"",
    cache_salt: bytes | str | None = None,
    adapter: bytes | str | None = None,
) -> Link:
    """Where a chain begins: prompts share blocks only if all of this is equal.

    Args: namespace: what the K/V depend on beside the text (model, dtype, …); cache_salt: who may share;
        adapter: weights added to the model's.
    """
    for name, value in (("namespace", namespace), ("cache_salt", cache_salt), ("adapter", adapter)):
        if not isinstance(value, bytes | str) and (value is not None or name == "namespace"):
            raise ValueError(f"{name} must be str or bytes, got {value!r}")
    fields = tagged(
        format=FORMAT, namespace=namespace, block_size=block_size, cache_salt=cache_salt, adapter=adapter
    )
    return Link(None, hashlib.sha256(fields).digest(), None)


def block_digest(parent: bytes, tokens: bytes) -> bytes:
    """The digest of a full block: of its tokens and of all before them, equal in every process."""
    return hashlib.sha256(parent + tokens).digest()


def given_digests(root: bytes, block_hashes: Iterable[bytes | str | int]) -> list[bytes]:
    """Digests that stand for the block hashes of a trace, each of which covers all before it by itself.

    Raises: ValueError for hashes of another type.
    """
    if not isinstance(block_hashes, Iterable) or isinstance(block_hashes, str | bytes):
        raise ValueError(f"block_hashes must be a row of hashes, got {block_hashes!r}")
    block_hashes = list(block_hashes)
    if None in block_hashes:
        raise ValueError(f"a block hash must be str, bytes or a whole number, got {block_hashes!r}")
    return [hashlib.sha256(root + tagged(block_hash=block_hash)).digest() for block_hash in block_hashes]


def token_bytes(name: str, tokens: ArrayLike) -> bytes:
    """A row of tokens as they are hashed; ValueError for anything but whole numbers of 64 bits."""
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one row of token ids, got {tokens!r}")
    if array.dtype == np.uint64 and (array >= 2**63).any():
        raise ValueError(f"{name} must be below 2**63, got {array.max()}")
    return whole_numbers(name, array).astype(TOKEN).tobytes()


class Text:
    """What is known of one sequence's text: final up to `committed`, announced up to `prompt_length`.

    Only the last link is kept, the others hang on it. All parts are immutable, so a copy is cheap.
    """

    def __init__(self, root: Link):
        self.root = self.tip = root  # tip: the last full committed block
        self.committed = 0  # tokens whose keys and values are written and final
        self.rest = b""  # the committed tokens behind the last full block
        self.prompt: bytes | None = b""  # the announced tokens; None where only digests are known (traces)
        self.prompt_length = 0
        self.digests: Sequence[
            bytes
        ] = ()  # of the full blocks of the prompt, as far as anybody computed them

    def copy(self) -> "Text":
        text = Text.__new__(Text)
        text.__dict__.update(self.__dict__)
        return text

    def announce(self, tokens: bytes, block_size: int, *, hashed: bool) -> None:
        """Say which tokens will come; `hashed` computes their digests, which a search needs."""
        self.prompt, self.prompt_length = tokens, len(tokens) // TOKEN.itemsize
        if hashed:
            self.digests, digest = [], self.root.digest
            for block in _blocks(tokens, block_size):
                digest = block_digest(digest, block)
                self.digests.append(digest)

    def announce_hashes(self, digests: Sequence[bytes], num_tokens: int, block_size: int) -> None:
        """The same for a trace, which knows digests and the number of tokens; one more than are full is left out."""
        full = num_tokens // block_size
        if len(digests) not in (full, -(-num_tokens // block_size)):
            raise ValueError(f"{num_tokens} tokens fill {full} blocks, got {len(digests)} block_hashes")
        self.prompt, self.prompt_length, self.digests = None, num_tokens, digests[:full]

    def due(self, length: int) -> bytes:
        """Announced tokens that are not committed yet, up to a length."""
        size = TOKEN.itemsize
        return self.prompt[self.committed * size : length * size]

    def goes_on(self, tokens: bytes | None, length: int, block_size: int) -> "Commit":
        """What becomes final when `tokens` (None: the announced ones) do, in a sequence of `length` tokens.

        Raises: ValueError for other tokens than announced, or more than there is room for.
        """
        if self.prompt is None:
            if tokens is not None:
                raise ValueError("its text is known by block_hashes, not by tokens")
            return self.goes_on_by(
                self.digests[self.committed // block_size : length // block_size], length, block_size
            )
        due = self.due(min(length, self.prompt_length))
        tokens = due if tokens is None else tokens
        committed = self.committed + len(tokens) // TOKEN.itemsize
        if committed > length:
            raise ValueError(f"it has room for {length} tokens, cannot commit {committed}")
        if not tokens.startswith(due[: len(tokens)]):
            raise ValueError("it was announced with other tokens than it is committed with")
        filled = self.filled(tokens, block_size)
        rest = (self.rest + tokens)[len(filled) * block_size * TOKEN.itemsize :]
        return Commit(self, filled, self.committed // block_size, committed, rest)

    def goes_on_by(self, digests: Sequence[bytes], length: int, block_size: int) -> "Commit":
        """The same for a trace: the digests of the next full blocks."""
        if self.prompt or (self.prompt is not None and self.committed):
            raise ValueError("its text is known by tokens, not by block_hashes")
        first = self.committed // block_size
        last = first + len(digests)
        if last * block_size > length:
            raise ValueError(f"it has {length // block_size} full blocks, cannot commit {last}")
        due = self.digests[first:last]
        if list(digests[: len(due)]) != list(due):
            raise ValueError("it was announced with other block_hashes than it is committed with")
        filled = [(digest, None) for digest in digests]
        return Commit(self, filled, first, last * block_size, b"", by_hash=True)

    def filled(self, tokens: bytes, block_size: int) -> list[tuple[bytes, bytes]]:
        """Digest and tokens of every block that becomes full when `tokens` follow the committed ones."""
        digest, place, filled = self.tip.digest, self.committed // block_size, []
        for block in _blocks(self.rest + tokens, block_size):
            known = place < len(self.digests)
            digest = self.digests[place] if known else block_digest(digest, block)
            filled.append((digest, block))
            place += 1
        return filled

    def cut(self, length: int, block_size: int) -> None:
        """Forget what is known from position `length` on, the announced part included."""
        if length < self.committed:
            for _ in range(self.committed // block_size - length // block_size):
                self.rest, self.tip = self.tip.tokens, self.tip.parent
            if self.prompt is None:
                self.rest, self.committed = b"", length - length % block_size
            else:
                self.rest, self.committed = self.rest[: length % block_size * TOKEN.itemsize], length
        if length < self.prompt_length:
            self.prompt_length, self.digests = length, self.digests[: length // block_size]
            self.prompt = self.prompt and self.prompt[: length * TOKEN.itemsize]

    def links(self) -> list[Link]:
        """The links of the full committed blocks, first block first."""
        links, link = [], self.tip
        while link.parent is not None:
            links.append(link)
            link = link.parent
        return links[::-1]


class Commit(NamedTuple):
    """The plan of making more of a text final."""

    text: Text
    filled: list[tuple[bytes, bytes | None]]  # digest and tokens of each block that becomes full
    first: int  # the place of the first of them in the table
    committed: int
    rest: bytes
    by_hash: bool = False


def _blocks(tokens: bytes, block_size: int) -> list[bytes]:
    """The full blocks of a text."""
    size = block_size * TOKEN.itemsize
    return [tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size)]


class PrefixIndex:
    """Finds the block that holds a text. What stands here is full and final; equal blocks may stand side by side.

    Every step costs O(1) per block. Found is the oldest block whose digest, tokens *and* predecessors are equal:
    were two digests ever alike by accident, the tokens would still tell them apart.
    """

    def __init__(self, num_blocks: int):
        self._blocks: dict[bytes, dict[int, None]] = {}  # digest -> blocks, oldest first
        self._links: dict[int, Link] = {}  # block -> what it holds
        self._sealed = np.zeros(num_blocks, bool)  # the same question for many blocks at once

    def __len__(self) -> int:
        return len(self._links)

    def __contains__(self, block: int) -> bool:
        return block in self._links

    def link(self, block: int) -> Link | None:
        """What a block holds, or None if it is not sealed."""
        return self._links.get(block)

    def sealed(self, blocks: np.ndarray) -> np.ndarray:
        """Which of the blocks stand here: bool [n]."""
        return self._sealed[blocks]

    def find(self, text: Text, block_size: int, at_most: int) -> list[int]:
        """Blocks that hold the beginning of an announced prompt, first block first, at most so many.

        Source: Kwon et al. 2023, section 4.4, shared prefix; the chain of digests as in vLLM V1.
        """
        parent, blocks = text.root, []
        size = block_size * TOKEN.itemsize
        for i, digest in enumerate(text.digests[:at_most]):
            tokens = None if text.prompt is None else text.prompt[i * size : (i + 1) * size]
            block = self._holder(parent, digest, tokens)
            if block is None:
                break
            blocks.append(block)
            parent = self._links[block]
        return blocks

    def chain(self, parent: Link, digest: bytes, tokens: bytes | None) -> Link:
        """The link for a block of text behind `parent`: the one that equal blocks share if there are any."""
        twin = self._holder(parent, digest, tokens)
        return Link(parent, digest, tokens) if twin is None else self._links[twin]

    def seal(self, block: int, link: Link) -> bool:
        """Let a full, final block be found; False if it can be found already."""
        if block in self._links:
            return False
        self._links[block] = link
        self._sealed[block] = True
        self._blocks.setdefault(link.digest, {})[block] = None
        return True

    def carry_out(self, plan: Commit, blocks: Sequence[int] | None = None) -> list[int]:
        """Make more of a text final; its new full blocks, if given, can be found from now on. Returns those."""
        text, sealed = plan.text, []
        for i, (digest, tokens) in enumerate(plan.filled):
            text.tip = self.chain(text.tip, digest, tokens)
            if blocks is not None and blocks[i] >= 0 and self.seal(blocks[i], text.tip):
                sealed.append(blocks[i])
        text.committed, text.rest = plan.committed, plan.rest
        if plan.by_hash:
            text.prompt = None
        return sealed

    def unseal(self, blocks: np.ndarray) -> np.ndarray:
        """Let blocks be found no more; returns those that could be found before: int32."""
        if not self._links:
            return np.zeros(0, np.int32)
        gone = blocks[self._sealed[blocks]].astype(np.int32)
        for block in gone.tolist():
            digest = self._links.pop(block).digest
            equal = self._blocks[digest]
            del equal[block]
            if not equal:
                del self._blocks[digest]
        self._sealed[gone] = False
        return gone

    def clear(self) -> None:
        """Let no block be found."""
        self._blocks.clear()
        self._links.clear()
        self._sealed[:] = False

    def _holder(self, parent: Link, digest: bytes, tokens: bytes | None) -> int | None:
        for block in self._blocks.get(digest, ()):
            link = self._links[block]
            if link.tokens == tokens and _same(link.parent, parent):
                return block
        return None


def _same(a: Link | None, b: Link | None) -> bool:
    """Whether two chains say the same; one step where they share their links, as they mostly do."""
    while a is not b:
        if a is None or b is None or a.digest != b.digest or a.tokens != b.tokens:
            return False
        a, b = a.parent, b.parent
    return True


class PrefixStats:
    """How many prompt tokens were found in the cache: over the last requests, and in total.

    Args: window: requests that the rate looks back on.
    """

    def __init__(self, window: int = 1000):
        self.window = window
        self.requests = self.queries = self.hits = 0  # in the window; queries and hits are tokens
        self.total_requests = self.total_queries = self.total_hits = 0  # since the pool was made
        self._recent: deque[tuple[int, int, int]] = deque()

    def __repr__(self) -> str:
        return f"PrefixStats(hits {self.hits} of {self.queries} tokens in {self.requests} requests)"

    @property
    def hit_rate(self) -> float:
        """Tokens found per token asked for, in the window; 0.0 if nothing was asked."""
        return self.hits / self.queries if self.queries else 0.0

    def observe(self, requests: int, queries: int, hits: int) -> None:
        """Take note of a step with so many new prompts, their tokens, and those of them that were found."""
        self._count(requests, queries, hits)
        self._recent.append((requests, queries, hits))
        while self.requests > self.window and len(self._recent) > 1:
            self._count(*(-number for number in self._recent.popleft()))
        self.total_requests += requests
        self.total_queries += queries
        self.total_hits += hits

    def reset(self) -> None:
        """Begin a new window; the totals go on."""
        self._recent.clear()
        self.requests = self.queries = self.hits = 0

    def _count(self, requests: int, queries: int, hits: int) -> None:
        self.requests += requests
        self.queries += queries
        self.hits += hits
