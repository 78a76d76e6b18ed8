"""A real vLLM, in a Python of its own that $PAGEDKV_VLLM_PYTHON names (made from requirements-vllm.txt).

Three engines run beside each other: one without our store, one that fills it, one that only finds it.
"""

import contextlib
import json
import os
import random
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from needs import ROOT, absent
from redis_servers import started

from pagedkv.bench.vllm_peer import VARIABLE
from pagedkv.integrations.vllm import STORY, first_difference, read_trace

HERE = Path(__file__).parent
TRACES = HERE / "traces"
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"} | {"PYTHONPATH": str(ROOT)}
LENGTH = 20  # tokens per answer
SIZES = (1, 4, 16)
SEED = random.randrange(1, 2**30)  # another one in each run; a failure names it

rng = random.Random(1)
BASE = [rng.randrange(256) for _ in range(200)]
PROMPTS = [
    BASE,
    [*BASE[:130], 5, 6, 7],
    list(range(50, 110)),
    [*BASE, *[7] * 24],
]  # the last has 7 whole blocks
NONE, ALL = (
    [0, 128, 0, 192],
    [192, 128, 32, 192],
)  # cached tokens of PROMPTS: by vLLM itself, with a full store


class Engine:
    """A process that runs `vllm_engine.py`."""

    def __init__(self, python, log):
        self.log = log
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                [python, str(HERE / "vllm_engine.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=ENVIRONMENT,
            )

    def tell(self, what, **options):
        self.process.stdin.write(json.dumps({"do": what, **options}, default=str) + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        assert line, "vLLM ended: " + self.log.read_text("utf-8", errors="replace")[-3000:]
        return json.loads(line)

    def ask(self, what, **options):
        self.tell(what, **options)
        return self.answer()

    def close(self):
        self.process.kill()  # it keeps nothing, and may be at its imports still
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def python():
    path = os.environ.get(VARIABLE)
    if not path:
        absent(f"${VARIABLE} names no Python that has vLLM: see tests/integrations/requirements-vllm.txt")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def engines(python, folder):
    """Three processes, which import vLLM at the same time."""
    engines = [Engine(python, folder / f"{name}.log") for name in ("plain", "first", "second")]
    yield engines
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def model(engines, folder):
    engines[0].ask("make_model", folder=folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def store(folder):
    return folder / "store"


@pytest.fixture(scope="module")
def facts(engines, model, folder):
    """What the first process is asked before it becomes an engine: identities, layouts, refusals, traces."""
    engine = engines[0]
    engine.ask("make_model", folder=folder / "other", seed=1)
    shutil.copytree(model, folder / "moved")
    named = {name: {"model": folder / name, "dtype": "float32"} for name in ("model", "moved", "other")}
    named["bfloat16"] = named["model"] | {"dtype": "bfloat16"}
    identities = engine.ask("identities", models=list(named.values()))
    types = ("float32", "float16", "bfloat16")
    cases = [(t, h, size, d) for t in types for h in (1, 3) for size in (16, 32, 128) for d in (32, 80)]
    for seed in (0, SEED):
        for size in SIZES:
            out = folder / f"{size}-{seed}.jsonl.gz"
            engine.ask("traffic", out=out, num_blocks=25, block_size=size, steps=700, seed=seed)
    engine.ask("story", out=folder / "story.jsonl")
    return {
        "identities": dict(zip(named, identities, strict=True)),
        "layouts": engine.ask("layouts", cases=cases),
        "refusals": engine.ask("refusals"),
    }


@pytest.fixture(scope="module")
def recorded(engines, model, folder, facts):
    """What a whole engine's block manager did, from its first step on."""
    out = folder / "engine.jsonl.gz"
    engines[0].ask("open", model=model, async_scheduling=False)
    return engines[0].ask("record", out=out, steps=700, seed=SEED), read_trace(out)


@pytest.fixture(scope="module")
def expected(engines, recorded):
    """The tokens without our store."""
    engines[0].ask("forget")
    answer = engines[0].ask("run", prompts=PROMPTS, length=LENGTH)
    assert answer["cached"] == NONE
    assert len(set(map(tuple, answer["tokens"]))) == len(PROMPTS)
    return answer["tokens"]


@pytest.fixture(scope="module")
def filled(engines, model, store, expected):
    """What the second process said while it filled the store."""
    engines[1].ask("open", model=model, store=store)
    return engines[1].ask("run", prompts=PROMPTS, length=LENGTH), engines[1].ask("counts")


@pytest.fixture(scope="module")
def warm(engines, model, store, filled):
    """What the third process said, which found it full."""
    engines[2].ask("open", model=model, store=store)
    return engines[2].ask("run", prompts=PROMPTS, length=LENGTH), engines[2].ask("counts")


# Our block manager and vLLM's


@pytest.mark.parametrize("size", SIZES)
def test_the_recorded_traces_are_what_this_vllm_does(facts, folder, size):
    assert read_trace(folder / f"{size}-0.jsonl.gz") == read_trace(TRACES / f"blocks-of-{size}.jsonl.gz")
    assert read_trace(folder / "story.jsonl") == read_trace(STORY)


@pytest.mark.parametrize("size", SIZES)
def test_random_traffic_that_nobody_saw_before_is_equal_at_every_step(facts, folder, size):
    trace = read_trace(folder / f"{size}-{SEED}.jsonl.gz")
    assert len(trace.steps) == 700
    assert first_difference(trace) is None, SEED


def test_a_whole_engine_is_equal_at_every_step_and_a_wrong_token_is_found(recorded):
    told, trace = recorded
    assert len(trace.steps) == told["steps"] >= 700
    assert first_difference(trace) is None, SEED
    place = next(i for i, s in enumerate(trace.steps) if s.op == "start" and s.outcome.hit)
    step = trace.steps[place]
    trace.steps[place] = replace(step, tokens=[step.tokens[0] ^ 1, *step.tokens[1:]])
    assert first_difference(trace).startswith(f"step {place + 1}, start {step.seq}: hit")


# The connector


def test_another_process_finds_the_pages_and_says_the_same(expected, filled, warm):
    first, counts = filled
    assert (first["tokens"], first["cached"]) == (expected, NONE)
    assert counts == {"loaded": 0, "saved": 9, "failed": 0, "corrupt": 0, "preempted": 0, "left": 0}
    second, counts = warm
    assert (second["tokens"], second["cached"]) == (expected, ALL)
    assert counts == {"loaded": 7, "saved": 0, "failed": 0, "corrupt": 0, "preempted": 0, "left": 0}


def test_what_the_pages_hold_is_what_attention_reads(engines, warm, store, expected):
    """Pages of zeros under right checksums change the tokens: so the test above proves something."""
    with kept(store):
        engines[2].ask("forge")
        answer = again(engines[2])
    assert answer["cached"] == ALL
    assert answer["tokens"] != expected


def flip(data):
    return data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]


def zero(data):
    return data[:48] + bytes(len(data) - 48)


DAMAGES = {"one flipped bit": flip, "zeros": zero, "cut": lambda data: data[:-1], "empty": lambda data: b""}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_page_is_found_by_its_checksum_and_computed_again(engines, warm, store, expected, what):
    with kept(store):
        pages = sorted(store.glob("*.page"))
        assert len(pages) == 9
        for page in pages:
            page.write_bytes(DAMAGES[what](page.read_bytes()))
        before = engines[2].ask("counts")
        answer, counts = again(engines[2]), engines[2].ask("counts")
    assert (answer["tokens"], answer["cached"]) == (expected, NONE)
    assert counts["corrupt"] > before["corrupt"]
    assert counts["loaded"] == before["loaded"]
    assert counts["saved"] - before["saved"] == counts["corrupt"] - before["corrupt"]  # whole again


def test_a_missing_page_is_computed_again_and_what_is_behind_it(engines, warm, store, expected):
    with kept(store):
        written = sorted(store.glob("*.page"), key=lambda page: page.stat().st_mtime_ns)
        written[4].unlink()  # the fifth block of the first prompt, in the middle of what is asked at once
        answer = again(engines[2])
        assert written[4].exists()
    assert answer == {"tokens": expected, "cached": [128, *ALL[1:]]}


def test_adapters_and_prompts_that_want_no_cache_find_nothing(engines, warm):
    assert engines[2].ask("asked", tokens=BASE) == [192, 0, 0]


def test_a_store_that_fails_does_not_stop_the_engine(engines, warm, store, expected):
    with kept(store):
        shutil.rmtree(store)
        store.write_bytes(b"no folder")
        before = engines[2].ask("counts")
        answer, counts = again(engines[2]), engines[2].ask("counts")
        store.unlink()
        store.mkdir()
    engines[2].ask("wake")
    assert (answer["tokens"], answer["cached"]) == (expected, NONE)
    assert counts["failed"] > before["failed"]


def test_many_at_once_with_preemption_say_the_same_cold_and_warm(engines, warm, expected):
    prompts = [[*BASE[: rng.randrange(0, 150)], *rng.choices(range(256), k=40)] for _ in range(12)]
    given = {"prompts": prompts, "length": 70, "together": True}
    alone = engines[0].ask("run", **given)
    engines[2].ask("forget")
    cold = engines[2].ask("run", **given)
    engines[2].ask("forget")
    before = engines[2].ask("counts")
    hot, counts = engines[2].ask("run", **given), engines[2].ask("counts")
    assert alone["tokens"] == cold["tokens"] == hot["tokens"]
    assert counts["preempted"] > before["preempted"]
    assert counts["loaded"] - before["loaded"] >= 20
    assert counts["left"] == 0


def test_redis_serves_as_well_as_a_folder(engines, warm, expected, redis_server):
    url, server = redis_server
    wrong = engines[2].ask("use_store", where=url)
    if wrong:
        absent(f"vLLM's Python cannot use Redis: {wrong}")
    assert again(engines[2]) == {"tokens": expected, "cached": NONE}
    assert again(engines[2]) == {"tokens": expected, "cached": ALL}
    server.terminate()
    server.wait(10)
    before = engines[2].ask("counts")
    assert again(engines[2]) == {"tokens": expected, "cached": NONE}
    assert engines[2].ask("counts")["failed"] > before["failed"]


def test_models_are_told_apart_by_weights_and_types_not_by_folder(facts):
    named = facts["identities"]
    assert named["model"] == named["moved"]
    assert len({named["model"], named["other"], named["bfloat16"]}) == 3


def test_vllms_own_kernel_writes_where_we_look(facts):
    assert facts["layouts"] == []


def test_what_cannot_be_moved_is_refused_by_name(facts):
    assert facts["refusals"] == [
        "each of 2 ranks has a part of every page: only 1 is supported",
        "all layers must keep full attention in one group, got 2 of ['FullAttentionSpec']",
        "all layers must keep full attention in one group, got 1 of ['SlidingWindowSpec']",
        'kv_connector_extra_config needs "store": a folder or the URL of a Redis',
    ]


def again(engine):
    """The same prompts, with nothing left in vLLM's own cache."""
    engine.ask("forget")
    return engine.ask("run", prompts=PROMPTS, length=LENGTH)


@contextlib.contextmanager
def kept(store):
    """Whatever is done to the store in the block, it is as before behind it."""
    safe = store.with_name("safe")
    shutil.copytree(store, safe)  # with the times of the files
    try:
        yield
    finally:
        for page in [*store.glob("*.page")]:
            page.unlink()
        shutil.copytree(safe, store, dirs_exist_ok=True)
        shutil.rmtree(safe)


@pytest.fixture
def redis_server(tmp_path):
    """The URL of a Redis of our own, and its process."""
    process, port = started(tmp_path)
    yield f"redis://127.0.0.1:{port}", process
    process.kill()
    process.wait()
