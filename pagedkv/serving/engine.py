"""Serving with a real model: the scheduler says what to compute, the model computes it, each text goes its way."""

from collections.abc import Iterable

import numpy as np

from ..allocator import whole_numbers_below
from ..block_table import SeqId
from ..cache import PagedKVCache
from ..lm.generate import Beams, best, checked_prompt, draw
from ..lm.model import Llama
from .request import Request, SequenceGroup
from .scheduler import Scheduler
from .step import Step


class Engine:
    """Writes the texts of many requests over one paged cache, each equal to what its request gets alone.

    A request's random streams and beams live here, not in the cache: being preempted changes neither.

    Args: model, cache: as in Llama.forward; options: of the Scheduler.
    """

    def __init__(self, model: Llama, cache: PagedKVCache, **options):
        self.model, self.cache = model, cache
        self.scheduler = Scheduler(cache, **options)
        self._choosers: dict[SeqId, Sampler | BeamSearch] = {}  # by request

    def add(self, request: Request) -> SequenceGroup:
        """Put a request at the end of the queue; its group holds the texts as they grow.

        Raises: ValueError for a prompt without tokens, with others than the model's, or too long for its context;
            and as Scheduler.add. Nothing is changed.
        """
        if request.prompt is None:
            raise ValueError(
                f"request {request.id!r} has no tokens: a model needs them, a simulation does not"
            )
        checked_prompt(self.model, request.prompt, request.max_new_tokens)
        whole_numbers_below("token", request.prompt, self.model.config.vocabulary_size)
        if (request.beam_width or 1) > self.model.config.vocabulary_size:
            raise ValueError(f"{request.beam_width} beams cannot start from so few different tokens")
        group = self.scheduler.add(request)
        self._choosers[request.id] = (Sampler if request.beam_width is None else BeamSearch)(group)
        return group

    def abort(self, request_id: SeqId) -> None:
        """As Scheduler.abort."""
        self.scheduler.abort(request_id)
        del self._choosers[request_id]

    def step(self) -> list[SequenceGroup]:
        """Compute one step.

        Returns: the groups that have finished; `texts` has what they wrote, a list of tokens per sequence.
        Raises: PoolExhausted if others hold the blocks; nothing is changed.
        """
        step = self.scheduler.schedule()
        try:
            tokens, parents, stop = self._choose(step, self._last_logits(step))
        except BaseException:  # an interrupt too: the step can be computed again
            self.scheduler.cancel(step)
            raise
        finished = self.scheduler.advance(step, tokens, parents=parents, stop=stop)
        for group in finished:
            del self._choosers[group.request.id]
        return finished

    def run(self, requests: Iterable[Request] = ()) -> dict[SeqId, list[list[int]]]:
        """Add requests and compute until none is left: the texts of each that finished, by its id."""
        for request in requests:
            self.add(request)
        texts = {}
        while self.scheduler.unfinished:
            for group in self.step():
                texts[group.request.id] = list(group.texts.values())
        return texts

    def _last_logits(self, step: Step) -> np.ndarray:
        """Run a step's tokens through the model: logits of each sequence's last one, [batch, vocabulary]."""
        if not step.chunks:
            return np.zeros((0, self.model.config.vocabulary_size), np.float32)
        reservation = step.reservation
        counts = reservation.counts  # [batch]
        plan = self.cache.plan(reservation.seq_ids, counts)

        def attend(layer, q, k, v):
            self.cache.write(layer, reservation, k, v)
            return self.cache.attend(layer, q, plan)  # [n, q_heads, head_dim]

        tokens = np.concatenate([self.scheduler.tokens(chunk) for chunk in step.chunks])  # [n]
        last = np.cumsum(counts) - 1  # [batch]
        first = np.repeat(reservation.start - last - 1 + counts, counts)  # [n]
        return self.model.decode(tokens, first + np.arange(len(first)), attend, last)

    def _choose(self, step: Step, logits: np.ndarray) -> tuple[dict, dict, list[SeqId]]:
        tokens, parents, stop, row = {}, {}, [], 0
        for chunk in step.chunks:
            rows = logits[row : row + len(chunk.seq_ids)]  # [sequences, vocabulary]
            row += len(chunk.seq_ids)
            if chunk.samples and chunk.request_id in self._choosers:
                chooser = self._choosers[chunk.request_id]
                tokens[chunk.request_id], continued = chooser.choose(rows)
                if continued is not None:
                    parents[chunk.request_id] = continued
                stop += chooser.stopped(tokens[chunk.request_id])
        return tokens, parents, stop


class Sampler:
    """Draws the next tokens of one request's texts, each from a random stream of its own."""

    def __init__(self, group: SequenceGroup):
        self.group = group
        streams = np.random.default_rng(group.request.seed).spawn(group.request.width)
        self.streams = dict(zip(group.seq_ids, streams, strict=True))

    def choose(self, logits: np.ndarray) -> tuple[list[int], None]:  # [1 or living sequences, vocabulary]
        """A token for every living sequence."""
        sampling, ids = self.group.request.sampling, self.group.seq_ids
        logits = np.broadcast_to(logits, (len(ids), logits.shape[1]))  # [living, vocabulary]
        if sampling is None:
            return np.argmax(logits, axis=1).tolist(), None
        rows = zip(sampling.probabilities(logits), ids, strict=True)
        return [draw(row, self.streams[seq_id]) for row, seq_id in rows], None

    def stopped(self, tokens: list[int]) -> list[SeqId]:
        """The sequences that end with these tokens."""
        stop, ids = self.group.request.stop, self.group.seq_ids
        return [seq_id for seq_id, token in zip(ids, tokens, strict=True) if token == stop]


class BeamSearch:
    """Keeps the likeliest texts of one request; sequence i holds beam i, the best is the first."""

    def __init__(self, group: SequenceGroup):
        self.width = group.request.width
        self.beams = Beams(np.zeros((1, 0), np.int64), np.zeros(1), np.zeros(1, np.int64))

    def choose(self, logits: np.ndarray) -> tuple[list[int], list[int]]:  # [beams, vocabulary]
        """The last token of every beam, and the beam that each one continues."""
        self.beams = best(self.beams, logits, self.width)
        return self.beams.texts[:, -1].tolist(), self.beams.parents.tolist()

    def stopped(self, tokens: list[int]) -> list[SeqId]:
        """None: beams run to the end."""
        return []
