"""What a client asks for, and how far the server has come with it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from ..allocator import whole_number, whole_numbers
from ..block_table import SeqId
from ..lm.generate import Sampling


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt and how it is to be continued.

    A simulation knows no tokens: it gives the prompt's length, and perhaps the hashes of its blocks.

    Args: id: an int or str, the name of its sequence too (of several: "id.0", "id.1" …); prompt: tokens [length];
        max_new_tokens: how many to write, at least 1; arrival: seconds; num_samples: texts that continue the same
        prompt; beam_width: keep the likeliest texts instead of sampling; num_tokens: the prompt's length, in place
        of `prompt`; block_hashes: of its full blocks, and behind them of the answer's; cache_salt, adapter: keep
        its blocks apart from others', as in BlockManager.add; sampling: None takes the likeliest token; seed: of its
        own random stream; stop: a token that ends a text.
    Raises: ValueError for a prompt that is empty and for numbers out of range.
    """

    id: SeqId
    prompt: ArrayLike | None = None
    max_new_tokens: int = 1
    arrival: float = 0.0
    num_samples: int = 1
    beam_width: int | None = None
    num_tokens: int | None = None
    block_hashes: Sequence | None = None
    cache_salt: str | None = None
    adapter: str | None = None
    sampling: Sampling | None = None
    seed: int | None = None
    stop: int | None = None

    def __post_init__(self):
        if not isinstance(self.id, SeqId) or isinstance(self.id, bool):
            raise ValueError(f"a request's id must be an int or a str, got {self.id!r}")
        if (self.prompt is None) == (self.num_tokens is None):
            raise ValueError(f"request {self.id!r} needs its prompt's tokens or their number (num_tokens)")
        if self.prompt is not None:
            prompt = whole_numbers("the prompt's tokens", self.prompt)
            if prompt.ndim != 1:
                raise ValueError(f"the prompt of {self.id!r} must be one row of tokens, got {prompt.shape}")
            object.__setattr__(self, "prompt", prompt)
            object.__setattr__(self, "num_tokens", len(prompt))
        if whole_number("num_tokens", self.num_tokens) == 0:
            raise ValueError(f"the prompt of {self.id!r} is empty: there is nothing to continue")
        whole_number("max_new_tokens", self.max_new_tokens, minimum=1)
        whole_number("num_samples", self.num_samples, minimum=1)
        if self.beam_width is not None:
            whole_number("beam_width", self.beam_width, minimum=1)
            if self.num_samples != 1 or self.stop is not None or self.sampling is not None:
                raise ValueError(f"request {self.id!r}: beams are not sampled and have no stop token")
        if not 0 <= self.arrival < np.inf:
            raise ValueError(f"request {self.id!r} must arrive at 0 s or later, got {self.arrival!r}")

    @property
    def width(self) -> int:
        """Texts that are written side by side: samples or beams."""
        return self.beam_width or self.num_samples

    @property
    def most_tokens(self) -> int:
        """Tokens that the cache holds for one text at its end; the last one is chosen but never run."""
        return self.num_tokens + self.max_new_tokens - 1

    def most_blocks(self, block_size: int) -> int:
        """Blocks that it can come to use: its texts share the prompt's full blocks and, at worst, no others."""
        shared = self.num_tokens // block_size
        return shared + self.width * (-(-self.most_tokens // block_size) - shared)


@dataclass(eq=False, repr=False)
class SequenceGroup:
    """A request on its way: the sequences of its texts, which move in lockstep (Kwon et al. 2023, section 4.5).

    Every living sequence has `computed` tokens in the cache and `written` tokens behind the prompt. A group of
    several begins, and begins again after a recompute, with one sequence: the others are forked from it when
    the prompt is computed.

    `texts` keeps what was written by each sequence, the ended ones too; empty in a simulation.
    """

    request: Request
    names: tuple[SeqId, ...] = field(init=False)  # of all its sequences
    seq_ids: list[SeqId] = field(init=False)  # the living ones, forked or not
    texts: dict[SeqId, list[int]] = field(default_factory=dict)
    computed: int = 0
    written: int = 0
    announced: int = (
        0  # tokens that its first chunks may compute: those whose text is known (a trace's may not be)
    )
    forked: bool = True  # does every living sequence exist in the cache?
    place: str = "waiting"  # "waiting", "running", "swapped", "done"
    hits: int = 0  # tokens found in the prefix cache when it was first admitted
    preemptions: int = 0
    lost: int = 0  # tokens that a preemption made it forget: computed again, they count as recomputed

    def __post_init__(self):
        request = self.request
        several = tuple(f"{request.id}.{i}" for i in range(request.width))
        self.names = (request.id,) if request.width == 1 else several
        self.seq_ids = list(self.names)
        self.forget()

    def __repr__(self) -> str:
        counts = f"{self.computed} of {self.known} tokens computed, {self.written} written"
        return f"SequenceGroup({self.request.id!r}, {self.place}: {counts})"

    @property
    def active(self) -> list[SeqId]:
        """The sequences that exist in the cache, or will as soon as it is admitted."""
        return self.seq_ids if self.forked else self.seq_ids[:1]

    @property
    def known(self) -> int:
        """Tokens that can be computed now, per active sequence: its prompt, and once forked its text."""
        return self.request.num_tokens + (self.written if self.forked else 0)

    @property
    def pending(self) -> int:
        """Tokens that each active sequence still has to compute before it can choose the next one."""
        return self.known - self.computed

    @property
    def decoding(self) -> bool:
        """Whether all that is left to compute is the token chosen last."""
        return self.written > 0 and self.forked and self.pending == 1

    def forget(self) -> None:
        """Begin again with nothing in the cache."""
        self.lost = max(self.lost, self.computed)
        self.computed = 0
        self.forked = len(self.seq_ids) == 1

    def tokens(self, seq_id: SeqId, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop − 1 of one text with its prompt: int64 [stop − start]."""
        prompt, n = self.request.prompt, self.request.num_tokens
        text = self.texts.get(seq_id, [])[max(start - n, 0) : max(stop - n, 0)]
        return np.concatenate([prompt[start:stop], np.array(text, np.int64)])

    def hashes(self, start: int, stop: int, block_size: int) -> list:
        """The hashes of its full blocks start … stop − 1, as far as they are given and all its texts agree."""
        if self.request.width > 1:
            stop = min(stop, self.request.num_tokens // block_size)
        return list((self.request.block_hashes or ())[start:stop])
