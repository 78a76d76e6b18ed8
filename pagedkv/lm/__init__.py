"""A language model over the paged cache: Llama in NumPy, as trained on Shakespeare, one character a token.

`smollm2.load()` gives the same network with the weights of a model that answers questions.
"""

from . import smollm2
from .generate import Beams, Sampling, Usage, beam_search, greedy, sample
from .model import Llama
from .tokenizer import BytePairTokenizer, CharacterTokenizer
from .weights import Config, WeightsError

__all__ = [
    "Llama",
    "Config",
    "WeightsError",
    "CharacterTokenizer",
    "BytePairTokenizer",
    "smollm2",
    "Sampling",
    "greedy",
    "sample",
    "beam_search",
    "Beams",
    "Usage",
]
