"""A real vLLM engine that obeys lines of JSON: `python vllm_engine.py` in a Python that has vLLM.

The first line makes the model and the engine; then each line is answered with one line. Only tests run it.
"""

import json
import os
import random
import sys

os.environ.update(
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # so that its scheduler can be reached
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_DO_NOT_TRACK="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # several engines share the processor
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
)


def main():
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to standard output, too
    import vllm  # noqa: F401  at once: it takes seconds, and others start beside this one

    engine = None
    for line in sys.stdin:
        order = json.loads(line)
        what = order.pop("do")
        if what == "open":
            engine, answer = Engine(**order), {}
        elif engine is not None:
            answer = getattr(engine, what)(**order)
        else:
            answer = WITHOUT_ENGINE[what](**order)
        print(json.dumps(answer), file=answers)


def make_model(folder, seed=0):
    """A tiny random Llama; weights large enough that its greedy tokens depend on the whole text."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def identities(models):
    """What the connector calls the model in each of several folders."""
    from vllm.engine.arg_utils import EngineArgs

    from pagedkv.integrations.vllm.connector import model_identity

    configs = [EngineArgs(**model, skip_tokenizer_init=True).create_engine_config() for model in models]
    return list(map(model_identity, configs))


def layouts(cases):
    """Per (type, heads, block size, head size): whether what vLLM's kernel writes is where we look for it."""
    import torch

    from pagedkv.integrations.vllm.connector import prove_layout

    wrong = []
    for dtype, heads, size, head_dim in cases:
        try:
            prove_layout(torch.zeros(1, heads, size, 2 * head_dim, dtype=getattr(torch, dtype)), "auto")
        except ValueError as error:
            wrong.append(str(error))
    return wrong


def refusals():
    """What the connector says of models and engines that it cannot serve."""
    from types import SimpleNamespace

    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

    from pagedkv.integrations.vllm.connector import PagedKVConnector

    shape = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    full = KVCacheGroupSpec(["layer"], FullAttentionSpec(**shape))
    window = KVCacheGroupSpec(["layer"], SlidingWindowSpec(**shape, sliding_window=64))
    said = []
    for ranks, groups in ((2, [full]), (1, [full, full]), (1, [window]), (1, [full])):
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
            parallel_config=SimpleNamespace(world_size=ranks),
        )
        try:
            PagedKVConnector(config, KVConnectorRole.WORKER, SimpleNamespace(kv_cache_groups=groups))
        except ValueError as error:
            said.append(str(error))
    return said


def traffic(out, **options):
    from pagedkv.integrations.vllm import oracle
    from pagedkv.integrations.vllm.trace import write_trace

    write_trace(out, oracle.random_traffic(**options))


def story(out):
    from pagedkv.integrations.vllm import oracle
    from pagedkv.integrations.vllm.trace import write_trace

    write_trace(out, oracle.story())


WITHOUT_ENGINE = {
    function.__name__: function for function in (make_model, identities, layouts, refusals, traffic, story)
}


