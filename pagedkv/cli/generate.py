"""`pagedkv generate`: the small Shakespeare model continues a text."""

import argparse
import sys
import time
from collections.abc import Iterator

import numpy as np

from ..allocator import PoolExhausted
from ..block_table import slots_of
from ..cache import PagedKVCache
from ..lm import Llama, Sampling, Usage, WeightsError, beam_search, sample
from ..lm.generate import checked_prompt
from ..teach.pages import Letters, shown, strip
from .common import FAILED, MISUSED, complain, number

Steps = Iterator[tuple[list[str], int]]  # all texts so far, and how much of the first is settled


def add(commands) -> None:
    parser = commands.add_parser(
        "generate",
        help="let the small Shakespeare model continue a text",
        description="Continues PROMPT with the model that ships with the package, through the paged cache. "
        "The text goes to standard output as it is written, a line about the blocks it took to standard error.",
        epilog='examples: pagedkv generate "ROMEO:"   pagedkv generate "Good night" --samples 4 --tokens 40   '
        'pagedkv generate "Good morrow, " --beams 4',
    )
    parser.add_argument(
        "prompt", metavar="PROMPT", help="the text to continue, letter by letter (one character, one token)"
    )
    parser.add_argument(
        "--tokens", type=number(0), default=200, metavar="N", help="characters to write (default %(default)s)"
    )
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument(
        "--samples",
        type=number(1),
        default=1,
        metavar="N",
        help="texts that continue the same prompt (default 1)",
    )
    ways.add_argument(
        "--beams", type=number(1), metavar="N", help="beam search of this width instead of sampling"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="below 1 careful, above 1 wild (default 0.8)"
    )
    parser.add_argument(
        "--top-k", type=number(1), metavar="K", help="choose among the K likeliest characters only"
    )
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="choose among the likeliest that reach probability P"
    )
    parser.add_argument(
        "--seed",
        type=number(0),
        default=0,
        metavar="S",
        help="another seed, another text (default %(default)s)",
    )
    parser.add_argument(
        "--block-size",
        type=number(1),
        default=16,
        metavar="B",
        help="tokens in a block (default %(default)s)",
    )
    parser.add_argument(
        "--num-blocks",
        type=number(1),
        metavar="M",
        help="blocks in the pool (default: enough without sharing)",
    )
    parser.add_argument(
        "--show-pages", action="store_true", help="draw the pool at every step (best with --block-size 4)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    try:
        model = Llama.load()
        prompt = checked_prompt(model, model.tokenizer.encode(options.prompt), options.tokens)
        sampling = chosen_sampling(options)
        cache = model.new_cache(options.num_blocks or enough_blocks(options), options.block_size)
    except (ValueError, MemoryError) as error:
        return complain("generate", error, FAILED if isinstance(error, WeightsError) else MISUSED)
    cache.manager.observers.append(usage := Usage(cache.manager))
    paper = PagesPaper(options.prompt, cache) if options.show_pages else Paper(options.prompt)
    steps = (
        beams(model, cache, prompt, options)
        if options.beams
        else samples(model, cache, prompt, sampling, options)
    )
    texts, refusal, started = [""], None, time.perf_counter()
    try:
        for texts, settled in steps:
            paper.step(texts, settled)
    except PoolExhausted as error:
        refusal = error
    except ValueError as error:
        return complain("generate", error, MISUSED)
    seconds = time.perf_counter() - started
    paper.finish(texts[:1] if options.beams else texts)
    print(summary(texts, seconds, usage, options), file=sys.stderr)
    return 0 if refusal is None else complain("generate", refused(refusal, texts, cache, options), FAILED)


def chosen_sampling(options: argparse.Namespace) -> Sampling:
    """What the options ask for; temperature 0 means the likeliest character. ValueError if they contradict."""
    given = (options.temperature, options.top_k, options.top_p)
    if options.beams and given != (None, None, None):
        raise ValueError("--temperature, --top-k and --top-p are for samples; beams do not draw")
    if options.temperature == 0:
        return Sampling(top_k=1)
    return Sampling(0.8 if options.temperature is None else options.temperature, options.top_k, options.top_p)


def enough_blocks(options: argparse.Namespace) -> int:
    """Blocks for every text of a request on its own."""
    length = len(options.prompt) + options.tokens
    return (options.beams or options.samples) * -(-length // options.block_size)


def samples(model, cache, prompt, sampling: Sampling, options) -> Steps:
    """Sampling: all of a text is settled at once."""
    random = np.random.default_rng(options.seed)
    how = {"num_samples": options.samples, "sampling": sampling, "random": random}
    texts = [""] * options.samples
    for tokens in sample(model, cache, prompt, options.tokens, **how):
        texts = [text + letter for text, letter in zip(texts, model.tokenizer.decode(tokens), strict=True)]
        yield texts, len(texts[0])


def beams(model, cache, prompt, options) -> Steps:
    """Beam search: what all beams agree upon cannot change any more."""
    for step in beam_search(model, cache, prompt, options.tokens, options.beams):
        agreed = (step.texts == step.texts[0]).all(axis=0)  # [steps]
        yield (
            [model.tokenizer.decode(row) for row in step.texts],
            int(np.logical_and.accumulate(agreed).sum()),
        )


class Paper:
    """Standard output: the prompt and what is settled of the first text, each letter once; the others at the end."""

    def __init__(self, prompt: str):
        self.prompt, self.printed = prompt, 0

    def step(self, texts: list[str], settled: int) -> None:
        """Show what a step added."""
        self.put(texts[0][:settled])

    def put(self, text: str) -> None:
        text = self.prompt + text
        print(text[self.printed :], end="", flush=True)
        self.printed = len(text)

    def finish(self, texts: list[str]) -> None:
        """End the first text and print the others."""
        self.put(texts[0])
        print()
        for i, text in enumerate(texts[1:], start=2):
            print(f"\n--- sample {i} of {len(texts)}\n{self.prompt}{text}")
        sys.stdout.flush()


class PagesPaper(Paper):
    """Draws the pool at each step, as it was when the step's letters were chosen; the texts come at the end."""

    def __init__(self, prompt: str, cache: PagedKVCache):
        super().__init__(prompt)
        self.cache, self.held = cache, [""]  # what the sequences of the cache hold behind the prompt
        self.letters = Letters(cache.num_blocks, cache.block_size)

    def step(self, texts: list[str], settled: int) -> None:
        for seq, text in zip(self.cache.seq_ids, self.held, strict=False):
            positions = np.arange(self.cache.length(seq))
            slots = slots_of(self.cache.block_tables([seq])[0], positions, self.cache.block_size)
            self.letters.write(slots, self.prompt + text)
        chosen = ", ".join(f"{row} {shown(text[-1])}" for row, text in enumerate(texts))
        print(f"step {len(texts[0])}, next: {chosen}\n{strip(self.cache, self.letters)}\n", flush=True)
        self.held = texts


def refused(
    refusal: PoolExhausted, texts: list[str], cache: PagedKVCache, options: argparse.Namespace
) -> str:
    """Why a text ends early, and what would help."""
    return (
        f"the pool of {cache.num_blocks} blocks of {cache.block_size} is full after {len(texts[0])} of "
        f"{options.tokens} characters: the next step needs {refusal.requested} more, {refusal.available} are free; "
        f"--num-blocks {enough_blocks(options)} is always enough here"
    )


def summary(texts: list[str], seconds: float, usage: Usage, options: argparse.Namespace) -> str:
    """One line: how much was written, how fast, in how many blocks."""
    written = len(texts[0]) if options.beams else sum(len(text) for text in texts)
    what = f"{options.beams} beams" if options.beams else f"{len(texts)} sample{'s' * (len(texts) > 1)}"
    blocks = f"at most {usage.peak} in use, {usage.shared} of them shared ({usage.unshared} without sharing)"
    speed = f"{written} characters, {written / max(seconds, 1e-9):.0f} a second"
    return f"[{what}: {speed}; blocks of {options.block_size}: {blocks}, {usage.copied} copied]"
