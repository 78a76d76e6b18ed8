"""A state machine: requests, steps, aborts and other users of the pool, in any order.

Tokens go through real, poisoned pages: after every step each sequence is read back through its table, in the pool or
in the host's. The "model" is a function of the text, so the text that each request must get is known beforehand.
"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from needs import STRESS
from pools import LAYERS, check_invariants, new_cache, vectors

from pagedkv import PoolExhausted
from pagedkv.serving import Request, Scheduler

MET = Counter()  # what happened, so that a test can demand that everything did


def next_token(text, row):
    """A token from a text, the same for everyone: few different ones, so that prompts often begin alike."""
    return int(sum(text) * 5 + len(text) + row) % 3 + 1


def parents_of(texts):
    """The row that each beam continues."""
    return [(sum(text) + row) % len(texts) for row, text in enumerate(texts)]


def chosen(request, texts):
    """What one step adds to the texts of a request, prompt included: new texts, parents."""
    rows = parents_of(texts) if request.beam_width else list(range(len(texts)))
    return [texts[row] + [next_token(texts[row], i)] for i, row in enumerate(rows)], rows


def alone(request):
    """The texts that a request must get, whatever happens around it."""
    prompt = request.prompt.tolist()
    texts = [[*prompt, next_token(prompt, i)] for i in range(request.width)]
    for _ in range(request.max_new_tokens - 1):
        texts, _ = chosen(request, texts)
    return [text[len(prompt) :] for text in texts]


class ServingMachine(RuleBasedStateMachine):
    """A Scheduler over a cache that others use too."""

    @initialize(
        num_blocks=st.integers(4, 14),
        block_size=st.sampled_from([1, 2, 4]),
        host_blocks=st.none() | st.integers(1, 12),
        prefix_cache=st.booleans(),
        token_budget=st.integers(4, 20),
        chunk=st.none() | st.integers(3, 6),
        watermark=st.sampled_from([0.0, 0.2]),
    )
    def start(self, num_blocks, block_size, host_blocks, prefix_cache, **options):
        self.cache = new_cache(num_blocks, block_size, prefix_cache=prefix_cache)
        self.host = None if host_blocks is None else new_cache(host_blocks, block_size)
        if self.host is not None:
            options |= {"preemption": "swap", "host": self.host}
        self.scheduler = Scheduler(self.cache, max_batch=6, observers=[self.notice], **options)
        self.requests, self.groups, self.others = [], {}, {}  # others: sequence -> tokens

    def notice(self, event):
        kinds = [event.kind] + [f"{event.kind} {name}" for name, n in event.counts.items() if n]
        MET.update(kinds)

    # Requests

    @rule(data=st.data(), n=st.integers(1, 4))
    def arrive(self, data, n):
        for _ in range(n):
            prompt = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=9), "prompt")
            kind = data.draw(st.sampled_from(["one", "one", "samples", "beams"]), "kind")
            options = {"samples": {"num_samples": 2}, "beams": {"beam_width": 3}}.get(kind, {})
            request = Request(
                f"r{len(self.requests)}", prompt, data.draw(st.integers(1, 8), "new"), **options
            )
            self.requests.append(request)
            if request.most_blocks(self.cache.block_size) > self.cache.num_blocks:
                with pytest.raises(ValueError, match="the pool has"):
                    self.scheduler.add(request)
                MET["too large"] += 1
            else:
                self.groups[request.id] = self.scheduler.add(request)
            self.check()

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from([*self.groups]))
        MET[f"abort {self.groups[request_id].place}"] += 1
        self.scheduler.abort(request_id)
        del self.groups[request_id]
        self.check()

    # Steps

    @precondition(lambda self: self.groups)
    @rule(times=st.integers(1, 6))
    def steps(self, times):
        for _ in range(times):
            if self.groups:
                self.one_step(lambda step: True)

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), succeeds=st.booleans(), aborts=st.booleans())
    def a_step_with_an_incident(self, data, succeeds, aborts):
        request_id = data.draw(st.sampled_from([*self.groups]))

        def incident(step):
            if aborts:
                place = self.groups[request_id].place
                self.scheduler.abort(request_id)
                MET[f"abort {place} during a step"] += 1
                del self.groups[request_id]
            return succeeds

        self.one_step(incident)

    def one_step(self, meanwhile):
        held = sum(self.cache.length(seq) for seq in self.others)
        oldest = next(iter(self.groups), None)
        before = None if oldest is None else self.progress(oldest)
        try:
            step = self.scheduler.schedule()
        except PoolExhausted:
            assert held, "nobody else holds blocks"
            MET["starved"] += 1
            return self.check()
        if step.chunks:
            tokens = np.concatenate([self.scheduler.tokens(chunk) for chunk in step.chunks])
            for layer in range(LAYERS):
                self.cache.write(layer, step.reservation, *vectors(layer, tokens))
        if not meanwhile(step):
            self.scheduler.cancel(step)
            MET["cancelled"] += 1
            return self.check()
        self.advance(step)
        if not held and oldest in self.groups:
            assert self.progress(oldest) > before, "the oldest advances in every step"
        return self.check()

    def progress(self, request_id):
        group = self.groups[request_id]
        return group.written, group.forked, group.computed

    def advance(self, step):
        tokens, parents = {}, {}
        for chunk in step.chunks:
            group = self.groups.get(chunk.request_id)
            if group is None or not chunk.samples:
                continue
            request, prompt = group.request, group.request.prompt.tolist()
            if group.written:
                texts = [prompt + group.texts[seq] for seq in group.seq_ids]
                texts, rows = chosen(request, texts)
                tokens[request.id] = [text[-1] for text in texts]
            else:
                rows = [0] * request.width
                tokens[request.id] = [next_token(prompt, i) for i in range(request.width)]
            if request.beam_width:
                parents[request.id] = rows
        for group in self.scheduler.advance(step, tokens, parents=parents):
            assert [*group.texts.values()] == alone(group.request)
            del self.groups[group.request.id]

    # Others, who use the pool as they like

    @rule(
        data=st.data(), what=st.sampled_from(["begin", "go on", "fork", "fork", "truncate", "leave", "leave"])
    )
    def others_use_the_pool(self, data, what):
        running = {
            seq: group.tokens(seq, 0, group.computed).tolist()
            for group in self.scheduler.running
            for seq in group.active
        }
        MET["others"] += 1
        name = f"other {MET['others']}"
        if what == "begin" and len(self.others) < 2:
            self.others[self.cache.add(name)] = []
            self.append(name, 2)
        elif what == "fork" and (running or self.others):
            parent = data.draw(st.sampled_from([*self.others, *running]))
            self.cache.fork(parent, [name])
            self.others[name] = list({**running, **self.others}[parent])
            MET["forked a request" if parent in running else "forked another"] += 1
        elif self.others:
            seq = data.draw(st.sampled_from([*self.others]))
            if what == "go on":
                self.append(seq, 2)
            elif what == "truncate":
                length = data.draw(st.integers(0, len(self.others[seq])))
                self.cache.truncate(seq, length)
                del self.others[seq][length:]
                MET["truncated"] += 1
            else:
                self.cache.free(seq)
                del self.others[seq]
        self.check()

    def append(self, seq, n):
        tokens = [7] * n
        layers = [vectors(layer, tokens) for layer in range(LAYERS)]
        try:
            self.cache.append(seq, *(np.stack(arrays) for arrays in zip(*layers, strict=True)), n)
            self.others[seq] += tokens
        except PoolExhausted:
            MET["another refused"] += 1
        self.check()

    # What must hold

    def check(self):
        scheduler = self.scheduler
        assert [group.request.id for group in (*scheduler.running, *scheduler.waiting)] == [*self.groups]
        check_invariants(self.cache)
        expected = dict(self.others)
        for group in scheduler.running:
            expected |= {seq: group.tokens(seq, 0, group.computed).tolist() for seq in group.active}
        self.assert_holds(self.cache, expected)
        if self.host is not None:
            check_invariants(self.host)
            swapped = {
                seq: group.tokens(seq, 0, group.computed).tolist()
                for group in scheduler.swapped
                for seq in group.active
            }
            self.assert_holds(self.host, swapped)

    def assert_holds(self, cache, expected):
        empty = {seq for seq in cache.seq_ids if cache.length(seq) == 0}  # a head of the queue is registered
        assert {*cache.seq_ids} - empty == {seq for seq, tokens in expected.items() if tokens}
        for seq, tokens in expected.items():
            for layer in range(LAYERS):
                keys, values = cache.gather(layer, seq)
                assert np.array_equal(keys, vectors(layer, tokens)[0]), seq
                assert np.array_equal(values, -keys), seq

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        self.cache.free([*self.others])
        self.others.clear()
        for _ in range(500):
            if not self.groups:
                break
            self.one_step(lambda step: True)
        assert self.scheduler.unfinished == 0
        for cache in (self.cache, self.host):
            assert cache is None or (cache.seq_ids, cache.num_free) == ([], cache.num_blocks)


TestServingMachine = ServingMachine.TestCase


def test_everything_was_met():
    if not MET:
        pytest.skip("looks at what the state machine met; it did not run")
    kinds = ["arrive", "admit hit", "admit swapped_in", "preempt swapped", "finish preemptions", "too large"]
    kinds += ["schedule recomputed", "cancelled", "starved", "truncated"]
    kinds += ["abort waiting", "abort swapped", "abort running", "abort running during a step"]
    kinds += ["forked a request", "forked another"]
    print(f"{sum(MET.values())} things met: {dict(MET)}")
    assert {kind for kind in kinds if not MET[kind]} == set()
    assert MET["schedule"] >= (10_000 if STRESS else 500)
