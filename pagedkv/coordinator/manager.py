"""`BlockManager` for several processes: the pool stands in Redis, each worker holds a lease on its sequences."""

import itertools
import os
import socket
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..allocator import Observer, whole_number, whole_numbers
from ..block_table import NOTHING, SeqId, as_ids
from ..manager import MAX_SLOTS, NO_BLOCKS, BlockManager, Reservation, _is_step
from ..prefix_cache import Commit
from ..snapshot import Snapshot
from .connection import Scripts, sections_of
from .errors import CoordinatorError, LeaseLost, PoolLost, Unreachable
from .parcel import packed, unpacked
from .server import default_url
from .views import MirroredTables, SharedBlocks, SharedIndex

MICROSECONDS = 1_000_000


@dataclass(frozen=True)
class Worker:
    """One process with a lease on the pool, as `owners` lists them."""

    name: str
    token: int  # grows with every registration: the larger one is right
    lease_left: float  # seconds, by the server's clock; below 0 it is over
    sequences: dict[SeqId, tuple[int, ...]]  # block tables, −1 where a block was left behind
    lengths: dict[SeqId, int]
    pending: tuple[int, ...] = ()  # sources of copies that it has not confirmed


@dataclass(frozen=True)
class Reclaimed:
    """What a reaper took back."""

    workers: tuple[str, ...]
    seq_ids: tuple[SeqId, ...]
    freed: np.ndarray  # int32  blocks that became free; what others share is kept
    version: int  # of the pool, after that


