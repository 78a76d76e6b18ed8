"""Who computes in the next step, who waits, and who has to give way when the pool is full."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..allocator import Observed, Observer, PoolExhausted, whole_number
from ..block_table import NOTHING, SeqId
from ..cache import PagedKVCache
from ..manager import BlockManager, Reservation
from .request import Request, SequenceGroup
from .step import Chunk, Step

PREEMPTIONS = ("recompute", "swap")


class Scheduler(Observed):
    """Continuous batching, first come first served, over a manager or a cache (Kwon et al. 2023, section 4.5).

    The running requests are always the oldest ones: only the head of the queue is admitted, and whoever must
    give way is the last that arrived, who then heads the queue. So the oldest request advances in every step,
    and no two requests can preempt each other for ever. Blocks are reserved by `schedule`; a step must be
    advanced before the next is scheduled.

    For one thread. Observers are told of every arrival, admission, preemption, abort, finish and step.

    Args: pool: a BlockManager, or a PagedKVCache whose copies are then made too; max_batch: sequences that
        run at once; token_budget: tokens of one step; chunk: the most of them that one prompt gets;
        watermark: share of the pool that an admission leaves free, so that the next tokens of the others
        find room; preemption: "recompute", or "swap" to `host`, another manager or cache, and recompute
        when it is full.
    Raises: ValueError for numbers out of range and a host that does not fit the pool.
    """

    def __init__(
        self,
        pool: BlockManager | PagedKVCache,
        *,
        max_batch: int = 256,
        token_budget: int = 2048,
        chunk: int | None = None,
        watermark: float = 0.01,
        preemption: str = "recompute",
        host: BlockManager | PagedKVCache | None = None,
        observers: Iterable[Observer] = (),
    ):
        super().__init__(observers)
        if preemption not in PREEMPTIONS:
            raise ValueError(f"preemption must be one of {PREEMPTIONS}, got {preemption!r}")
        if (preemption == "swap") != (host is not None):
            raise ValueError('preemption="swap" needs a host pool, and only it has one')
        if host is not None:
            _check_host(host, pool)
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark must be at least 0 and below 1, got {watermark!r}")
        self.pool, self.host = pool, host
        self.max_batch = whole_number("max_batch", max_batch, minimum=1)
        self.token_budget = whole_number("token_budget", token_budget, minimum=1)
        self.chunk = self.token_budget if chunk is None else whole_number("chunk", chunk, minimum=1)
        self.watermark = int(watermark * pool.num_blocks)  # in blocks
        self.running: list[SequenceGroup] = []  # oldest first
        self.waiting: deque[SequenceGroup] = deque()  # oldest first; swapped ones among them
        self._groups: dict[SeqId, SequenceGroup] = {}  # by request
        self._names: set[SeqId] = set()  # of their sequences
        self._step: Step | None = None  # scheduled, not yet advanced
        self._aborted: set[SeqId] = set()  # meanwhile

    @property
    def unfinished(self) -> int:
        """Requests that run or wait."""
        return len(self._groups)

    @property
    def swapped(self) -> list[SequenceGroup]:
        """Those of the waiting whose blocks are in the host pool."""
        return [group for group in self.waiting if group.place == "swapped"]

    # Requests come and go

    def add(self, request: Request) -> SequenceGroup:
        """Put a request at the end of the queue.

        Returns: its group, which tells how far it has come.
        Raises: ValueError if its name is in use, or if it could not be computed even alone.
        """
        started = self._clock()
        group = SequenceGroup(request)
        self.check_fits(request)
        if request.id in self._groups:
            raise ValueError(f"request {request.id!r} exists already")
        for seq_id in group.names:
            if seq_id in self._names or _knows(self.pool, seq_id) or _knows(self.host, seq_id):
                raise ValueError(f"sequence {seq_id!r} exists already")
        self._groups[request.id] = group
        self._names.update(group.names)
        self.waiting.append(group)
        self._tell("arrive", started, (request.id,), waiting=len(self.waiting))
        return group

    def abort(self, request_id: SeqId) -> None:
        """Forget a request, at any time; of a step that is being computed it leaves at `advance`.

        Raises: KeyError if it is not known, or has finished.
        """
        started = self._clock()
        group = self._groups.get(request_id)
        if group is None or request_id in self._aborted:
            raise KeyError(f"there is no request {request_id!r}")
        if self._step is not None and group.place == "running":
            self._aborted.add(request_id)
        else:
            self._leave(group)
        self._tell("abort", started, (request_id,), free=self.pool.num_free)

    def check_fits(self, request: Request) -> None:
        """Make sure that a request could be computed alone: otherwise it would wait for ever, as all behind it.

        Raises: ValueError for one that needs more blocks, positions or tokens in a step than there are.
        """
        name, manager = request.id, self._manager
        needed, limit = request.most_blocks(manager.block_size), manager.tables.max_length
        if needed > manager.num_blocks:
            raise ValueError(
                f"request {name!r} needs up to {needed} blocks, the pool has {manager.num_blocks}"
            )
        if limit is not None and request.most_tokens > limit:
            raise ValueError(f"request {name!r} needs {request.most_tokens} positions, max_length is {limit}")
        hashes, full = request.block_hashes, request.num_tokens // manager.block_size
        if hashes is not None and len(hashes) < full:
            raise ValueError(f"the prompt of {name!r} fills {full} blocks, got {len(hashes)} block_hashes")
        most = min(self.max_batch, self.token_budget, self.chunk * request.width)
        if request.width > most:
            raise ValueError(
                f"request {name!r} writes {request.width} texts side by side, a step takes {most}"
            )

    # A step

    def schedule(self) -> Step:
        """Choose what the next step computes, and reserve its blocks.

        First the running requests get their next tokens, for which the last that arrived may have to give way;
        then, unless one had to, requests are admitted from the head of the queue.

        Returns: the Step, without chunks if there is no request.
        Raises: PoolExhausted if nothing can run because others hold the blocks; ValueError if the last step was
            not advanced. Nothing is changed.
        """
        started = self._clock()
        if self._step is not None:
            raise ValueError("the last step has not been advanced yet")
        shares = self._share_budget()
        preempted = self._make_room(shares)
        reservations = [self._extend(shares)] if shares else []
        chunks = [self._chunk(group, n) for group, n in shares.items()]
        admitted = []
        if not preempted:
            for group, n, reservation in self._admit(self.token_budget - _total(shares)):
                reservations.append(reservation)
                chunks.append(self._chunk(group, n))
                admitted.append(group.request.id)
        names = tuple(group.request.id for group in preempted)
        self._step = Step(tuple(chunks), tuple(reservations), tuple(admitted), names)
        self._tell(
            "schedule",
            started,
            tuple(chunk.request_id for chunk in chunks),
            prefill=self._step.prefill_tokens,
            decode=self._step.decode_tokens,
            recomputed=self._step.recomputed_tokens,
            running=len(self.running),
            waiting=len(self.waiting),
            free=self.pool.num_free,
        )
        return self._step

    def repeat(self, step: Step, times: int) -> Step:
        """Let a step that only decodes stand for several in a row, while all would be alike.

        For simulations, which need no tokens: nobody finishes, is admitted or has to give way in between.

        Args: step: what `schedule` returned last; times: how many steps at most.
        Returns: the Step to advance in its place; the blocks of all of its repeats are reserved.
        Raises: ValueError if it is not the step that was scheduled last.
        """
        self._check_current(step)
        whole_number("times", times, minimum=1)
        if step.admitted or step.preempted:
            return step  # the next one may admit someone
        if not step.chunks or not all(chunk.decode for chunk in step.chunks):
            return step
        groups = [self._groups[chunk.request_id] for chunk in step.chunks]
        alike = min([times, *(group.request.max_new_tokens - group.written for group in groups)])
        extra = self._with_room(groups, alike - 1)
        if extra > 0:
            self._extend(dict.fromkeys(groups, extra))
        self._step = replace(step, repeat=1 + extra)
        return self._step

    def advance(
        self,
        step: Step,
        tokens: Mapping[SeqId, Sequence[int]] | None = None,
        *,
        parents: Mapping[SeqId, Sequence[int]] | None = None,
        stop: Iterable[SeqId] = (),
    ) -> list[SequenceGroup]:
        """Say that a step was computed, and which tokens were chosen.

        Args: step: what `schedule` returned last; tokens: for each request whose chunk `samples`, a token per
            sequence; None in a simulation; parents: of beams, the row that each continues; stop: sequences
            that end here.
        Returns: the groups that have finished; they hold no blocks any more.
        Raises: ValueError for another step and for tokens that are missing or too many; nothing is changed.
        """
        self._check_current(step)
        finished, stop = [], set(stop)
        if tokens is not None or parents is not None or stop:
            self._check_choices(step, tokens, parents, stop)
        self._step = None
        self._commit(step)
        self._leave_aborted()
        for chunk in step.chunks:
            group = self._groups.get(chunk.request_id)
            if group is not None:
                self._write(group, chunk, step.repeat, tokens, parents)
                if self._end(group, stop):
                    finished.append(group)
        return finished

    def cancel(self, step: Step) -> None:
        """Take back a step that could not be computed: its tokens are pending again.

        Raises: ValueError if it is not the step that was scheduled last.
        """
        self._check_current(step)
        for chunk in step.chunks:
            group = self._groups[chunk.request_id]
            for seq_id in chunk.seq_ids:
                self.pool.truncate(seq_id, chunk.start)
            group.computed = chunk.start
        self._step = None
        self._leave_aborted()

    def tokens(self, chunk: Chunk) -> np.ndarray:
        """The tokens that a chunk computes, sequence after sequence: int64 [num_tokens of all of them]."""
        group, stop = self._groups[chunk.request_id], chunk.start + chunk.num_tokens
        return np.concatenate([group.tokens(seq_id, chunk.start, stop) for seq_id in chunk.seq_ids])

    # Who computes how much

    def _share_budget(self) -> dict[SequenceGroup, int]:
        """Tokens per sequence for the running groups, oldest first, until the budget is spent."""
        shares, left = {}, self.token_budget
        for group in self.running:
            width = len(group.active)
            n = min(group.pending, self.chunk, left // width)
            if n > 0:
                shares[group] = n
                left -= n * width
        return shares

    def _make_room(self, shares: dict[SequenceGroup, int]) -> list[SequenceGroup]:
        """Preempt, last arrived first, until the shares find enough blocks. They leave `shares` too."""
        preempted = []
        if _most_blocks(shares, self.pool.block_size) <= self.pool.num_free:
            return preempted  # without asking more closely
        while shares and self.pool.blocks_needed(*_flat(shares)) > self.pool.num_free:
            victim = self.running[-1]
            shares.pop(victim, None)
            self._preempt(victim)
            preempted.append(victim)
        return preempted

    def _with_room(self, groups: list[SequenceGroup], most: int) -> int:
        """How many tokens more, up to `most`, all sequences find blocks for; their last blocks are their own."""
        size, free = self.pool.block_size, self.pool.num_free
        held = np.array([group.computed for group in groups for _ in group.active])  # [sequences]
        blocks = -(-held // size)
        fits, too_many = 0, most + 1
        while too_many - fits > 1:
            extra = (fits + too_many) // 2 if too_many <= most else most
            if (-(-(held + extra) // size) - blocks).sum() <= free:
                fits = extra
            else:
                too_many = extra
        return fits

    def _admit(self, budget: int) -> Iterable[tuple[SequenceGroup, int, Reservation]]:
        """Let groups in from the head of the queue, until one does not fit: nobody overtakes it."""
        rows = sum(len(group.seq_ids) for group in self.running)
        while self.waiting and budget > 0:
            group = self.waiting[0]
            rows += len(group.seq_ids)
            if rows > self.max_batch:
                break
            admit = self._swap_in if group.place == "swapped" else self._begin
            admitted = admit(group, budget)
            if admitted is None:
                break
            budget -= admitted[0] * len(group.active)
            yield group, *admitted

    def _begin(self, group: SequenceGroup, budget: int) -> tuple[int, Reservation] | None:
        """Admit a group that has nothing in the pool. Its whole prompt must fit, though a chunk is computed."""
        started = self._clock()
        (seq_id,), size = group.active, self.pool.block_size
        if not _knows(self.pool, seq_id):
            self._register(group)
        hit = self.pool.match(seq_id)
        n = min(group.announced - hit, self.chunk, budget)
        needed = self.pool.blocks_needed(seq_id, group.announced - hit)
        needed += -(-group.known // size) - -(-group.announced // size)
        if not self._has_room(needed):
            return None
        reservation = self.pool.extend(seq_id, n)
        group.computed = hit + n
        if group.preemptions == 0:
            group.hits = hit
        self._let_run(group, started, hit=hit)
        return n, reservation

    def _swap_in(self, group: SequenceGroup, budget: int) -> tuple[int, Reservation] | None:
        """Admit a group whose blocks are in the host pool: they come back, and it goes on where it was."""
        started = self._clock()
        ids = group.seq_ids if group.forked else group.active
        n = min(group.pending, self.chunk, budget // len(ids))
        blocks = _blocks_of(self.host, ids)
        if n == 0 or not self._has_room(blocks + self.host.blocks_needed(ids, n)):
            return None
        _move(self.host, self.pool, ids)
        reservation = self.pool.extend(ids, n)
        group.computed += n
        self._let_run(group, started, swapped_in=blocks)
        return n, reservation

    def _has_room(self, blocks: int) -> bool:
        """Whether an admission may take so many. The watermark protects those that run; alone, there are none."""
        free = self.pool.num_free
        if blocks <= free - (self.watermark if self.running else 0):
            return True
        if not self.running:
            raise PoolExhausted(blocks, free)  # add saw to it that it fits: the blocks are in other hands
        return False

    def _let_run(self, group: SequenceGroup, started: float, **counts: int) -> None:
        self.waiting.popleft()
        self.running.append(group)
        group.place = "running"
        self._tell("admit", started, (group.request.id,), free=self.pool.num_free, **counts)

    def _preempt(self, group: SequenceGroup) -> None:
        """Put a running group back to the head of the queue, its blocks to the host pool or to nowhere."""
        started = self._clock()
        before = self.pool.num_free
        self.running.remove(group)
        self.waiting.appendleft(group)
        group.preemptions += 1
        if self._swap_out(group):
            group.place = "swapped"
        else:
            self.pool.free(group.active)
            group.forget()
            group.place = "waiting"
        swapped = int(group.place == "swapped")
        freed = self.pool.num_free - before
        self._tell("preempt", started, (group.request.id,), swapped=swapped, freed=freed)

    def _swap_out(self, group: SequenceGroup) -> bool:
        if self.host is None or _blocks_of(self.pool, group.active) > self.host.num_free:
            return False
        _move(self.pool, self.host, group.active)
        return True

    # What a step changes

    def _extend(self, shares: Mapping[SequenceGroup, int]) -> Reservation:
        for group, n in shares.items():
            group.computed += n
        return self.pool.extend(*_flat(shares))

    def _chunk(self, group: SequenceGroup, n: int) -> Chunk:
        """The part of a group that has just been extended by `n` tokens."""
        start, done, ready = group.computed - n, group.pending == 0, group.forked or group.written == 0
        return Chunk(
            group.request.id,
            tuple(group.active),
            start,
            n,
            decode=done and n == 1 and group.written > 0 and group.forked,
            samples=done and ready,
            recomputed=max(0, min(group.computed, group.lost) - start),
        )

    def _write(self, group: SequenceGroup, chunk: Chunk, repeat: int, tokens, parents) -> None:
        """Take over the tokens that were chosen; fork when the prompt is done."""
        ids = group.seq_ids
        if not group.forked and group.pending == 0:
            self.pool.fork(ids[0], ids[1:])
            group.forked = True
        if not chunk.samples:
            return
        rows = None if parents is None else parents.get(chunk.request_id)
        if rows is not None and len(chunk.seq_ids) > 1:
            self.pool.reorder(ids, rows)
            before = [group.texts[seq_id] for seq_id in ids]
            group.texts.update({ids[i]: list(before[row]) for i, row in enumerate(rows)})
        if tokens is not None:
            for seq_id, token in zip(ids, tokens[chunk.request_id], strict=True):
                group.texts.setdefault(seq_id, []).append(int(token))
        group.written += repeat

    def _end(self, group: SequenceGroup, stop: set[SeqId]) -> bool:
        """Free the sequences of a group that end here; with the last of them it has finished."""
        if group.written == group.request.max_new_tokens or stop.issuperset(group.seq_ids):
            self._finish(group)
            return True
        stopped = [seq_id for seq_id in group.seq_ids if seq_id in stop]
        if stopped:
            self.pool.free(stopped)
            group.seq_ids = [seq_id for seq_id in group.seq_ids if seq_id not in stop]
        return False

    def _finish(self, group: SequenceGroup) -> None:
        started = self._clock()
        self._leave(group)
        names = {"written": group.written, "preemptions": group.preemptions, "free": self.pool.num_free}
        self._tell("finish", started, (group.request.id,), **names)

    def _leave_aborted(self) -> None:
        for request_id in self._aborted:
            self._leave(self._groups[request_id])
        self._aborted.clear()

    def _leave(self, group: SequenceGroup) -> None:
        """Free whatever a group holds, wherever it is, and forget it."""
        if group.place == "running":
            self.running.remove(group)
            self.pool.free(group.active)
        else:
            self.waiting.remove(group)
            if group.place == "swapped":
                self.host.free(group.active)
            elif _knows(self.pool, group.active[0]):
                self.pool.free(group.active)
        group.place = "done"
        del self._groups[group.request.id]
        self._names.difference_update(group.names)

    def _commit(self, step: Step) -> None:
        """Let the blocks that a step has filled be found by other prompts."""
        if not self._manager.prefix_cache:
            return
        tokens, hashes, size = {}, {}, self.pool.block_size
        for chunk in step.chunks:
            group = self._groups[chunk.request_id]
            start, stop = chunk.start, group.computed
            if group.request.prompt is not None:
                tokens |= {seq_id: group.tokens(seq_id, start, stop) for seq_id in chunk.seq_ids}
            elif filled := group.hashes(start // size, stop // size, size):
                hashes[chunk.seq_ids[0]] = filled  # the others, if any, were forked behind them
        tokens = {seq_id: row for seq_id, row in tokens.items() if len(row)}
        self.pool.commit([*tokens], [*tokens.values()])
        self.pool.commit([*hashes], block_hashes=[*hashes.values()])

    # The pool

    @property
    def _manager(self) -> BlockManager:
        return self.pool.manager if isinstance(self.pool, PagedKVCache) else self.pool

    def _register(self, group: SequenceGroup) -> None:
        """Announce what a group is going to compute first, so that its beginning can be found in the cache."""
        (seq_id,), request, size = group.active, group.request, self.pool.block_size
        apart = {"cache_salt": request.cache_salt, "adapter": request.adapter}
        group.announced = group.known
        if request.prompt is not None:
            tokens = group.tokens(seq_id, 0, group.known)
            group.announced = len(tokens)
            self.pool.add(seq_id, tokens=tokens, **apart)
        elif request.block_hashes is not None:
            hashes = group.hashes(0, group.known // size, size)
            group.announced = min(group.known, len(hashes) * size + size - 1)
            self.pool.add(seq_id, block_hashes=hashes, num_tokens=group.announced, **apart)
        else:
            self.pool.add(seq_id)

    def _check_current(self, step: Step) -> None:
        if step is None or step is not self._step:
            raise ValueError("this is not the step that was scheduled last, or it has been advanced")

    def _check_choices(self, step: Step, tokens, parents, stop: set[SeqId]) -> None:
        """What `advance` is told must speak of the sequences of this step, and of all that chose a token."""
        living = {
            chunk.request_id: self._groups[chunk.request_id].seq_ids if chunk.samples else []
            for chunk in step.chunks
            if chunk.request_id not in self._aborted
        }
        for name, given in (("tokens", tokens), ("parents", parents)):
            for request_id in (given or {}).keys() - living.keys() - self._aborted:
                raise ValueError(f"{name} for request {request_id!r}, which has no part in this step")
        for request_id, ids in living.items():
            chosen = ids if tokens is None else tokens.get(request_id, ())
            if len(chosen) != len(ids):
                raise ValueError(f"request {request_id!r} needs {len(ids)} tokens, got {len(chosen)}")
            rows = (parents or {}).get(request_id)
            if rows is not None and (len(rows) != len(ids) or not {*rows} <= {*range(len(ids))}):
                raise ValueError(
                    f"request {request_id!r} needs a row of its {len(ids)} for each, got {rows!r}"
                )
        for seq_id in stop.difference(*living.values()):
            raise ValueError(f"sequence {seq_id!r} chose no token in this step, so it cannot stop with it")


def _flat(shares: Mapping[SequenceGroup, int]) -> tuple[list[SeqId], list[int]]:
    """Shares as the manager wants them: ids of sequences, and tokens for each."""
    ids = [seq_id for group in shares for seq_id in group.active]
    return ids, [n for group, n in shares.items() for _ in group.active]


def _total(shares: Mapping[SequenceGroup, int]) -> int:
    return sum(n * len(group.active) for group, n in shares.items())


def _most_blocks(shares: Mapping[SequenceGroup, int], block_size: int) -> int:
    """No fewer blocks than the shares can need: the first token may cost a new block or a copy."""
    return sum(len(group.active) * (1 + -(-(n - 1) // block_size)) for group, n in shares.items())


def _knows(pool: BlockManager | PagedKVCache | None, seq_id: SeqId) -> bool:
    """Whether a sequence is registered in a pool."""
    try:
        return pool is not None and pool.length(seq_id) >= 0
    except KeyError:
        return False


def _check_host(host: BlockManager | PagedKVCache, pool: BlockManager | PagedKVCache) -> None:
    """A host must take whatever the pool holds; otherwise a swap would fail when it is needed."""
    if isinstance(host, PagedKVCache) != isinstance(pool, PagedKVCache) or host is pool:
        raise ValueError("the host must be another pool of the same kind: two managers, or two caches")
    if host.block_size != pool.block_size:
        raise ValueError(f"the host has blocks of {host.block_size}, the pool of {pool.block_size}")
    most, needed = (getattr(p, "manager", p).tables.max_length for p in (host, pool))
    if most is not None and (needed is None or needed > most):
        raise ValueError(f"the host's max_length is {most}, the pool's {needed}")
    if isinstance(host, PagedKVCache):
        host.storage.check_source(pool.storage)


def _blocks_of(pool: BlockManager | PagedKVCache, seq_ids: list[SeqId]) -> int:
    """Different blocks that sequences hold."""
    blocks = pool.block_tables(seq_ids)
    return len(np.unique(blocks[blocks != NOTHING]))


def _move(source: BlockManager | PagedKVCache, target: BlockManager | PagedKVCache, ids: list[SeqId]) -> None:
    """Swap sequences from one pool to another (section 4.5)."""
    snapshot = source.snapshot(ids)
    if isinstance(target, PagedKVCache):
        target.restore(snapshot, source)
    else:
        target.restore(snapshot)
    source.free(ids)
