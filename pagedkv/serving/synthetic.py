"""Small synthetic traffic with the statistics of published traces, for lessons and trials: nothing to download.

People talk with an assistant: a conversation has turns, each prompt repeats the turns before it, and all begin with
the same system prompt. What is matched, and where it was published:

| statistic | value | source |
|---|---|---|
| first prompt, mean | 161 tokens | ShareGPT, Kwon et al. 2023, figure 11 |
| answer, mean | 338 tokens | the same |
| first prompt, median | 64 tokens | ShareGPT lengths of Sarathi-Serve (Agrawal et al., OSDI 2024) |
| turns of a conversation, mean | 5.4 | the same: 30,731 turns of 5,678 conversations |

Simplified: first prompts are lognormal, answers and later prompts exponential, the number of turns is geometric and
conversations begin at random. All lengths are independent of each other, and of the turn.
"""

from math import log, sqrt

import numpy as np

from ..allocator import whole_number
from .traces import TraceRequest

FIRST_PROMPT = 161.31  # tokens, mean
FIRST_PROMPT_MEDIAN = 64  # tokens
ANSWER = 337.99  # tokens, mean
TURNS = 30_731 / 5_678  # per conversation, mean
SYSTEM_PROMPT = 128  # tokens; our choice: none was published with the lengths
THINKING = 20.0  # seconds between an answer and the next question, mean; our choice
WRITING = 0.03  # seconds that a token of an answer is taken to last


def conversations(
    n: int,
    seed: int = 0,
    *,
    rate: float = 1.0,
    system_prompt: int = SYSTEM_PROMPT,
    maximum: int = 2048,
) -> list[TraceRequest]:
    """Draw conversations; their turns are requests that share what was said before.

    Args: n: conversations; seed: of the random numbers; rate: conversations that begin per second; system_prompt:
        tokens that all prompts begin with; maximum: tokens that a request may have, a conversation ends before it.
    Returns: requests in the order of arrival. Every token has an id of its own (id_tokens 1), so `blocks` tells the
        keys for any block size.
    Raises: ValueError for numbers out of range.
    """
    n = whole_number("n", n)
    system_prompt = whole_number("system_prompt", system_prompt)
    maximum = whole_number("maximum", maximum, minimum=system_prompt + 2)
    if not 0 < rate < float("inf"):
        raise ValueError(f"rate must be above 0, got {rate!r}")
    random = np.random.default_rng(seed)
    requests, begins = [], 0.0
    for number in range(1, n + 1):
        begins += random.exponential(1 / rate)
        requests += _turns(random, number, begins, system_prompt, maximum)
    requests.sort(key=lambda request: request.arrival)
    first = requests[0].arrival if requests else 0.0
    return [_numbered(request, line, first) for line, request in enumerate(requests, start=1)]


def _turns(random, number: int, now: float, system_prompt: int, maximum: int) -> list[TraceRequest]:
    """One conversation. The system prompt's tokens are the same in all, the others its own."""
    turns, held = [], system_prompt
    for turn in range(random.geometric(1 / TURNS)):
        prompt = held + (_first_prompt(random) if turn == 0 else _exponential(random, FIRST_PROMPT))
        output = _exponential(random, ANSWER)
        if turn == 0:  # a first turn that is too long is cut, so that nobody is silent
            prompt = min(prompt, maximum - 1)
            output = min(output, maximum - prompt)
        elif prompt + output > maximum:
            break
        held = prompt + output
        ids = [*range(system_prompt), *range(number << 32, (number << 32) + held - system_prompt)]
        turns.append(TraceRequest(0, now, prompt, output, ids, 1, held, 0, "", str(number)))
        now += WRITING * output + random.exponential(THINKING)
    return turns


def _first_prompt(random) -> int:
    spread = sqrt(
        2 * log(FIRST_PROMPT / FIRST_PROMPT_MEDIAN)
    )  # a lognormal's mean is its median × exp(spread² / 2)
    return max(1, round(FIRST_PROMPT_MEDIAN * float(np.exp(spread * random.standard_normal()))))


def _exponential(random, mean: float) -> int:
    return max(1, round(random.exponential(mean)))


def _numbered(request: TraceRequest, line: int, first: float) -> TraceRequest:
    about = (request.prompt, request.output, request.ids, 1, request.covered, 0, "", request.session)
    return TraceRequest(line, request.arrival - first, *about)
