"""`pagedkv generate`: a small model continues a text, or answers."""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from ..allocator import PoolExhausted
from ..block_table import slots_of
from ..cache import PagedKVCache
from ..lm import Llama, Sampling, Usage, WeightsError, beam_search, sample, smollm2
from ..lm.generate import checked_prompt
from ..teach.pages import Letters, shown, strip
from .common import FAILED, MISUSED, complain, number

Steps = Iterator[
    tuple[list[list[int]], int]
]  # tokens of all texts so far, and how many of the first are settled
CAREFUL = {"shakespeare": Sampling(0.8), "smollm2": Sampling(0.2, top_p=0.9)}  # where nothing is asked for
UNITS = {"shakespeare": "characters", "smollm2": "tokens"}


def add(commands) -> None:
    parser = commands.add_parser(
        "generate",
        help="let a small model continue a text, or answer",
        description="Continues PROMPT through the paged cache, with the Shakespeare model of this package "
        "(a character, a token), or with SmolLM2-135M-Instruct, which answers too and is a download of 93 MB. "
        "The text goes to standard output as it is written, a line about the blocks it took to standard error.",
        epilog='examples: pagedkv generate "ROMEO:"   pagedkv generate "Good night" --samples 4 --tokens 40   '
        'pagedkv generate "Good morrow, " --beams 4   '
        f'pagedkv generate "Why is the sky blue?" --model smollm2 --chat   SmolLM2 needs: {smollm2.INSTALL}',
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue, or with --chat to answer")
    parser.add_argument(
        "--model", choices=CAREFUL, default="shakespeare", help="who writes (default %(default)s)"
    )
    parser.add_argument(
        "--chat", action="store_true", help="PROMPT is a question: print the answer (smollm2 only)"
    )
    parser.add_argument(
        "--tokens",
        type=number(0),
        default=200,
        metavar="N",
        help="tokens to write at most (default %(default)s)",
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
        "--temperature",
        type=float,
        metavar="T",
        help="below 1 careful, above 1 wild (default 0.8; smollm2 0.2)",
    )
    parser.add_argument(
        "--top-k", type=number(1), metavar="K", help="choose among the K likeliest tokens only"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="choose among the likeliest that reach probability P (smollm2: 0.9)",
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
        sampling = chosen_sampling(options)
        model = chosen_model(options)
        prompt = checked_prompt(model, asked(model, options), options.tokens)
        enough = (options.beams or options.samples) * -(-(len(prompt) + options.tokens) // options.block_size)
        cache = model.new_cache(options.num_blocks or enough, options.block_size)
    except (ValueError, MemoryError, ImportError) as error:
        failed = isinstance(error, (WeightsError, ImportError))
        return complain("generate", error, FAILED if failed else MISUSED)
    cache.manager.observers.append(usage := Usage(cache.manager))
    paper = PagesPaper(model, options, cache, prompt) if options.show_pages else Paper(model, options)
    steps = (
        beams(model, cache, prompt, options)
        if options.beams
        else samples(model, cache, prompt, sampling, options)
    )
    texts, refusal, started = [[]], None, time.perf_counter()
    try:
        for texts, settled in steps:
            paper.step(texts, settled)
    except PoolExhausted as error:
        refusal = f"{refused(error, texts, cache, options)}; --num-blocks {enough} is always enough here"
    except ValueError as error:
        return complain("generate", error, MISUSED)
    seconds = time.perf_counter() - started
    texts = texts[:1] if options.beams else texts
    paper.finish(texts)
    print(summary(texts, seconds, usage, options), file=sys.stderr)
    return 0 if refusal is None else complain("generate", refusal, FAILED)


def chosen_sampling(options: argparse.Namespace) -> Sampling:
    """What the options ask for; temperature 0 means the likeliest token. ValueError if they contradict."""
    given = (options.temperature, options.top_k, options.top_p)
    if options.beams and given != (None, None, None):
        raise ValueError("--temperature, --top-k and --top-p are for samples; beams do not draw")
    if options.temperature == 0:
        return Sampling(top_k=1)
    if given == (None, None, None):
        return CAREFUL[options.model]
    temperature = CAREFUL[options.model].temperature if options.temperature is None else options.temperature
    return Sampling(temperature, options.top_k, options.top_p)


def chosen_model(options: argparse.Namespace) -> Llama:
    """The model that the options name. ValueError for --chat with one that knows no conversations."""
    if options.model == "smollm2":
        with bar("SmolLM2") as progress:
            return smollm2.load(progress=progress)
    if options.chat:
        raise ValueError("--chat needs a model that answers: --model smollm2")
    return Llama.load()


@contextlib.contextmanager
def bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar where somebody is looking: a function to tell how far it is."""
    try:
        from tqdm import tqdm
    except ImportError:  # a bar is a comfort
        yield None
        return
    with tqdm(
        desc=title, total=1, bar_format="{desc} {bar} {percentage:3.0f} %", disable=None, leave=False
    ) as shown:

        def progress(done: int, total: int) -> None:
            shown.total = total
            shown.update(done - shown.n)

        yield progress


def asked(model: Llama, options: argparse.Namespace) -> np.ndarray:
    """The prompt in the model's tokens."""
    if options.chat and options.prompt:
        return model.tokenizer.chat(options.prompt)
    return model.tokenizer.encode(options.prompt)


def samples(model: Llama, cache: PagedKVCache, prompt: np.ndarray, sampling: Sampling, options) -> Steps:
    """Sampling: all of a text is settled at once."""
    random, end = np.random.default_rng(options.seed), model.tokenizer.end
    how = {"num_samples": options.samples, "sampling": sampling, "random": random, "end": end}
    texts = [[] for _ in range(options.samples)]
    for tokens in sample(model, cache, prompt, options.tokens, **how):
        for text, token in zip(texts, tokens.tolist(), strict=True):
            if end is None or text[-1:] != [end]:
                text.append(token)
        yield texts, len(texts[0])


def beams(model: Llama, cache: PagedKVCache, prompt: np.ndarray, options) -> Steps:
    """Beam search, until the best text ends: what all beams agree upon cannot change any more."""
    for step in beam_search(model, cache, prompt, options.tokens, options.beams):
        agreed = (step.texts == step.texts[0]).all(axis=0)  # [steps]
        yield step.texts.tolist(), int(np.logical_and.accumulate(agreed).sum())
        if step.texts[0, -1] == model.tokenizer.end:
            break


class Paper:
    """Standard output: the prompt and what is settled of the first text, each letter once; the others at the end."""

    def __init__(self, model: Llama, options: argparse.Namespace):
        self.tokenizer, self.printed = model.tokenizer, 0
        self.prompt = "" if options.chat else options.prompt

    def words(self, text: list[int]) -> str:
        """Prompt and text, up to the token that ends it."""
        end = self.tokenizer.end
        return self.prompt + self.tokenizer.decode(text[: text.index(end)] if end in text else text)

    def step(self, texts: list[list[int]], settled: int) -> None:
        """Show what a step added; a character of which some bytes are missing waits for them."""
        self.put(self.words(texts[0][:settled]).rstrip("�"))

    def put(self, words: str) -> None:
        print(words[self.printed :], end="", flush=True)
        self.printed = len(words)

    def finish(self, texts: list[list[int]]) -> None:
        """End the first text and print the others."""
        self.put(self.words(texts[0]))
        print()
        for i, text in enumerate(texts[1:], start=2):
            print(f"\n--- sample {i} of {len(texts)}\n{self.words(text)}")
        sys.stdout.flush()


class PagesPaper(Paper):
    """Draws the pool at each step, as it was when the step's tokens were chosen; the texts come at the end."""

    def __init__(self, model: Llama, options: argparse.Namespace, cache: PagedKVCache, prompt: np.ndarray):
        super().__init__(model, options)
        self.cache, self.letters = cache, Letters(cache.num_blocks, cache.block_size)
        self.before = self.pieces(prompt.tolist())
        self.held = [self.before]  # what the sequences of the cache hold, in pieces

    def pieces(self, tokens: list[int]) -> list[str]:
        return [self.tokenizer.decode([token]) for token in tokens]

    def step(self, texts: list[list[int]], settled: int) -> None:
        for seq, pieces in zip(self.cache.seq_ids, self.held, strict=False):
            positions = np.arange(self.cache.length(seq))
            slots = slots_of(self.cache.block_tables([seq])[0], positions, self.cache.block_size)
            self.letters.write(slots, pieces)
        steps = max(map(len, texts))
        chosen = [(row, self.pieces(text)) for row, text in enumerate(texts) if len(text) == steps]
        said = ", ".join(f"{row} {shown(pieces[-1])}" for row, pieces in chosen)
        print(f"step {steps}, next: {said}\n{strip(self.cache, self.letters)}\n", flush=True)
        end = self.tokenizer.end
        self.held = [self.before + pieces for row, pieces in chosen if end is None or texts[row][-1] != end]


def refused(
    refusal: PoolExhausted, texts: list[list[int]], cache: PagedKVCache, options: argparse.Namespace
) -> str:
    """Why a text ends early."""
    return (
        f"the pool of {cache.num_blocks} blocks of {cache.block_size} is full after {max(map(len, texts))} of "
        f"{options.tokens} {UNITS[options.model]}: the next step needs {refusal.requested} more, "
        f"{refusal.available} are free"
    )


def summary(texts: list[list[int]], seconds: float, usage: Usage, options: argparse.Namespace) -> str:
    """One line: how much was written, how fast, in how many blocks."""
    written, unit = sum(map(len, texts)), UNITS[options.model]
    what = f"{options.beams} beams" if options.beams else f"{len(texts)} sample{'s' * (len(texts) > 1)}"
    blocks = f"at most {usage.peak} in use, {usage.shared} of them shared ({usage.unshared} without sharing)"
    pace = written / max(seconds, 1e-9)
    speed = f"{written} {unit}, {pace:.{0 if pace >= 10 else 1}f} a second"
    return f"[{what}: {speed}; blocks of {options.block_size}: {blocks}, {usage.copied} copied]"
