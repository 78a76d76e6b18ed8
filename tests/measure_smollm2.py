"""SmolLM2's speed beside transformers', on the same weights:

    python tests/measure_smollm2.py [STEPS]

Both decode greedily behind the same prompts, a step of each in turn, in one process; ratios are
of the medians. Then loading, and an answer. No test: a clock on a busy machine proves nothing by itself.
"""

import resource
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from pagedkv.lm import greedy, smollm2

sys.path.insert(0, str(Path(__file__).parent / "lm"))
BATCHES = (1, 8)
QUESTION = "What is the capital of France, and what is it known for?"


def peak():
    """The most memory that this process ever had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def loading():
    started = time.perf_counter()
    model = smollm2.load()
    print(f"loading {time.perf_counter() - started:.1f} s, the process has had {peak()} MiB at most")
    return model


def answer(model):
    cache = model.new_cache(16, 16)
    prompt, started = model.tokenizer.chat(QUESTION), time.perf_counter()
    tokens = list(greedy(model, cache, prompt, 60, end=model.tokenizer.end))
    seconds = time.perf_counter() - started
    print(f"{QUESTION}\n> {model.tokenizer.decode(tokens)}")
    print(f"{len(prompt)} tokens asked, {len(tokens)} answered in {seconds:.1f} s")


class Ours:
    def __init__(self, model, prompts):
        self.model, self.cache = model, model.new_cache(16 * len(prompts), 16)
        self.ids = [self.cache.add() for _ in prompts]
        self.logits = model.next_logits(self.cache, self.ids, prompts)  # [batch, vocabulary]

    def step(self):
        tokens = self.logits.argmax(axis=1)  # [batch]
        self.logits = self.model.next_logits(self.cache, self.ids, tokens[:, None])
        return tokens.tolist()


class Theirs:
    def __init__(self, network, prompts):
        import torch
        from transformers import DynamicCache

        self.torch, self.network, self.cache = torch, network, DynamicCache()
        self.run(torch.tensor(np.array(prompts)))

    def run(self, tokens):
        with self.torch.inference_mode():
            how = {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": 1}
            self.logits = self.network(tokens, **how).logits[:, -1]  # [batch, vocabulary]

    def step(self):
        tokens = self.logits.argmax(dim=1)  # [batch]
        self.run(tokens[:, None])
        return tokens.tolist()


def decoding(model, network, batch, steps):
    text = model.tokenizer.encode(
        "Once upon a time there was a small model that lived in eight pages of memory."
    )
    prompts = [np.roll(text, i) for i in range(batch)]
    sides = {"pagedkv": Ours(model, prompts), "transformers": Theirs(network, prompts)}
    seconds, texts = {name: [] for name in sides}, {name: [] for name in sides}
    for step in range(steps):
        for name in sides if step % 2 else reversed(sides):
            started = time.perf_counter()
            texts[name].append(sides[name].step())
            seconds[name].append(time.perf_counter() - started)
    equal = np.mean(np.array(texts["pagedkv"]) == np.array(texts["transformers"]))
    ours, theirs = (statistics.median(times[2:]) * 1000 for times in seconds.values())
    print(
        f"batch {batch}: {ours:6.1f} ms a step ({1000 * batch / ours:.0f} tokens/s), transformers {theirs:6.1f} ms "
        f"({1000 * batch / theirs:.0f} tokens/s): {theirs / ours:.2f} times its speed; {equal:.0%} of tokens equal"
    )


if __name__ == "__main__":
    import torch
    import transformers
    from test_smollm2 import network_of

    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    model = loading()
    network = network_of(model)
    print(
        f"transformers {transformers.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    for batch in BATCHES:
        decoding(model, network, batch, steps)
    answer(model)
