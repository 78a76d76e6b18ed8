"""Checks of lesson 01: bytes per token, the paper's three words for a reservation, and how many requests fit."""

import itertools
from numbers import Real

import numpy as np

from ._core import Learner, Wrong, check, expect, same, seeded, show

COURSE_MODEL = (4, 2, 32, 4)  # layers, KV heads, numbers a head, bytes a number
LLAMA_3_8B = (32, 8, 128, 2)
OPT_13B = (40, 40, 128, 2)


class Text(str):
    """A drawing in words."""

    def __repr__(self) -> str:
        return str(self)


# ---- kv_bytes_per_token(layers, kv_heads, head_dim, itemsize)

UNLIKE = (
    5,
    3,
    7,
    4,
)  # no two of these, nor 2, are the same factor: what is missing can be told from the quotient

MISSING = {
    2: "what two things does a layer keep of every token?",
    5: "how many layers does a token pass, and what does each keep of it?",
    3: "how many KV heads keep a row of this token?",
    7: "how many numbers are in one head's row?",
    4: "how many bytes does one of these numbers take?",
}


@check("kv_bytes_per_token")
def kv_bytes_per_token(learner: Learner) -> str:
    """The bytes that one token leaves in the cache: K and V, layers, KV heads, head_dim, bytes per number."""
    if not same(got := learner(*LLAMA_3_8B), _bytes(*LLAMA_3_8B)):
        raise Wrong(*_missing_factor(learner, got))
    expect(learner, *COURSE_MODEL, gives=2048, about="the course's model, float32", question=MISSING[4])
    expect(learner, *OPT_13B, gives=819_200, about="OPT-13B, float16")
    half = (32, 4, 128, 2)
    expect(learner, *half, gives=65_536, question="what do half as many KV heads halve?")
    random = seeded(1)
    for layers, heads, dim, itemsize in random.integers(1, 50, (20, 4)).tolist():
        expect(learner, layers, heads, dim, itemsize, gives=_bytes(layers, heads, dim, itemsize))
    return "Llama-3-8B leaves 131,072 bytes per token, OPT-13B 819,200, the course's model 2,048."


