"""Our block manager against recorded traces of vLLM's own, and the reader of such traces. Needs no vLLM.

The traces were made by a Python that has vLLM 0.32; `test_vllm.py` makes them again where there is one:

    python -m pagedkv.integrations.vllm.oracle pagedkv/integrations/vllm/story.jsonl --story
    python -m pagedkv.integrations.vllm.oracle tests/integrations/traces/blocks-of-4.jsonl.gz --block-size 4

and the same for 1 and 16; engine.jsonl.gz is what a whole engine did, with preemption and prompts in chunks.
"""

import gzip
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from pagedkv.integrations.vllm import STORY, differences, first_difference, read_trace, replay
from pagedkv.integrations.vllm.layout import from_page, page_key, to_page
from pagedkv.integrations.vllm.trace import Outcome, write_trace
from pagedkv.manager import BlockManager
from pagedkv.storage import KVStorage
from pagedkv.store.record import Layout

TRACES = Path(__file__).with_name("traces")
RECORDED = [STORY, *sorted(TRACES.glob("*.jsonl.gz"))]
OF_4 = TRACES / "blocks-of-4.jsonl.gz"


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_tables_queue_owners_hits_and_hashes_equal_vllms_at_every_step(path):
    trace = read_trace(path)
    assert trace.vllm == "0.32.0"
    assert len(trace.steps) >= (20 if path == STORY else 600)
    assert first_difference(trace) is None


@pytest.mark.parametrize("path", RECORDED[1:], ids=lambda path: path.name)
def test_a_recorded_trace_has_everything_in_it(path):
    steps = read_trace(path).steps
    starts = [step for step in steps if step.op == "start" and step.outcome.granted]
    assert sum(step.outcome.hit > 0 for step in starts) > 10
    assert any(step.count + step.outcome.hit < len(step.tokens) for step in starts)  # a chunk
    assert len({step.seq for step in starts}) < len(starts)  # preempted, and back
    refused = {step.op for step in steps if not step.outcome.granted}
    assert {"start", "extend"} <= refused
    hashes = [step.outcome.hashes for step in steps]
    pairs = list(pairwise(hashes))
    assert sum(after.get(b, "") != digest for before, after in pairs for b, digest in before.items()) > 50


# What the comparison is worth: none of these may pass


def mutated_text(step):
    return replace(step, tokens=[*step.tokens[:-1], step.tokens[-1] + 1])


def mutated(name, change):
    def mutate(step):
        return replace(step, outcome=replace(step.outcome, **{name: change(getattr(step.outcome, name))}))

    return mutate


