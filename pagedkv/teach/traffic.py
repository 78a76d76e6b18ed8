"""Request lengths as real users make them: a table of quantiles, and draws from it.

The table was computed from `data/processed_traces/sharegpt_8k_filtered_stats_llama2_tokenizer.csv` in
microsoft/sarathi-serve (commit 72339db5, Apache-2.0): lengths, in tokens of Llama 2's tokenizer, of conversations
that people shared with ShareGPT. Of its 30,731 turns only the first turn of each of the 5,678 conversations
counts, since each later prompt repeats the turns before it. The texts themselves are not in that file, nor here.

To make the table again: `python -m pagedkv.teach.traffic FILE.csv`.

Simplified: prompt and output are drawn independently of each other, and between two percentages of the table every
length is equally likely. In the file the two are almost uncorrelated (0.02; 0.07 between their ranks).
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable

import numpy as np

from ..allocator import whole_number

# fmt: off
PERCENT = (0, 1, 2, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90, 95, 98, 99, 99.5, 100)
PROMPT = (1, 7, 9, 11, 16, 19, 23, 27, 32, 38, 45, 54, 64, 80, 95, 115, 150, 194, 262, 384, 600, 1089, 1788, 2383,
          2969, 7398)  # tokens; that many percent of the first prompts are at most this long
OUTPUT = (2, 6, 15, 36, 67, 105, 176, 245, 309, 353, 393, 431, 471, 513, 555, 595, 633, 682, 742, 807, 871, 937, 979,
          1003, 1014, 1024)  # tokens of the first answers
# fmt: on

SHORTEST_MAXIMUM = 64  # tokens; about one request in forty is as short


def draw(n: int, seed: int, *, maximum: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Draw the lengths of requests from the table.

    Args: n: how many; seed: of the random numbers; maximum: tokens that prompt and output may have together,
        longer requests are drawn again (a model with that limit would not take them).
    Returns: prompt and output lengths: two int64 [n].
    Raises: ValueError for a maximum below SHORTEST_MAXIMUM, which too few requests keep.
    """
    n = whole_number("n", n)
    most = (
        sum((PROMPT[-1], OUTPUT[-1]))
        if maximum is None
        else whole_number("maximum", maximum, SHORTEST_MAXIMUM)
    )
    random = np.random.default_rng(seed)
    percent = 100 * random.random((n, 2))
    while True:
        prompts = np.rint(np.interp(percent[:, 0], PERCENT, PROMPT)).astype(np.int64)
        outputs = np.rint(np.interp(percent[:, 1], PERCENT, OUTPUT)).astype(np.int64)
        too_long = prompts + outputs > most
        if not too_long.any():
            return prompts, outputs
        percent[too_long] = 100 * random.random((too_long.sum(), 2))


def chats(n: int, seed: int, **options) -> list[tuple[list[int], list[int]]]:
    """Turns of n conversations with an assistant, in the order in which they arrive.

    Each prompt repeats what was said before in its conversation, and all begin with the same instructions
    (`pagedkv.serving.synthetic` states what the lengths are matched to, and takes the options).

    Returns: tokens of the prompt and of the answer, per turn.
    """
    from ..serving.synthetic import conversations  # only here: lessons before 08 draw lengths alone

    return [
        (list(turn.ids[: turn.prompt]), list(turn.ids[turn.prompt :]))
        for turn in conversations(n, seed, **options)
    ]


def first_turns(lines: Iterable[str]) -> np.ndarray:
    """Prompt and output lengths of conversations' first turns, from the lines of the trace: int64 [n, 2].

    A turn whose prompt is shorter than the prompt and output of the row above begins a new conversation.
    """
    found, before = [], float("inf")
    for row in csv.DictReader(lines):
        prompt, output = int(float(row["num_prefill_tokens"])), int(float(row["num_decode_tokens"]))
        if prompt < before:
            found.append((prompt, output))
        before = prompt + output
    return np.array(found, np.int64).reshape(-1, 2)


def quantiles(lengths: np.ndarray) -> tuple[int, ...]:
    """The table's column for lengths [n], at PERCENT, in whole tokens."""
    return tuple(np.rint(np.percentile(lengths, PERCENT)).astype(int).tolist())


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8", newline="") as file:
        turns = first_turns(file)
    print(f"{len(turns)} first turns")
    print("PROMPT =", quantiles(turns[:, 0]))
    print("OUTPUT =", quantiles(turns[:, 1]))
