"""One step of the model, as the scheduler hands it out: which tokens of which sequences."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..block_table import SeqId
from ..manager import Reservation


class Chunk(NamedTuple):
    """One request's part of a step: the next tokens of each of its active sequences."""

    request_id: SeqId
    seq_ids: tuple[SeqId, ...]
    start: int  # position of the first token, the same in each sequence
    num_tokens: int  # per sequence
    decode: bool  # one token, chosen in the step before; otherwise a piece of a prompt
    samples: bool  # the last token's logits choose the next
    recomputed: int  # tokens per sequence that had been computed before a preemption


@dataclass(frozen=True)
class Step:
    """What one run of the model computes. Its blocks are reserved; `advance` says that it was run."""

    chunks: tuple[Chunk, ...]
    reservations: tuple[Reservation, ...]
    admitted: tuple[SeqId, ...]  # requests that began or went on after a preemption
    preempted: tuple[SeqId, ...]
    repeat: int = 1  # decode steps in a row, all alike: see Scheduler.repeat

    @cached_property
    def prefill_tokens(self) -> int:
        """Tokens of prompts, and of texts that are computed again."""
        return sum(len(chunk.seq_ids) * chunk.num_tokens for chunk in self.chunks if not chunk.decode)

    @cached_property
    def decode_tokens(self) -> int:
        """Tokens that were chosen in the step before; in each of its repeats."""
        return sum(len(chunk.seq_ids) for chunk in self.chunks if chunk.decode)

    @cached_property
    def recomputed_tokens(self) -> int:
        """Tokens that a preemption made necessary once more."""
        return sum(len(chunk.seq_ids) * chunk.recomputed for chunk in self.chunks)

    @property
    def reservation(self) -> Reservation:
        """The slots of all chunks, one after the other."""
        parts = self.reservations
        ids = tuple(seq_id for part in parts for seq_id in part.seq_ids)
        names = ("start", "counts", "slots", "copies", "versions")
        return Reservation(ids, *(np.concatenate([getattr(part, name) for part in parts]) for name in names))