class RedisBlockManager(BlockManager):
    """A BlockManager whose pool of blocks several processes share.

    The pool (free queue, counts, tables, lengths, what can be found) stands in Redis and is changed by scripts there,
    each of which does all of a call or nothing. A worker's own sequences are mirrored here, so that reading costs no
    round trip; nobody else may change them. A sequence has one owner, the worker that added or adopted it.

    A call that raises Unreachable may have happened or not. Repeat it with the same arguments: it is not done twice.

    Args: url: of the server, or of any one of a Redis Cluster, with password and database if needed; None:
        $REDIS_URL, else a server inside this process; pool: its name; num_blocks, block_size, max_length,
        prefix_cache, namespace: as in BlockManager: who comes first makes the pool, later ones may leave them
        out or must say the same; worker: a name that no other has (None: made up); one that is registered
        already is taken over, and its sequences reclaimed; lease_seconds: how long the pool waits for a word
        from this worker; each accepted write is one, and so is `heartbeat`; timeout: seconds that a call may
        wait for the server.
    Raises: ValueError for another configuration than the pool's; Unreachable, CoordinatorError for what the
        server says.
    Source: Kwon et al. 2023, section 4.6 (one block manager for all workers); fencing tokens: Burrows 2006, "The
        Chubby lock service for loosely-coupled distributed systems", section 2.4 (sequencers).
    """

    def __init__(
        self,
        url: str | None = None,
        pool: str = "default",
        *,
        num_blocks: int | None = None,
        block_size: int | None = None,
        max_length: int | None = None,
        prefix_cache: bool | None = None,
        namespace: bytes | str | None = None,
        worker: str | None = None,
        lease_seconds: float = 10.0,
        timeout: float = 5.0,
        observers: Iterable[Observer] = (),
    ):
        settings = _settings(num_blocks, block_size, max_length, prefix_cache, namespace)
        self.url, self.pool = default_url() if url is None else url, str(pool)
        self.worker = worker or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.lease_seconds, self.timeout = (
            _seconds("lease_seconds", lease_seconds),
            _seconds("timeout", timeout),
        )
        self._scripts = Scripts(self.url, self.pool, self.timeout, self._told_again)
        self.observers = []  # nobody listens before it has joined
        self._generation, self.token, agreed = self._join(settings)
        super().__init__(**agreed, observers=observers)
        self.tables = MirroredTables(self.block_size, max_length=self.tables.max_length)
        self.allocator = SharedBlocks(self.num_blocks, self._look)
        self.prefix_index = SharedIndex(self._look, self._change_blocks)
        self._requests = 0  # changes of this worker that the server has acknowledged
        self._open: tuple | None = None  # the one whose outcome is not known
        self._copying = False  # whether the server keeps sources of copies for this worker

    # The lease

    @property
    def lease_left(self) -> float:
        """Seconds for which this worker may trust its lease, by its own clock and without asking the server.

        Counted from before the last accepted message was sent, so the server never thinks it shorter.
        """
        return self._lease_until - time.monotonic()

    def check_lease(self) -> None:
        """LeaseLost if the lease may be over; for those who are about to write into shared pages. No round trip."""
        if self.lease_left <= 0:
            raise LeaseLost(
                f"worker {self.worker!r} has not heard from pool {self.pool!r} for its lease_seconds = "
                f"{self.lease_seconds:g} s: its blocks may be another's by now"
            )

    def heartbeat(self) -> float:
        """Renew the lease; returns its seconds. LeaseLost if it is over."""
        started, sent = self._clock(), time.monotonic()
        self._understand(self._scripts.run("heartbeat", *self._caller()), started)
        self._lease_until = sent + self.lease_seconds
        return self.lease_seconds

    def confirm(self, reservation: Reservation | None = None) -> np.ndarray:
        """Say that the copies of all reservations so far are done: their sources lose the owner kept for them.

        Any later change by this worker says the same, since a worker copies before it goes on.

        Returns: int32 ids of the blocks that became free.
        """
        started = self._clock()
        if not self._copying and self._open is None:
            return np.zeros(0, np.int32)
        freed, free = self._write("confirm", started=started)
        self._tell("confirm", started, (), {"freed": freed}, free=int(free[0]))
        return freed

    def reap(self, *, grace: float = 0.0) -> Reclaimed:
        """Take back what workers hold whose lease has been over for `grace` seconds: once, whoever calls it."""
        started = self._clock()
        answer = self._understand(
            self._scripts.run("reap", *self._caller(), int(grace * MICROSECONDS)), started
        )
        (version,), freed, free = _int64(answer[0]), _int32(answer[1]), _int32(answer[2])
        last = 4 + int(answer[3])
        names, ids = answer[4:last], answer[last:]
        found = Reclaimed(
            tuple(name.decode() for name in names), tuple(map(_id_of, ids)), freed, int(version)
        )
        if found.workers or found.seq_ids:
            self._tell("reclaim", started, found.seq_ids, {"freed": freed}, free=int(free[0]))
        return found

    def leave(self) -> np.ndarray:
        """End the lease; what this worker still holds is freed. Returns int32 ids that became free."""
        started, ids = self._clock(), self.seq_ids
        answer = self._understand(self._scripts.run("leave", *self._caller()), started)
        freed, self._lease_until = _int32(answer[1]), 0.0
        for seq_id in ids:
            self._forget(seq_id)
        self._tell("leave", started, ids, {"freed": freed}, free=int(_int32(answer[2])[0]))
        self._scripts.close()
        return freed

    def owners(self) -> list[Worker]:
        """All workers with a lease, oldest token first, and what they hold: one consistent picture."""
        clock, *rest = self._look_at("workers")
        leases, seqs, tables, copying = _hashes(rest)
        found = []
        for name, lease in leases.items():
            token, ends = map(int, lease.split(b" ", 2)[:2])
            held = {key: text.split() for key, text in seqs.items() if int(text.split()[0]) == token}
            found.append(
                Worker(
                    name.decode(),
                    token,
                    (ends - int(clock)) / MICROSECONDS,
                    {_id_of(key): tuple(_int32(tables.get(key, b"")).tolist()) for key in held},
                    {_id_of(key): int(length) for key, (_, length, *_) in held.items()},
                    tuple(_int32(copying.get(b"%d" % token, b"")).tolist()),
                )
            )
        return sorted(found, key=lambda worker: worker.token)

    # Between workers

    def hand_over(self, seq_ids: SeqId | Iterable[SeqId], to: str) -> None:
        """Give sequences to another worker: from now on they are its own, and this one cannot change them.

        Raises: KeyError for an unknown sequence, ValueError for a worker without a lease; nothing is changed.
        """
        started = self._clock()
        ids, _ = self._rows(seq_ids, once=True)
        parcels = [packed(self.snapshot([seq_id])) for seq_id in ids]
        keys = map(_key_of, ids)
        self._write("hand_over", to.encode(), len(ids), *keys, *parcels, ids=ids, started=started)
        for seq_id in ids:
            self._forget(seq_id)
        self._tell("hand_over", started, ids)

    def adopt(self, seq_ids: SeqId | Iterable[SeqId] | None = None) -> list[SeqId]:
        """Begin to work on sequences that were handed over to this worker (all of them if None).

        Returns: their ids. Raises: KeyError for one that was not.
        """
        started = self._clock()
        ids = () if seq_ids is None else as_ids(seq_ids)
        if seq_ids is not None and not ids:
            return []
        (answer,) = self._write("adopt", *map(_key_of, ids), ids=ids, started=started, parsed=False)
        sections = sections_of(answer)
        adopted = []
        for key, parcel in zip(sections[::2], sections[1::2], strict=True):
            snapshot, seq_id = unpacked(parcel), _id_of(key)
            (self._texts[seq_id],) = snapshot.texts(self._root, self.prefix_index)
            self.tables.put(self.tables.add(seq_id), snapshot.indices, int(snapshot.lengths[0]))
            adopted.append(seq_id)
        self._tell("adopt", started, adopted)
        return adopted

    # Reading: what a step of attention rests on needs a lease

    def versions(self, seq_ids: Iterable[SeqId]) -> np.ndarray:
        self.check_lease()
        return super().versions(seq_ids)

    def block_tables(self, seq_ids: Iterable[SeqId]) -> np.ndarray:
        self.check_lease()
        return super().block_tables(seq_ids)

    def to_csr(self, seq_ids: Iterable[SeqId]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self.check_lease()
        return super().to_csr(seq_ids)

    def match(self, seq_id: SeqId) -> int:
        ids, rows = self._rows([seq_id])
        answer = self._ask("match", ids, *self._growth(ids, rows, 1))
        return int(answer[0][0]) * self.block_size

    def blocks_needed(self, seq_ids, num_tokens=1) -> int:
        ids, rows = self._rows(seq_ids, once=True)
        return int(self._ask("plan", ids, *self._growth(ids, rows, num_tokens))[0][0])

    def can_extend(self, seq_ids, num_tokens=1) -> bool:
        ids, rows = self._rows(seq_ids, once=True)
        needed, available = self._ask("plan", ids, *self._growth(ids, rows, num_tokens))[0].tolist()
        return needed <= available

    # Growing

    def add(
        self,
        seq_id: SeqId | None = None,
        *,
        tokens=None,
        block_hashes=None,
        num_tokens=None,
        cache_salt=None,
        adapter=None,
    ) -> SeqId:
        started = self._clock()
        text = self._announced(tokens, block_hashes, num_tokens, cache_salt, adapter)
        wanted = _wanted([seq_id])
        (numbers,) = self._write("add", *_keys_wanted(wanted), ids=wanted, started=started, wide=(0,))
        (seq_id,) = _named(wanted, numbers)
        self.tables.add(seq_id)
        self._texts[seq_id] = text
        self._tell("add", started, (seq_id,))
        return seq_id

    def extend(self, seq_ids, num_tokens=1) -> Reservation:
        started = self._clock()
        ids, rows = self._rows(seq_ids, once=True)
        asked = self._growth(ids, rows, num_tokens)
        how = b"tell" if self.observers else b"run"
        new, *answer = self._write("extend", how, *asked, ids=ids, started=started, wide=(2, 3))
        if len(answer) < 2:
            free = int(answer[0][0]) if answer else None
            return self._stepped(started, ids, self.tables.next_step(rows), new, free=free)
        free, start, tokens, num_hits, hits, copied, evicted = answer
        prompts = self._prompts_begun(ids, rows, tokens) if self.prefix_cache else ()
        self._attach(ids, rows, start, num_hits, hits)
        copies = self._replace_tails(rows, start, copied.reshape(-1, 3))
        size = self.block_size
        self.tables.append(rows, -(-(start + tokens) // size) - -(-start // size), tokens, new)
        slots = self.tables.slots(rows, start, tokens)
        if prompts:
            self.prefix_stats.observe(len(prompts), sum(prompts), len(hits) * size)
        if self.observers:
            self._tell_growth(started, ids, tokens, new, copies, hits, evicted, int(free[0]))
        return Reservation(ids, start, tokens, slots, copies, self.tables.version(rows))

    def _check_contents(self, ids: Sequence[SeqId], plans: list[Commit], places: list[list[int]]) -> None:
        """Part of commit: the server checks the new full blocks of all sequences, and lets them be found."""
        super()._check_contents(ids, plans, places)
        self.prefix_index.just_sealed = set()
        filled = [
            (seq_id, block, digest)
            for seq_id, plan, blocks in zip(ids, plans, places, strict=True)
            for (digest, _), block in zip(plan.filled, blocks, strict=True)
            if block != NOTHING
        ]
        if not self.prefix_cache or not filled:
            return self.check_lease()
        owners, blocks, digests = zip(*filled, strict=True)
        (sealed,) = self._write("seal", _packed(blocks), b"".join(digests), ids=owners, about=blocks)
        self.prefix_index.just_sealed = set(sealed.tolist())
        return None

    # Sharing

    def fork(self, parent: SeqId, children: int | Iterable[SeqId] = 1) -> list[SeqId]:
        started = self._clock()
        _, (row,) = self._rows([parent])
        if not isinstance(children, Iterable):
            children = [None] * whole_number("the number of children", children, minimum=1)
        wanted = _wanted(as_ids(children))
        shared = self.tables.owned(row)
        (numbers,) = self._write(
            "fork", _key_of(parent), *_keys_wanted(wanted), ids=wanted, started=started, wide=(0,)
        )
        ids = _named(wanted, numbers)
        self.tables.fork(row, ids)
        self._texts.update((child, self._texts[parent].copy()) for child in ids)
        self._tell("fork", started, (parent, *ids), {"shared": shared})
        return ids

    def reorder(self, seq_ids: Iterable[SeqId], parents: Sequence[int]) -> np.ndarray:
        started = self._clock()
        ids, rows = self._rows(seq_ids, once=True)
        parents = whole_numbers("parents", parents)
        if parents.shape != (len(ids),) or ((parents < 0) | (parents >= len(ids))).any():
            raise ValueError(
                f"parents must be {len(ids)} numbers of 0 … {len(ids) - 1}, got {parents.tolist()}"
            )
        freed, free = self._write("reorder", _packed(parents), *map(_key_of, ids), ids=ids, started=started)
        moved = np.flatnonzero(parents != np.arange(len(ids))).tolist()
        new = [(self.tables.entries(rows[parents[i]]), self.tables.length(rows[parents[i]])) for i in moved]
        texts = [self._texts[ids[parents[i]]].copy() for i in moved]
        for i, (entries, length), text in zip(moved, new, texts, strict=True):
            self.tables.put(rows[i], entries, length)
            self._texts[ids[i]] = text
        self._tell("reorder", started, ids, {"freed": freed}, free=int(free[0]))
        return freed

    # Shrinking

    def truncate(self, seq_id: SeqId, length: int) -> np.ndarray:
        started = self._clock()
        ids, (row,) = self._rows([seq_id])
        length, held = whole_number("length", length), self.length(seq_id)
        if length > held:
            raise ValueError(f"sequence {seq_id!r} has {held} tokens, cannot truncate it to {length}")
        kept = self.tables.entries(row)[: -(-length // self.block_size)]
        if length % self.block_size and kept[-1] == NOTHING:
            raise ValueError(
                f"position {length - 1} of sequence {seq_id!r} was left behind by release_before"
            )
        freed, free = self._write(
            "truncate", _key_of(seq_id), length, self.block_size, ids=ids, started=started
        )
        if length < held:
            self.tables.put(row, kept, length)
            self._texts[seq_id].cut(length, self.block_size)
        self._tell("truncate", started, ids, {"freed": freed}, tokens=held - length, free=int(free[0]))
        return freed

    def release_before(self, seq_id: SeqId, position: int) -> np.ndarray:
        started = self._clock()
        ids, (row,) = self._rows([seq_id])
        position = whole_number("position", position)
        if position > self.length(seq_id):
            raise ValueError(f"sequence {seq_id!r} has {self.length(seq_id)} tokens, none at {position}")
        count = position // self.block_size
        freed, free = self._write("release_before", _key_of(seq_id), count, ids=ids, started=started)
        if (self.tables.entries(row)[:count] != NOTHING).any():
            self.tables.drop(row, count)
        self._tell("release_before", started, ids, {"freed": freed}, free=int(free[0]))
        return freed

    def free(self, seq_ids: SeqId | Iterable[SeqId]) -> np.ndarray:
        started = self._clock()
        ids, _ = self._rows(seq_ids, once=True)
        freed, free = self._write("free", *map(_key_of, ids), ids=ids, started=started)
        for seq_id in ids:
            self._forget(seq_id)
        self._tell("free", started, ids, {"freed": freed}, free=int(free[0]))
        return freed

    def reset_prefix_cache(self) -> bool:
        started = self._clock()
        if self._write("reset", self.num_blocks, started=started, parsed=False) is None:
            return False
        self.prefix_stats.reset()
        self._tell("reset_prefix_cache", started)
        return True

    # Moving

    def restore(self, snapshot: Snapshot) -> np.ndarray:
        started = self._clock()
        indptr, indices, lengths = snapshot.checked_tables(self.block_size, self.tables.max_length)
        texts = snapshot.texts(self._root, self.prefix_index)
        ids = _wanted(snapshot.seq_ids)
        kept = indices != NOTHING
        old, first, which, times = np.unique(
            indices[kept], return_index=True, return_inverse=True, return_counts=True
        )
        order = np.argsort(first)  # blocks are taken in the order of their first appearance
        place = np.empty(len(old), np.int64)
        place[order] = np.arange(len(old))
        indices[kept] = place[which]
        tables = [indices[start:stop] for start, stop in itertools.pairwise(indptr)]
        found = [
            (int(entry), link.digest)
            for table, text in zip(tables, texts, strict=True)
            for entry, link in zip(table, text.links(), strict=False)
            if entry != NOTHING and self.prefix_cache
        ]
        taken, evicted, free = self._write(
            "restore",
            _packed(times[order]),
            np.ascontiguousarray(lengths, "<i8").tobytes(),
            _packed([entry for entry, _ in found]),
            b"".join(digest for _, digest in found),
            *_keys_wanted(ids),
            *map(_packed, tables),
            ids=ids,
            started=started,
        )
        for seq_id, table, length, text in zip(ids, tables, lengths, texts, strict=True):
            self.tables.put(self.tables.add(seq_id), _mapped(table, taken), length)
            self._texts[seq_id] = text
        told = {"new": taken, "evicted": evicted} if self.prefix_cache else {"new": taken}
        self._tell("restore", started, ids, told, free=int(free[0]))
        return np.column_stack([old[order], taken]).astype(np.int32)

    # What is asked of the server

    def _growth(self, ids, rows, num_tokens) -> list:
        """The arguments of extend.lua behind its first."""
        start, limit = self.tables.length(rows), self.tables.max_length
        first = [self.block_size, b"" if limit is None else limit]
        keys = map(_key_of, ids)
        if np.count_nonzero(start) == len(ids) > 0 and (
            _is_step(num_tokens, len(ids)) or (self._counts(ids, start, num_tokens) == 1).all()
        ):
            return [*first, b"1", b"", *keys]
        tokens = self._counts(ids, start, num_tokens)
        prompts = np.zeros(len(ids), np.int64)
        digests = []
        for i in (start == 0).nonzero()[0].tolist():
            text = self._texts[ids[i]]
            if text.prompt_length:
                prompts[i] = text.prompt_length
                at_most = (
                    text.prompt_length - 1
                ) // self.block_size  # the last token is computed in any case
                digests.append(b"".join(text.digests[:at_most]) if self.prefix_cache else b"")
                if num_tokens is None or (not isinstance(num_tokens, int) and _item(num_tokens, i) is None):
                    tokens[i] = -1  # the rest of its prompt: what that is depends on the hits
        return [*first, _packed(tokens), _packed(prompts), *keys, *digests]

    def _prompts_begun(self, ids, rows, tokens) -> list[int]:
        """The lengths of the prompts that begin with these tokens."""
        begun = ((self.tables.length(rows) == 0) & (tokens > 0)).nonzero()[0].tolist()
        lengths = [self._texts[ids[i]].prompt_length for i in begun]
        return [length for length in lengths if length]

    def _attach(self, ids, rows, start, num_hits, hits) -> None:
        """Mirror that prompts own the cached blocks that they begin with."""
        place = 0
        for i in num_hits.nonzero()[0].tolist():
            n, length = int(num_hits[i]), int(start[i])
            self.tables.append(rows[[i]], np.array([n]), start[[i]], hits[place : place + n])
            self.prefix_index.carry_out(self._texts[ids[i]].goes_on(None, length, self.block_size))
            place += n

    def _replace_tails(self, rows, start, copied: np.ndarray) -> np.ndarray:
        """Mirror the new last blocks of writers; returns the copies: int32 [m, 3]."""
        if not len(copied):
            return np.zeros((0, 3), np.int32)
        places, sources, destinations = copied.T
        self._copying = True
        self.tables.replace(rows[places], self.tables.num_entries(rows[places]) - 1, destinations)
        return np.column_stack([sources, destinations, start[places] % self.block_size]).astype(np.int32)

    def _forget(self, seq_id: SeqId) -> None:
        self.tables.remove(seq_id)
        del self._texts[seq_id]

    def _join(self, settings: dict[str, bytes]) -> tuple[bytes, int, dict]:
        """Register in the pool, which the first one makes: its generation, our token, and what is agreed."""
        sent = time.monotonic()
        status, *answer = self._scripts.run(
            "join",
            uuid.uuid4().hex,
            self.worker.encode(),
            b"",
            b"",
            b"",
            *settings.values(),
            int(self.lease_seconds * MICROSECONDS),
        )
        if status == b"absent":
            raise ValueError(
                f"there is no pool {self.pool!r} yet: its first worker says num_blocks and block_size"
            )
        if status == b"format":
            raise CoordinatorError(
                f"pool {self.pool!r} has format {answer[0].decode()}, this version of pagedkv knows 1: "
                "choose another pool"
            )
        if status == b"differs":
            name, other = answer[0].decode(), answer[1]
            theirs, ours = (_setting(name, value) for value in (other, settings[name]))
            raise ValueError(f"{name} of pool {self.pool!r} is {theirs!r}, not {ours!r}")
        self._lease_until = sent + self.lease_seconds
        generation, token, *values = answer
        agreed = {name: _setting(name, value) for name, value in zip(settings, values, strict=True)}
        return generation, int(token), agreed

    def _caller(self, request: int | bytes = b"", copied: bool = False) -> tuple:
        return self._generation, self.worker.encode(), self.token, request, int(copied)

    def _write(self, name: str, *arguments, ids=(), started=0.0, about=(), wide=(), parsed=True):
        """Change the pool, as this worker's next request.

        Args: name: of the script; ids: what a refusal may speak of by number; about: the blocks likewise; wide:
            sections of the reply that are int64; parsed: whether all of them are numbers.
        Returns: the sections; None for a refusal that is an answer.
        """
        request = (name, arguments)
        if self._open not in (None, request):
            raise Unreachable(
                f"whether the last {self._open[0]} happened is not known: repeat it with the same arguments first"
            )
        self._open, sent = request, time.monotonic()
        try:
            reply = self._scripts.run(name, *self._caller(self._requests + 1, self._copying), *arguments)
        except Unreachable:
            raise
        except BaseException:
            self._open = None
            raise
        self._open = None
        if reply[0] == b"in use":
            return None
        (version, *answer) = self._understand(reply, started, ids, about)
        self._requests += 1
        self._copying, self._lease_until = False, sent + self.lease_seconds
        self.tables.now = int.from_bytes(version, "little")
        if not parsed:
            return answer
        return [_int64(part) if i in wide else _int32(part) for i, part in enumerate(answer)]

    def _ask(self, what: str, ids, *arguments) -> list[np.ndarray]:
        """Run extend.lua without changing anything."""
        reply = self._scripts.run("extend", *self._caller(), what.encode(), *arguments)
        return [_int32(part) for part in self._understand(reply, self._clock(), ids)]

    def _look(self, what: str, *blocks: np.ndarray) -> list[np.ndarray]:
        return [_int32(part) for part in self._look_at(what, *map(_packed, blocks))]

    def _look_at(self, what: str, *arguments) -> list[bytes]:
        reply = self._scripts.run("look", *self._caller(), what.encode(), *arguments)
        return self._understand(reply, self._clock())

    def _change_blocks(self, name: str, blocks: np.ndarray) -> list[np.ndarray]:
        return self._write(name, _packed(blocks))

    def _told_again(self) -> None:
        self._tell("conflict", self._clock())

    def _understand(self, reply: list[bytes], started: float, ids=(), about=()) -> list[bytes]:
        """The sections of a reply, or the error that its status stands for."""
        status, *sections = reply
        if status == b"ok":
            return sections
        words = [section.decode() for section in sections]
        who = f"worker {self.worker!r} of pool {self.pool!r}"
        if status == b"exhausted":
            self._refuse(started, int(words[0]), int(words[1]), ids)
        if status in (b"fenced", b"late"):
            self._tell("fence", started, ids)
            self._lease_until = 0.0
            over = f"{int(words[0]) / MICROSECONDS:.3f} s ago" if status == b"late" else "and taken back"
            raise LeaseLost(f"the lease of {who} (token {self.token}) is over, {over}: nothing was changed")
        if status == b"lost":
            self._lease_until = 0.0
            raise PoolLost(
                f"pool {self.pool!r} is not the one that was joined: its server has forgotten what it said"
            )
        if status == b"overtaken":
            raise CoordinatorError(f"another process changes the pool as {who}: each needs its own manager")
        if status == b"damaged":
            raise CoordinatorError(f"pool {self.pool!r} is damaged: {words[0]}")
        if status == b"nobody":
            raise ValueError(f"nobody to hand over to: that worker has no lease in pool {self.pool!r}")
        seq_id = ids[int(words[0])]
        if status == b"unknown":
            raise KeyError(f"no sequence {seq_id!r}: never added, or freed already")
        if status == b"exists":
            raise ValueError(f"sequence {seq_id!r} exists already")
        if status == b"long":
            raise ValueError(
                f"sequence {seq_id!r} would hold {words[1]} tokens, max_length is {self.tables.max_length}"
            )
        if status == b"other":
            block = about[int(words[0])]
            raise ValueError(f"sequence {seq_id!r}: its block {block} holds another text already")
        start, tokens, prompt = int(words[1]), words[2], self._texts[seq_id].prompt_length
        raise ValueError(
            f"sequence {seq_id!r} has {start} of its prompt's {prompt} tokens in the cache: "
            f"num_tokens can be {prompt - start} at most, got {tokens}"
        )


# Settings, ids and numbers as they travel


def _settings(num_blocks, block_size, max_length, prefix_cache, namespace) -> dict[str, bytes]:
    """The settings of a pool as text; "" where nothing is said."""
    numbers = {"num_blocks": num_blocks, "block_size": block_size, "max_length": max_length}
    said = {
        name: b"" if value is None else b"%d" % whole_number(name, value, minimum=1)
        for name, value in numbers.items()
    }
    if num_blocks is not None and block_size is not None and num_blocks * block_size > MAX_SLOTS:
        raise ValueError(f"{num_blocks} blocks of {block_size} exceed the 2**31 slots that int32 can number")
    said["prefix_cache"] = b"" if prefix_cache is None else b"%d" % bool(prefix_cache)
    if namespace is not None and not isinstance(namespace, bytes | str):
        raise ValueError(f"namespace must be str or bytes, got {namespace!r}")
    kind = b"s" if isinstance(namespace, str) else b"x"
    data = namespace.encode("utf-8", "surrogatepass") if isinstance(namespace, str) else namespace
    said["namespace"] = b"" if namespace is None else kind + data
    return said


def _setting(name: str, text: bytes):
    """A setting from its text."""
    if name == "namespace":
        return text[1:].decode("utf-8", "surrogatepass") if text[:1] == b"s" else text[1:]
    if name == "prefix_cache":
        return text == b"1"
    return None if text in (b"", b"none") else int(text)


def _seconds(name: str, value) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise ValueError(f"{name} must be seconds above 0, got {value!r}")
    return seconds


def _key_of(seq_id: SeqId) -> bytes:
    return b"s" + seq_id.encode("utf-8", "surrogatepass") if isinstance(seq_id, str) else b"i%d" % int(seq_id)


def _id_of(key: bytes) -> SeqId:
    return key[1:].decode("utf-8", "surrogatepass") if key[:1] == b"s" else int(key[1:])


def _wanted(seq_ids: Iterable[SeqId | None]) -> list[SeqId | None]:
    """Ids to register, None for the next unused number; ValueError for one of another type."""
    ids = [int(seq_id) if isinstance(seq_id, np.integer) else seq_id for seq_id in seq_ids]
    for seq_id in ids:
        if seq_id is not None and (not isinstance(seq_id, SeqId) or isinstance(seq_id, bool)):
            raise ValueError(f"a sequence id must be an int or a str, got {seq_id!r}")
    return ids


def _keys_wanted(ids: Iterable[SeqId | None]) -> list[bytes]:
    return [b"" if seq_id is None else _key_of(seq_id) for seq_id in ids]


def _named(wanted: list[SeqId | None], numbers: np.ndarray) -> list[SeqId]:
    return [n if seq_id is None else seq_id for seq_id, n in zip(wanted, numbers.tolist(), strict=True)]


def _item(values, i: int):
    return values[i] if isinstance(values, list | tuple) else values


def _mapped(table: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """A table of places among `taken`, −1 for nothing, as block ids."""
    return np.where(table < 0, NOTHING, taken[np.maximum(table, 0)] if len(taken) else NOTHING)


def _packed(numbers) -> bytes:
    return np.asarray(numbers, "<i4").tobytes()


def _int32(section: bytes) -> np.ndarray:
    return np.frombuffer(section, "<i4").astype(np.int32) if section else NO_BLOCKS


def _int64(section: bytes) -> np.ndarray:
    return np.frombuffer(section, "<i8").astype(np.int64)


def _hashes(sections: list[bytes]) -> list[dict[bytes, bytes]]:
    """Redis hashes from flat lists, each with its length in front."""
    flat, found = sections_of(sections[0]), []
    while flat:
        n = int(flat[0])
        part, flat = flat[1 : 1 + n], flat[1 + n :]
        found.append(dict(zip(part[::2], part[1::2], strict=True)))
    return found
