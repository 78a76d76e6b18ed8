"""vLLM's own block manager as a witness: `python -m pagedkv.integrations.vllm.oracle OUT`, by a Python that has vLLM.

`KVCacheManager` needs no model, engine or kernel. A `Recorder` writes down what one does for whoever uses it: the
traffic here, or a whole engine. Written for vLLM 0.32; only this file knows how its block manager is called.
"""

import argparse
import os
import random
from functools import partial

from .trace import Outcome, Step, Trace, write_trace

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
try:
    import torch
    import vllm
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request, RequestStatus
except ImportError as error:
    raise ImportError(f"the oracle runs in a Python that has vLLM 0.32: {error}") from error

MAX_LENGTH = 8192


class Recorder:
    """Writes down every step of a `KVCacheManager`, whoever asks for it."""

    def __init__(self, manager: KVCacheManager):
        self.manager, self.pool, self.steps = manager, manager.block_pool, []
        self._live: dict[str, str] = {}  # name in the trace -> id of the request
        for name in ("allocate_slots", "free", "reset_prefix_cache"):
            setattr(manager, name, partial(getattr(self, name), getattr(manager, name)))

    def trace(self) -> Trace:
        size = self.manager.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        return Trace(len(self.pool.blocks), size, self.steps, vllm.__version__)

    # What the manager's methods are replaced by

    def allocate_slots(self, allocate, request, num_new_tokens, num_new_computed_tokens=0, *args, **options):
        name, text = _name(request), list(request.all_token_ids)
        start, done = name not in self._live, request.num_computed_tokens
        blocks = allocate(request, num_new_tokens, num_new_computed_tokens, *args, **options)
        count = num_new_tokens
        if blocks is None and options.get("full_sequence_must_fit"):
            count = len(text) - num_new_computed_tokens  # that is what there was no room for
        if blocks is not None:
            self._live[name] = request.request_id
        self._note(
            "start" if start else "extend",
            name,
            tokens=text if start else text[done : done + num_new_tokens],
            count=count,
            salt=request.cache_salt if start else None,
            granted=blocks is not None,
            hit=num_new_computed_tokens,
            new=[] if blocks is None else blocks.get_block_ids()[0],
        )
        return blocks

    def free(self, free, request):
        free(request)
        if self._live.pop(_name(request), None) is not None:
            self._note("free", _name(request))

    def reset_prefix_cache(self, reset):
        done = reset()
        self._note("reset", None, granted=done)
        return done

    def _note(self, op, seq, tokens=(), count=0, salt=None, granted=True, hit=0, new=()) -> None:
        hashes = {b.block_id: b.block_hash[:4].hex() for b in self.pool.blocks if b.block_hash}
        outcome = Outcome(
            granted,
            hit,
            list(new),
            {name: list(self.manager.get_block_ids(rid)[0]) for name, rid in self._live.items()},
            [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()],
            [block.ref_cnt for block in self.pool.blocks[1:]],
            hashes,
        )
        self.steps.append(Step(op, seq, list(tokens), count, salt, outcome))


def _name(request) -> str:
    return request.request_id.split("-")[0]  # an engine appends something of its own


class Traffic:
    """Requests for a manager without an engine, as vLLM's scheduler would make them."""

    def __init__(self, num_blocks: int, block_size: int):
        init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=MAX_LENGTH,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
            enable_caching=True,
        )
        self.recorder = Recorder(self.manager)
        self.running: dict[str, Request] = {}
        self._hasher = get_request_block_hasher(block_size, sha256)

    def request(self, name: str, tokens: list[int], salt: str | None = None) -> Request:
        sampling = SamplingParams(max_tokens=MAX_LENGTH, temperature=0)
        return Request(name, list(tokens), sampling, None, cache_salt=salt, block_hasher=self._hasher)

    def start(self, request: Request, chunk: int = MAX_LENGTH) -> bool:
        """Look a request up and make room for all of it, or for a chunk; whether there was."""
        hits, hit, _ = self.manager.get_computed_blocks(request)
        count = min(chunk, request.num_tokens - hit)
        if self.manager.allocate_slots(request, count, hit, hits) is None:
            return False
        request.num_computed_tokens, request.status = hit + count, RequestStatus.RUNNING
        self.running[request.request_id] = request
        return True

    def go_on(self, name: str, token: int, chunk: int = MAX_LENGTH) -> bool:
        """The next chunk of a prompt, or where there is none, the token that was sampled last."""
        request = self.running[name]
        sampled = request.num_computed_tokens == request.num_tokens
        if sampled:
            request.append_output_token_ids([token])
        count = min(chunk, request.num_tokens - request.num_computed_tokens)
        if self.manager.allocate_slots(request, count) is None:
            return False  # the sampled token waits: it is due again next time
        request.num_computed_tokens += count
        return True

    def stop(self, name: str) -> Request:
        """Free a request: it is done, or preempted and may start again with all that it has."""
        request = self.running.pop(name)
        self.manager.free(request)
        request.num_computed_tokens, request.status = 0, RequestStatus.PREEMPTED
        return request