class Engine:
    def __init__(self, model, store=None, **options):
        from vllm import LLM
        from vllm.config import KVTransferConfig

        if store is not None:
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="PagedKVConnector",
                kv_connector_module_path="pagedkv.integrations.vllm.connector",
                kv_role="kv_both",
                kv_connector_extra_config={"store": store},
            )
        self.llm = LLM(
            model,
            dtype="float32",
            block_size=32,
            max_model_len=512,
            max_num_seqs=8,
            max_num_batched_tokens=128,  # prompts come in chunks
            num_gpu_blocks_override=24,  # few: some have to wait, some are preempted
            enforce_eager=True,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            **options,
        )
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.preempted, preempt = 0, self.scheduler._preempt_request

        def counted(*args, **options):
            self.preempted += 1
            preempt(*args, **options)

        self.scheduler._preempt_request = counted

    def run(self, prompts, length, together=False):
        """Greedy tokens of prompts, one after the other or all at once, and how many of each were cached."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outs = []
        for some in [given] if together else [[one] for one in given]:
            outs += self.llm.generate(some, sampling, use_tqdm=False)
        return {
            "tokens": [list(out.outputs[0].token_ids) for out in outs],
            "cached": [out.num_cached_tokens for out in outs],
        }

    def forget(self):
        """Empty vLLM's own cache: only the store is left."""
        return {"forgotten": bool(self.llm.reset_prefix_cache())}

    def connectors(self):
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group(), self.scheduler.connector

    def wake(self):
        """Ask the store again now, whatever happened."""
        for connector in self.connectors():
            connector._paused_until = 0.0

    def use_store(self, where):
        """Go on with another store; returns what is wrong with it."""
        from pagedkv.integrations.vllm.connector import open_store

        try:
            for connector in self.connectors():
                connector.store = open_store(where, connector.layout)
        except (ImportError, ConnectionError) as error:
            return str(error)

    def forge(self):
        """Make every page of the folder one of zeros, with a right checksum."""
        store = self.scheduler.connector.store
        for key in list(store.keys()):
            page = {name: array * 0 for name, array in store.layout.unpack(key, store.read(key)).items()}
            store.put_packed([(key, store.layout.pack(key, page))])

    def asked(self, tokens):
        """How many tokens the connector finds for a prompt: of the model, of an adapter, not to be looked up."""
        from types import SimpleNamespace

        from pagedkv.integrations.vllm.oracle import Traffic

        request = Traffic(25, 32).request("x", tokens)
        request = SimpleNamespace(
            request_id="x",
            num_tokens=request.num_tokens,
            block_hashes=request.block_hashes,
            lora_request=None,
            skip_reading_prefix_cache=False,
        )
        connector, found = self.scheduler.connector, []
        for special in ({}, {"lora_request": "of some name"}, {"skip_reading_prefix_cache": True}):
            one = SimpleNamespace(**(vars(request) | special))
            found.append(connector.get_num_new_matched_tokens(one, 0)[0])
            connector.request_finished(one, [])
        return found

    def counts(self):
        worker, scheduler = self.connectors()
        return {
            "loaded": worker.loaded,
            "saved": worker.saved,
            "failed": worker.failed + scheduler.failed,
            "corrupt": scheduler.store.corrupt,
            "preempted": self.preempted,
            "left": len(scheduler._followed) + len(scheduler._found),
        }

    def record(self, out, steps, seed):
        """Serve random requests, and write down what the engine's block manager does until it did so many steps."""
        from vllm import SamplingParams

        from pagedkv.integrations.vllm.oracle import Recorder
        from pagedkv.integrations.vllm.trace import write_trace

        recorder = Recorder(self.scheduler.kv_cache_manager)
        rng, engine = random.Random(seed), self.llm.llm_engine
        beginnings = [[rng.randrange(256) for _ in range(100)] for _ in range(3)]
        live = requests = 0
        while len(recorder.steps) < steps or live:
            if live < 5 and rng.random() < 0.3 and len(recorder.steps) < steps:
                prompt = rng.choice(beginnings)[: rng.randrange(20, 100)]
                prompt = prompt + [rng.randrange(256) for _ in range(rng.randrange(1, 150))]
                sampling = SamplingParams(
                    temperature=0, max_tokens=rng.randrange(2, 90), ignore_eos=True, detokenize=False
                )
                engine.add_request(f"q{requests}", {"prompt_token_ids": prompt}, sampling)
                requests, live = requests + 1, live + 1
            if live:
                live -= sum(out.finished for out in engine.step())
        starts = [step.seq for step in recorder.steps if step.op == "start" and step.outcome.granted]
        write_trace(out, recorder.trace())
        return {"steps": len(recorder.steps), "preempted": len(starts) - len(set(starts))}


if __name__ == "__main__":
    main()
