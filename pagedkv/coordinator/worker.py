"""A process that writes texts: it takes requests from a queue and shares the pool of blocks with others like it."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..allocator import PoolExhausted
from ..block_table import SeqId
from ..decode import StalePlan
from ..lm.generate import Sampling, checked_prompt, draw, sample
from ..lm.model import Llama
from ..store import Layout, RedisPageStore, model_name
from .errors import CoordinatorError, Unreachable
from .manager import RedisBlockManager
from .pages import SharedCache
from .requests import RequestQueue, TextRequest
from .shared_memory import SharedStorage

PAUSE = 0.02  # seconds between two looks when there is nothing to do
PATIENCE = 60.0  # seconds to wait for a server that has gone


@dataclass(eq=False)
class Writing:
    """A text on its way. What it draws at random is decided by its request alone, so every worker writes the same."""

    request: TextRequest
    tokens: list[int]  # the prompt, and what was written behind it
    prompt: int  # tokens of the prompt
    sampling: Sampling
    random: np.random.Generator
    seq_id: SeqId | None = None  # None: it holds no blocks
    hits: int | None = None  # tokens that its first step found in the prefix cache
    restarts: int = 0  # times that it lost its blocks, and their tokens were computed again

    @classmethod
    def of(cls, request: TextRequest, model: Llama) -> "Writing":
        """ValueError for a request that the model cannot fulfil."""
        tokens = checked_prompt(model, model.tokenizer.encode(request.prompt), request.tokens).tolist()
        sampling = sampling_of(request)
        (random,) = np.random.default_rng(request.seed).spawn(1)
        return cls(request, tokens, len(tokens), sampling, random)

    @property
    def left(self) -> int:
        """Tokens that are still to be written."""
        return self.prompt + self.request.tokens - len(self.tokens)

    def choose(self, logits: np.ndarray) -> None:  # [vocabulary]
        self.tokens.append(draw(self.sampling.probabilities(logits), self.random))


def sampling_of(request: TextRequest) -> Sampling:
    """How a request wants its tokens chosen; temperature 0 is the likeliest."""
    if request.temperature == 0:
        return Sampling(top_k=1)
    return Sampling(request.temperature, request.top_k, request.top_p)


def text_alone(model: Llama, request: TextRequest) -> str:
    """What one process writes for a request, with a cache of its own: what every cluster has to write, too."""
    prompt = model.tokenizer.encode(request.prompt)
    cache = model.new_cache(1 + (len(prompt) + request.tokens) // 16, 16)
    random = np.random.default_rng(request.seed)
    steps = sample(model, cache, prompt, request.tokens, sampling=sampling_of(request), random=random)
    return "".join(model.tokenizer.decode(tokens) for tokens in steps)


def shared_cache(
    model: Llama,
    url: str,
    pool: str = "default",
    *,
    num_blocks: int | None = None,
    block_size: int | None = None,
    worker: str | None = None,
    lease_seconds: float = 10.0,
    store_pages: bool = False,
) -> SharedCache:
    """Join a pool for a model: its manager in Redis, its pages in this machine's shared memory.

    Args: store_pages: also put finished pages into Redis, for workers on other machines; the others: as in
        RedisBlockManager.
    Raises: as RedisBlockManager and SharedStorage.
    """
    c, identity = model.config, model_name(model)
    manager = RedisBlockManager(
        url,
        pool,
        num_blocks=num_blocks,
        block_size=block_size,
        max_length=c.context,
        prefix_cache=True,
        namespace=identity,
        worker=worker,
        lease_seconds=lease_seconds,
    )
    memory = f"{pool} {manager._generation.decode()}"  # a pool that was made anew has other memory
    shape = (c.num_layers, manager.num_blocks, manager.block_size, c.num_kv_heads, c.head_dim)
    storage = SharedStorage(memory, *shape)
    store = RedisPageStore(manager.url, Layout.of(storage, identity), pool=pool) if store_pages else None
    return SharedCache(manager, storage, store=store)


class TextWorker:
    """Writes the texts of a queue, several side by side, over a pool that other processes use too.

    When the pool is full, the last text that came gives its blocks up and goes on later; a worker with a single text
    gives even that up, unless it is the oldest of all workers', which waits. So the oldest text always advances, and
    no two workers can wait for each other.

    Whoever loses the lease, as after a long pause, joins the pool anew and goes on with what is still its own.

    Args: model; join: makes the cache over a new registration in the pool; queue: of the same pool and name;
        max_batch: texts side by side; reap_every: seconds between two looks for dead workers; grace: seconds behind
        the end of their leases, so that one that woke up in the middle of a write has ended it.
    """

    def __init__(
        self,
        model: Llama,
        join: Callable[[], SharedCache],
        queue: RequestQueue,
        *,
        max_batch: int = 4,
        reap_every: float = 1.0,
        grace: float = 0.5,
    ):
        self.model, self.join, self.queue = model, join, queue
        self.max_batch, self.reap_every, self.grace = max_batch, reap_every, grace
        self.cache = join()
        self.writing: list[Writing] = []  # oldest first; they hold blocks
        self.waiting: deque[Writing] = deque()  # claimed, without blocks
        self.finished = self.rejoined = 0
        self._taken = self._reaped = float("-inf")

    def run(self, until_done: bool = False, stopped: Callable[[], bool] = lambda: False) -> None:
        """Work until `stopped` says so, or until no request of the queue is left."""
        while not stopped():
            if not self.step():
                if until_done and self.queue.done:
                    break
                time.sleep(PAUSE)
        self.close()

    def close(self) -> None:
        """Leave: requests, blocks and memory go to the others."""
        self.queue.leave()
        self.cache.manager.leave()
        self.cache.storage.close()

    def step(self) -> bool:
        """Take requests, compute one step of every text, answer those that are complete. False: nothing to do."""
        try:
            self._look_around()
            self._begin()
            if not self.writing:
                return False
            self._compute()
            self._finish()
        except (CoordinatorError, StalePlan):
            self._rejoin()
        return True

    # Requests

    def _look_around(self) -> None:
        """Say that we live, take requests if there is room, and what dead workers held."""
        now = time.monotonic()
        room = 0 if self.waiting else self.max_batch - len(self.writing)
        if room or now - self._taken > self.queue.lease_seconds / 4:
            held = [*self.writing, *self.waiting]
            taken = self.queue.take(room, [text.request.id for text in held])
            self._taken = now
            self._give_up([text for text in held if text.request.id not in taken.kept])
            for request in taken.new:
                self._accept(request)
        if now - self._reaped > self.reap_every:
            self._reaped = now
            if self.cache.manager.lease_left < self.cache.manager.lease_seconds / 2:
                self.cache.manager.heartbeat()
            self.cache.manager.reap(grace=self.grace)

    def _accept(self, request: TextRequest) -> None:
        try:
            text = Writing.of(request, self.model)
            most, pool = self._blocks(text), self.cache.num_blocks
            if most > pool:
                raise ValueError(f"the text needs up to {most} blocks, the pool has {pool}")
        except (ValueError, TypeError) as error:
            self.queue.finish(request.id, {"error": str(error)})
        else:
            self.waiting.append(text)

    def _give_up(self, texts: list[Writing]) -> None:
        """Forget texts that are others' by now."""
        self._release([text for text in texts if text in self.writing])
        for text in texts:
            self.waiting.remove(text)

    def _finish(self) -> None:
        done = [text for text in self.writing if text.left == 0]
        for text in done:
            answer = {
                "text": self.model.tokenizer.decode(text.tokens[text.prompt :]),
                "worker": self.queue.worker,
                "hits": text.hits,
                "restarts": text.restarts,
            }
            self.finished += self.queue.finish(text.request.id, answer)
        self.writing = [text for text in self.writing if text.left]
        self._free(done)

    # Steps

    def _begin(self) -> None:
        """Let one of those that wait begin, if there is room; the next one may find what this one computes."""
        if not self.waiting or len(self.writing) >= self.max_batch:
            return
        text = self.waiting[0]
        if text.left:  # otherwise only its answer is missing
            if self._blocks(text) > self.cache.num_free:
                return
            text.seq_id = self.cache.add(tokens=text.tokens)
        self.writing.append(self.waiting.popleft())

    def _compute(self) -> None:
        """One step of the model for all texts; the last ones give way if the pool is too full for it."""
        texts = [text for text in self.writing if text.left]
        while texts:
            try:
                reservation = self._extend(texts)
            except PoolExhausted:
                if len(texts) == 1 and self._is_oldest(texts[0]):
                    time.sleep(PAUSE)
                    self.cache.manager.heartbeat()
                    return
                self._release([texts.pop()])
                continue
            break
        if not texts:
            time.sleep(PAUSE * (1 + np.random.default_rng().random()))
            return
        for text, start in zip(texts, reservation.start.tolist(), strict=True):
            text.hits = start if text.hits is None else text.hits
        for text, logits in zip(texts, self._logits(texts, reservation), strict=True):
            text.choose(logits)

    def _extend(self, texts: list[Writing]):
        """Room for all tokens that are known and not computed."""
        ids = [text.seq_id for text in texts]
        lengths = self.cache.lengths(ids).tolist()
        counts = [
            len(text.tokens) - length if length else None for text, length in zip(texts, lengths, strict=True)
        ]
        return self.cache.extend(ids, counts)

    def _logits(self, texts: list[Writing], reservation) -> np.ndarray:
        """Run a reservation through the model: logits of each text's last token, [batch, vocabulary]."""
        cache, work = self.cache, self.cache.work(reservation)
        plan = cache.plan(reservation.seq_ids, work.counts)

        def attend(layer, q, k, v):
            cache.write(layer, work.reservation, k[work.lacking], v[work.lacking])
            return cache.attend(layer, q, plan)  # [n, q_heads, head_dim]

        rows = [np.arange(start, start + count) for start, count in zip(work.start, work.counts, strict=True)]
        tokens = [np.array(text.tokens)[row] for text, row in zip(texts, rows, strict=True)]
        logits = self.model.decode(np.concatenate(tokens), np.concatenate(rows), attend)
        new = [text.tokens[start:] for text, start in zip(texts, reservation.start.tolist(), strict=True)]
        cache.commit(reservation.seq_ids, new)
        return logits[np.cumsum(work.counts) - 1]

    def _blocks(self, text: Writing) -> int:
        """Blocks that a text can come to need; its last token is chosen, but never run."""
        return -(-(text.prompt + text.request.tokens - 1) // self.cache.block_size)

    # Giving way, and beginning again

    def _release(self, texts: list[Writing]) -> None:
        """Give blocks up; the texts wait, and what they held is computed again, or found."""
        self._free(texts)
        self.writing = [text for text in self.writing if text not in texts]
        self._let_wait(texts)

    def _free(self, texts: list[Writing]) -> None:
        if ids := [text.seq_id for text in texts if text.seq_id is not None]:
            self.cache.free(ids)

    def _let_wait(self, texts: list[Writing]) -> None:
        for text in texts:
            text.seq_id, text.restarts = None, text.restarts + 1
        self.waiting.extendleft(reversed(texts))

    def _is_oldest(self, text: Writing) -> bool:
        return text.request.id == min(self.queue.claims(), default=text.request.id)

    def _rejoin(self) -> None:
        """Join the pool anew: what we held there is not ours any more, the requests may still be."""
        self._let_wait(self.writing)
        self.writing = []
        self.cache.storage.close()
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self.cache = self.join()
                break
            except Unreachable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(PAUSE)
        self.rejoined += 1
        self._taken = float("-inf")