def story() -> Trace:
    """A dozen blocks of four tokens: hits, a whole prompt found, both ends of the queue, eviction, refusal, salt."""
    t = Traffic(12, 4)
    text = list(range(10, 20))

    def start(name, tokens, salt=None):
        return t.start(t.request(name, list(tokens), salt))

    start("A", text)
    for token in (20, 21, 22):
        t.go_on("A", token)
    start("B", [*text[:8], 90, 91, 92])
    start("C", text[:8])  # all of it is found, but its last token and with it a block is computed again
    t.go_on("C", 50)
    for name in "ACB":
        t.stop(name)
    start("D", text[:9])
    start("E", range(100, 120))
    start("F", range(200, 230))  # does not fit
    t.go_on("D", 19)
    late = t.stop("D")  # preempted
    start("G", text[:9], salt="x")  # the same text, but not for everybody; a block that was cached is taken
    t.stop("E")
    t.start(late)
    t.manager.reset_prefix_cache()  # not while somebody runs
    for name in "GD":
        t.stop(name)
    t.manager.reset_prefix_cache()
    start("H", text[:9])  # nothing is found any more
    return t.recorder.trace()


def random_traffic(num_blocks: int, block_size: int, steps: int, seed: int) -> Trace:
    """Prompts that begin alike, in chunks or whole, sampled tokens, preemption, refusals, salts, resets."""
    rng, t = random.Random(seed), Traffic(num_blocks, block_size)
    room = (num_blocks - 1) * block_size
    beginnings = [[rng.randrange(4) for _ in range(room // 3)] for _ in range(4)]
    waiting: list[Request] = []
    names = (f"s{i}" for i in range(steps + 1))
    while len(t.recorder.steps) < steps:
        what = rng.random()
        chunk = rng.choice([MAX_LENGTH, rng.randrange(1, 3 * block_size + 1)])
        if not t.running or what < 0.12:
            tokens = rng.choice(beginnings)[: rng.randrange(1, room // 3)]
            tokens += [rng.randrange(4) for _ in range(rng.randrange(0, 2 * block_size + 2))]
            salt = rng.choice([None] * 5 + ["x"])
            t.start(t.request(next(names), tokens, salt), chunk)
        elif waiting and what < 0.16:
            again = waiting.pop(rng.randrange(len(waiting)))
            if not t.start(again, chunk):
                waiting.append(again)
        elif what < 0.24:
            t.stop(rng.choice(list(t.running)))
        elif what < 0.27:
            waiting.append(t.stop(rng.choice(list(t.running))))
        elif what < 0.29:
            if rng.random() < 0.2:
                for name in list(t.running):
                    t.stop(name)
            t.manager.reset_prefix_cache()
        else:
            t.go_on(rng.choice(list(t.running)), rng.randrange(4), chunk)
    return Trace(**(vars(t.recorder.trace()) | {"steps": t.recorder.steps[:steps]}))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pagedkv.integrations.vllm.oracle", description=__doc__)
    parser.add_argument("out", help="where to write the trace: .jsonl or .jsonl.gz")
    parser.add_argument("--story", action="store_true", help="the short trace of the package")
    parser.add_argument("--blocks", type=int, default=25, help="of the pool, the null block included")
    parser.add_argument("--block-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    trace = (
        story() if given.story else random_traffic(given.blocks, given.block_size, given.steps, given.seed)
    )
    write_trace(given.out, trace)


if __name__ == "__main__":
    main()