MUTATIONS = {
    "a token": mutated_text,
    "queue": mutated("queue", lambda queue: queue[::-1]),
    "hit": mutated("hit", lambda hit: hit + 4),
    "new": mutated("new", lambda new: [*new, 0]),
    "a table": mutated("tables", lambda tables: {seq: table[::-1] for seq, table in tables.items()}),
    "an owner": mutated("owners", lambda owners: [owners[0] + 1, *owners[1:]]),
    "a hash": mutated("hashes", lambda hashes: hashes | {next(iter(hashes)): "00000000"}),
    "equal hashes": mutated("hashes", lambda hashes: dict.fromkeys(hashes, next(iter(hashes.values())))),
    "a refusal": mutated("granted", lambda granted: not granted),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_mutated_run_fails(what):
    trace = read_trace(STORY)
    place = next(
        i
        for i, step in enumerate(trace.steps)
        if len(set(step.outcome.hashes.values())) > 2 and len(step.tokens) % 4 == 0 and step.tokens
    )
    steps = trace.steps.copy()
    steps[place] = MUTATIONS[what](steps[place])
    found = first_difference(replace(trace, steps=steps))
    assert found is not None
    assert int(found.split()[1].rstrip(",")) >= place + 1


def head_first(manager):
    release = manager.allocator.release
    manager.allocator.release = lambda blocks, cached=(): release(np.asarray(blocks)[::-1], cached)


def nothing_cached(manager):
    release = manager.allocator.release
    manager.allocator.release = lambda blocks, cached=(): release(blocks)


def whole_prompts_found(manager):
    find = manager.prefix_index.find
    manager.prefix_index.find = lambda text, size, at_most: find(text, size, at_most + 1)


def equal_blocks_merged(manager):
    index, seal = manager.prefix_index, manager.prefix_index.seal
    index.seal = lambda block, link: link.digest not in index._blocks and seal(block, link)


def salt_ignored(manager):
    add = manager.add
    manager.add = lambda seq, *, tokens, cache_salt: add(seq, tokens=tokens)


def reset_ignored(manager):
    manager.reset_prefix_cache = lambda: manager.num_free == manager.num_blocks


BROKEN = [
    head_first,
    nothing_cached,
    whole_prompts_found,
    equal_blocks_merged,
    salt_ignored,
    reset_ignored,
]


@pytest.mark.parametrize("break_it", BROKEN, ids=lambda broken: broken.__name__)
def test_a_manager_that_is_otherwise_than_vllms_is_found_out(break_it):
    trace = read_trace(OF_4)
    manager = BlockManager(trace.num_blocks - 1, trace.block_size, prefix_cache=True)
    assert first_difference(trace, manager) is None
    manager = BlockManager(trace.num_blocks - 1, trace.block_size, prefix_cache=True)
    break_it(manager)
    assert first_difference(trace, manager) is not None


# Reading


def test_a_step_and_our_outcome_are_plain_data():
    for step, ours in replay(read_trace()):
        assert isinstance(ours, Outcome)
        assert ours == step.outcome
        assert differences(step.outcome, ours) == []
    assert differences(step.outcome, replace(ours, hit=99)) == ["hit: vLLM's 0, ours 99"]


def test_the_story_is_short_and_has_every_rule():
    assert STORY.stat().st_size < 30_000
    steps = read_trace().steps
    assert {step.op for step in steps} == {"start", "extend", "free", "reset"}
    assert {(step.op, step.outcome.granted) for step in steps} >= {("start", False), ("reset", False)}
    assert any(step.salt for step in steps)


@pytest.mark.parametrize("name", ["again.jsonl", "again.jsonl.gz"])
def test_what_is_written_is_read(tmp_path, name):
    trace = read_trace()
    write_trace(tmp_path / name, trace)
    assert read_trace(tmp_path / name) == trace
    before = (tmp_path / name).read_bytes()
    write_trace(tmp_path / name, trace)
    assert (tmp_path / name).read_bytes() == before


def damages():
    text = STORY.read_text("utf-8")
    lines = text.splitlines()
    return {
        "nothing": b"",
        "no JSON": b"hello",
        "no object": b"[1]",
        "another format": text.replace("trace-1", "trace-9").encode(),
        "cut": "\n".join([*lines[:3], lines[3][:50]]).encode(),
        "no outcome": "\n".join([*lines[:3], '{"op": "free"}']).encode(),
        "unknown op": text.replace('"extend"', '"fork"').encode(),
        "binary": bytes(range(256)),
    }


@pytest.mark.parametrize("what", damages())
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_what_is_no_trace_is_named(tmp_path, what, suffix):
    path = tmp_path / f"t{suffix}"
    data = damages()[what]
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    with pytest.raises(ValueError, match=r"t\.jsonl.*, line \d+: no trace of vLLM"):
        read_trace(path)


def test_a_file_that_is_not_compressed_or_cut_is_named(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    for data in (b"plain", gzip.compress(STORY.read_bytes())[:-100]):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="no trace of vLLM"):
            read_trace(path)


def test_the_manager_must_be_of_the_same_size():
    with pytest.raises(ValueError, match="11 blocks of 4, the manager has 12 of 4"):
        first_difference(read_trace(), BlockManager(12, 4, prefix_cache=True))


# Pages


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 16])
@pytest.mark.parametrize("head_dim", [1, 4, 32])
def test_a_block_of_vllm_becomes_a_page_and_back(heads, size, head_dim):
    keys, values = np.random.default_rng(0).standard_normal((2, size, heads, head_dim), np.float32)
    block = np.full((heads, size, 2 * head_dim), np.nan, np.float32)
    from_page(keys, values, block)
    numbers = block.reshape(heads, 2, size * head_dim)
    for head, position, i in np.ndindex(heads, size, head_dim):  # as vLLM's kernel has it, number by number
        assert numbers[head, 0, i * size + position] == keys[position, head, i]
        assert numbers[head, 1, position * head_dim + i] == values[position, head, i]
    for ours, theirs in zip((keys, values), to_page(block), strict=True):
        assert np.array_equal(ours, theirs)


def test_a_page_is_named_by_its_text_its_model_and_its_layout():
    layouts = [Layout.of(KVStorage(1, 1, size, 1, 8), model) for size in (16, 32) for model in ("a", "b")]
    keys = {page_key(layout, digest) for layout in layouts for digest in (b"x" * 32, b"y" * 32)}
    assert len(keys) == 8
    assert {len(key) for key in keys} == {32}
    assert page_key(layouts[0], b"x" * 32) in keys  # the same again
