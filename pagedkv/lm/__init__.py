"""A small language model over the paged cache: Llama in NumPy, trained on Shakespeare, one character a token."""

from .generate import Beams, Sampling, Usage, beam_search, greedy, sample
from .model import Llama
from .tokenizer import CharacterTokenizer
from .weights import Config, WeightsError

__all__ = [
    "Llama",
    "Config",
    "WeightsError",
    "CharacterTokenizer",
    "Sampling",
    "greedy",
    "sample",
    "beam_search",
    "Beams",
    "Usage",
]