def _bytes(layers: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    return 2 * layers * kv_heads * head_dim * itemsize


def _missing_factor(learner: Learner, got) -> tuple[str, str]:
    """What to say of a wrong number for Llama-3-8B: which factor it lacks, judged at a shape that tells."""
    said = f"{learner._name}(32, 8, 128, 2) gave {show(got)}, expected 131072"
    told = learner(*UNLIKE)
    if isinstance(told, Real) and told > 0:
        factor = _bytes(*UNLIKE) / told
        if factor in MISSING:
            return f"{said}: a factor is missing.", MISSING[factor]
        if factor < 1:
            return f"{said}: that is too much.", "do query heads leave anything behind for the next token?"
    return f"{said}.", "what does one layer keep of one token, in numbers? In bytes? And all layers?"


# ---- waste(prompt, now, final, maximum)

NIGHT = (4, 6, 10, 16)  # Good night: the prompt was "Good", "Good n" is there, sixteen slots are held


@check("waste")
def waste(learner: Learner) -> str:
    """What the slots of one reservation are: used, reserved, internal."""
    _split(learner, *NIGHT)
    _split(learner, 4, 4, 10, 16, about="the prompt was just read, nothing is written yet")
    _split(learner, 4, 10, 10, 16, about="the last token is written: now = final")
    _split(learner, 4, 6, 16, 16, about="it will become as long as allowed: final = maximum")
    _split(learner, 16, 16, 16, 16, about="a prompt that fills the reservation")
    random = seeded(2)
    for lengths in np.sort(random.integers(1, 2049, (20, 4)), axis=1).tolist():
        _split(learner, *lengths)
    return "Used, reserved and internal always add up to the slots that the request holds."


def _split(learner: Learner, prompt: int, now: int, final: int, maximum: int, about: str = "") -> None:
    expected = (now, final - now, maximum - final)
    got = learner(prompt, now, final, maximum)
    if same(got, expected):
        return
    said = f"{learner._name}({prompt}, {now}, {final}, {maximum}) gave {show(got)}" + (
        about and f" ({about})"
    )
    if not _numbers(got, 3):
        raise Wrong(f"{said}; it takes three numbers: used, reserved, internal.")
    drawing = None
    if (prompt, now, final, maximum) == NIGHT:
        drawing = Text("now        Good␣n··········\nin the end Good␣night······")
    used, whole = got[0], same(sum(got), maximum)
    if whole and same(used, now):
        question = "which of the two will this request still write to, and which never?"
    elif whole and same(used, final):
        question = "how many tokens exist at this moment?"
    elif same(used, now - prompt):
        question = "do the prompt's tokens need keys and values as well?"
    elif same(used, prompt + now):
        question = "the prompt's tokens stand in the slots too: from where does `now` count?"
    elif not whole:
        question = (
            f"the three add up to {show(sum(got))}, the request holds {maximum}: which slots are wrong?"
        )
    else:
        question = "how many tokens exist at this moment, how many are still to come?"
    raise Wrong(f"{said}.", question, drawing)


def _numbers(got, how_many: int) -> bool:
    """Whether the learner gave that many numbers."""
    several = isinstance(got, tuple | list | np.ndarray) and len(got) == how_many
    return several and all(isinstance(number, Real) for number in got)


# ---- fits(lengths, slots, maximum, bs)


@check("fits")
def fits(learner: Learner) -> str:
    """How many requests, in order of arrival, find room: reserving the maximum, and in blocks."""
    order = "who is next in the queue, and may a later one go first?"
    _admits(learner, [10, 8, 11], 32, 16, 4, "the story", "how many blocks does a text of 8 tokens fill?")
    _admits(
        learner, [8, 8], 16, 16, 4, "exactly full blocks", "how many blocks does a text of 8 tokens fill?"
    )
    _admits(learner, [1, 1, 1, 1], 12, 8, 4, "four short ones", "may two requests put tokens in one block?")
    _admits(learner, [10, 8, 11], 30, 16, 4, "two slots fewer", "is half a block at the end a block?")
    _admits(learner, [5], 64, 16, 4, "one request, an empty pool", "can more requests be in than there are?")
    _admits(learner, [4, 14, 4], 16, 16, 4, "a long one in the middle", order)
    _admits(learner, [], 32, 16, 4, "nobody came", "can more requests be in than there are?")
    random = seeded(3)
    for _ in range(30):
        lengths = random.integers(1, 40, random.integers(1, 12)).tolist()
        slots, bs = int(random.integers(1, 200)), int(random.choice([1, 2, 4, 16]))
        _admits(learner, lengths, slots, 40, bs, "", "which request is rounded up to whole blocks?")
    return "Reserving the maximum, two good nights fit; in blocks all three."


def _admits(learner, lengths, slots, maximum, bs, about, question) -> None:
    """One case; tells which of the two numbers is wrong."""
    expected = (min(len(lengths), slots // maximum), _in_blocks(lengths, slots // bs, bs))
    got = learner(lengths, slots, maximum, bs)
    if same(got, expected):
        return
    said = f"{learner._name}({show(lengths)}, {slots}, {maximum}, {bs}) gave {show(got)}"
    said += f", expected {show(expected)}" + (about and f" ({about})")
    if not _numbers(got, 2):
        raise Wrong(f"{said}; it takes two counts: reserving the maximum, in blocks.")
    if not same(got[0], expected[0]):
        question = f"if each holds {maximum} of {slots} slots, when does the next find none?"
        if not same(got[0], slots // maximum):
            question = "reserving, does it matter how long a request really is?"
        elif len(lengths) < slots // maximum:
            question = "can more requests be in than there are?"
    raise Wrong(f"{said}.", question)


def _in_blocks(lengths: list[int], num_blocks: int, bs: int) -> int:
    needed = itertools.accumulate(-(-length // bs) for length in lengths)
    return sum(total <= num_blocks for total in needed)
