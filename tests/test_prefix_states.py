"""A state machine: prefix reuse with forks, copy-on-write, truncation, windows, preemption and abort together.

A poisoned cache against plain lists (tests/plain_pool.py): tables, owners, the queue and every text must be
equal after every step, and what the slots hold depends on the whole text before them, so a wrong hit is seen.
Half of the runs have a hash that is nearly constant: comparing tokens must make up for it.
"""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from needs import STRESS
from plain_pool import Full, PlainPool, PlainSequence
from pools import Model, all_layers, contents, refused

from pagedkv import prefix_cache

RULES, MET = Counter(), Counter()
PROMPTS = st.lists(st.integers(0, 1), max_size=3) | st.sampled_from(
    [[0, 1, 1, 0, 1, 1, 1, 0, 0][:n] for n in (4, 5, 6, 7, 9)] + [[0, 1, 1, 0, 0, 0, 0], [1, 0, 1, 1, 0]]
)
SALTS = st.sampled_from([None, None, None, "x", ""])


class PrefixMachine(RuleBasedStateMachine):
    """Two pools between which sequences move; `said` are the tokens that each sequence's slots were written for."""

    model = Model
    hashes = st.booleans()  # whether they are weak

    @initialize(
        block_size=st.sampled_from([1, 2, 2, 3]),
        num_blocks=st.integers(4, 14),
        keeps=st.sampled_from([(True, True), (True, False)]),
        data=st.data(),
    )
    def begin(self, block_size, num_blocks, keeps, data):
        self.digest = prefix_cache.block_digest
        if data.draw(self.hashes):
            prefix_cache.block_digest = lambda parent, tokens: bytes([tokens[0]]) * 32
        sizes = (num_blocks, num_blocks // 2 + 1)
        self.models = [
            self.model(n, block_size, prefix_cache=keep) for n, keep in zip(sizes, keeps, strict=True)
        ]
        self.plains = [PlainPool(n, block_size, keep) for n, keep in zip(sizes, keeps, strict=True)]
        self.said = [{}, {}]
        self.count = 0
        for _ in range(2):
            self.start([0, 1, 1, 0, 1, 1], None, 0)

    def teardown(self):
        if hasattr(self, "digest"):
            prefix_cache.block_digest = self.digest

    def check(self):
        RULES["rules"] += 1
        for model, plain, said in zip(self.models, self.plains, self.said, strict=True):
            manager = model.pool.manager
            assert model.queue == plain.queue and model.num_cached == len(plain.cached)
            assert {seq: model.table(seq) for seq in model.tokens} == {
                s: p.table for s, p in plain.seqs.items()
            }
            assert set(manager.prefix_index._links) == set(plain.texts)
            stats = manager.prefix_stats
            assert [stats.total_requests, stats.total_queries, stats.total_hits] == plain.asked
            for seq, text in manager._texts.items():
                assert (text.committed, text.prompt_length) == (
                    len(plain.seqs[seq].final),
                    len(plain.seqs[seq].prompt),
                )
                assert model.pool.match(seq) == len(plain.find(seq)) * plain.block_size
                assert said[seq][: text.committed] == plain.seqs[seq].final
            model.check()

    def draw(self, data, *, some=False):
        """Which pool, and one of its sequences or a few of them in any order."""
        i = data.draw(st.sampled_from([0, 0, 0, 1]))
        if not self.models[i].tokens:
            self.start([0, 1, 1, 0], None, i)
        names = list(self.models[i].tokens)
        if some:
            return i, data.draw(st.permutations(names))[: data.draw(st.integers(1, 3))]
        return i, data.draw(st.sampled_from(names))

    @rule(prompt=PROMPTS, salt=SALTS, which=st.sampled_from([0, 0, 0, 1]))
    def start(self, prompt, salt, which):
        """A request as most are: its prompt is added, computed and committed."""
        name = self.register(prompt, salt, which)
        start = len(self.plains[which].find(name)) * self.plains[which].block_size
        self.grow(which, [name], [len(prompt) - start], [start], [prompt])
        seq = self.plains[which].seqs[name]
        if seq.length:
            self.models[which].pool.commit(name)
            self.plains[which].commit(name, prompt[len(seq.final) :])
        self.check()

    @rule(prompt=PROMPTS, salt=SALTS, which=st.sampled_from([0, 0, 0, 1]))
    def add(self, prompt, salt, which):
        self.register(prompt, salt, which)

    def register(self, prompt, salt, which):
        self.count += 1
        name = f"s{self.count}"
        self.models[which].pool.add(name, tokens=prompt, cache_salt=salt)
        self.models[which].tokens[name] = []
        self.plains[which].seqs[name] = PlainSequence(salt, prompt)
        self.said[which][name] = []
        self.check()
        return name

    @rule(data=st.data(), rest=st.booleans())
    def compute(self, data, rest):
        """Chunks of prompts and single tokens in one batch; what is not announced is a draft at first."""
        i, names = self.draw(data, some=True)
        plain, said = self.plains[i], self.said[i]
        counts, first, new = [], [], []
        for name in names:
            seq = plain.seqs[name]
            start = seq.length or len(plain.find(name)) * plain.block_size
            lacks = len(seq.prompt) - start
            most = lacks if lacks > 0 else 3
            counts.append(lacks if rest and lacks > 0 else data.draw(st.integers(0, most)))
            start = start if counts[-1] else seq.length
            first.append(start)
            text = (said[name] or seq.prompt)[:start]
            text = text + seq.prompt[start : start + counts[-1]]
            text += data.draw(
                st.lists(
                    st.integers(0, 1),
                    min_size=start + counts[-1] - len(text),
                    max_size=start + counts[-1] - len(text),
                )
            )
            new.append(text)
        self.grow(i, names, counts, first, new)

    def grow(self, i, names, counts, first, new):
        model, plain, said = self.models[i], self.plains[i], self.said[i]
        needed, before = model.pool.blocks_needed(names, counts), len(plain.queue)
        try:
            copies = plain.extend(names, counts)
        except Full:
            assert needed > before and not model.pool.can_extend(names, counts)
            with refused(model.pool) as caught:
                model.pool.extend(names, counts)
            assert (caught.value.requested, caught.value.available) == (needed, before)
            MET["refused"] += 1
            return self.check()
        assert needed == before - len(plain.queue)
        numbers = {}
        for name, text in zip(names, new, strict=True):
            numbers[name] = contents(model.pool.manager._texts[name].root.digest, text)
            numbers[name][: len(model.tokens[name])] = model.tokens[name]  # None where a window passed by
        flat = [n for name, start in zip(names, first, strict=True) for n in numbers[name][start:]]
        reservation = model.pool.append(names, *all_layers(flat), counts)
        assert reservation.start.tolist() == first and reservation.copies.tolist() == copies
        for name, text, start, old in zip(names, new, first, [plain.seqs[n] for n in names], strict=True):
            MET["hit"] += start > len(model.tokens[name])
            model.tokens[name], said[name] = numbers[name], text
            assert old.length == len(text)
        MET["copied"] += bool(copies)
        return self.check()

    @rule(data=st.data(), all_of_it=st.booleans())
    def commit(self, data, all_of_it):
        i, names = self.draw(data, some=True)
        rows = []
        for name in names:
            seq = self.plains[i].seqs[name]
            open_end = self.said[i][name][len(seq.final) :]
            n = len(open_end) if all_of_it else data.draw(st.integers(0, len(open_end)))
            rows.append(open_end[:n])
        self.models[i].pool.commit(names, rows)
        for name, row in zip(names, rows, strict=True):
            self.plains[i].commit(name, row)
        self.check()

    @rule(data=st.data())
    def commit_the_prompt(self, data):
        i, name = self.draw(data)
        seq = self.plains[i].seqs[name]
        self.models[i].pool.commit(name)
        self.plains[i].commit(name, seq.prompt[len(seq.final) : seq.length])
        self.check()

    @rule(data=st.data())
    def commit_what_has_no_room(self, data):
        i, name = self.draw(data)
        seq = self.plains[i].seqs[name]
        with refused(self.models[i].pool, ValueError, f"{name}"):
            self.models[i].pool.commit(name, [0] * (seq.length - len(seq.final) + 1))

    @rule(data=st.data())
    def fork(self, data):
        i, name = self.draw(data)
        if len(self.models[i].tokens) > 6:
            return
        self.count += 1
        child = f"s{self.count}"
        self.models[i].fork(name, [child])
        self.plains[i].fork(name, child)
        self.said[i][child] = list(self.said[i][name])
        self.check()

    @rule(data=st.data(), children=st.integers(1, 2))
    def fork_and_decode(self, data, children):
        """A parent and its children go on with a token each, in one batch."""
        i, name = self.draw(data)
        names = [name]
        for _ in range(children):
            self.count += 1
            names.append(f"s{self.count}")
            self.plains[i].fork(name, names[-1])
            self.said[i][names[-1]] = list(self.said[i][name])
        self.models[i].fork(name, names[1:])
        seq = self.plains[i].seqs[name]
        if seq.length >= len(seq.prompt):
            texts = [self.said[i][name] + [n % 2] for n in range(len(names))]
            self.grow(i, names, [1] * len(names), [seq.length] * len(names), texts)
        self.check()

    @rule(data=st.data())
    def reorder(self, data):
        i, names = self.draw(data, some=True)
        parents = [data.draw(st.integers(0, len(names) - 1)) for _ in names]
        said = [list(self.said[i][names[p]]) for p in parents]
        assert self.models[i].reorder(names, parents) == self.plains[i].reorder(names, parents)
        self.said[i].update(zip(names, said, strict=True))
        self.check()

    @rule(data=st.data())
    def truncate(self, data):
        i, name = self.draw(data)
        tokens = self.models[i].tokens[name]
        length = data.draw(st.integers(0, len(tokens)))
        if length % self.plains[i].block_size and tokens[length - 1] is None:
            return
        assert self.models[i].truncate(name, length) == self.plains[i].truncate(name, length)
        self.said[i][name] = self.said[i][name][:length]
        self.check()

    @rule(data=st.data())
    def release_before(self, data):
        i, name = self.draw(data)
        position = data.draw(st.integers(0, len(self.models[i].tokens[name])))
        freed = self.models[i].release_before(name, position)
        assert freed == self.plains[i].release_before(name, position)
        self.check()

    @rule(data=st.data())
    def abort(self, data):
        i, names = self.draw(data, some=True)
        assert self.models[i].free(names) == self.plains[i].free(names)
        for name in names:
            del self.said[i][name]
        self.check()

    @rule(data=st.data())
    def preempt_by_recompute(self, data):
        """Free, add again with all tokens so far as the prompt, compute again what is not found."""
        i, name = self.draw(data)
        if not self.said[i][name]:
            return
        model, plain, text = self.models[i], self.plains[i], self.said[i].pop(name)
        salt = plain.seqs[name].salt
        assert model.free(name) == plain.free([name])
        model.pool.add(name, tokens=text, cache_salt=salt)
        model.tokens[name], self.said[i][name] = [], []
        plain.seqs[name] = PlainSequence(salt, text)
        start = len(plain.find(name)) * plain.block_size
        self.grow(i, [name], [len(text) - start], [start], [text])
        MET["recomputed"] += 1

    @rule(data=st.data())
    def preempt_by_swap(self, data):
        i, names = self.draw(data, some=True)
        source, target = self.models[i], self.models[1 - i]
        try:
            pairs = self.plains[1 - i].restore(self.plains[i], names)
        except Full:
            pass
        else:
            assert target.swap_in(source, names) == pairs
            self.plains[i].free(names)
            for name in names:
                self.said[1 - i][name] = self.said[i].pop(name)
            MET["swapped"] += 1
        self.check()

    @precondition(lambda self: hasattr(self, "models"))
    @rule(which=st.integers(0, 1))
    def reset(self, which):
        done = self.plains[which].reset()
        assert self.models[which].pool.reset_prefix_cache() == done
        MET["reset"] += done
        self.check()


TestPrefixMachine = PrefixMachine.TestCase


def test_enough_was_met():
    """In every run: hits, copies, refusals, both ways of preemption and resets."""
    if not RULES:
        pytest.skip("counts the rules of the machine, which did not run")
    print(f"rules {RULES['rules']}, met {dict(MET)}")
    assert RULES["rules"] >= (20_000 if STRESS else 1_000)
    assert all(MET[kind] for kind in ("hit", "copied", "refused", "recomputed", "swapped", "reset"))
