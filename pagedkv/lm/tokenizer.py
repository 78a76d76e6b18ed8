"""One character, one token: the simplest tokenizer there is, and the one the pictures of pages need."""

from collections.abc import Iterable

import numpy as np


class CharacterTokenizer:
    """Text to tokens and back; a token is a character's place in the vocabulary.

    Args: vocabulary: the known characters, each once.
    Raises: ValueError if a character is in it twice.
    """

    def __init__(self, vocabulary: str):
        self.vocabulary = vocabulary
        self._token = {character: token for token, character in enumerate(vocabulary)}
        if len(self._token) < len(vocabulary):
            twice = next(c for i, c in enumerate(vocabulary) if c in vocabulary[:i])
            raise ValueError(f"the vocabulary has {twice!r} twice")

    def __len__(self) -> int:
        return len(self.vocabulary)

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text: int64 [len(text)]. ValueError names the first character that is not known."""
        for position, character in enumerate(text):
            if character not in self._token:
                known = "".join(c for c in self.vocabulary if c.isprintable())
                raise ValueError(
                    f"the model has never seen {character!r} (position {position}); it knows {known!r}"
                )
        return np.array([self._token[character] for character in text], np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens. ValueError for a number that is no token."""
        tokens = np.asarray(tokens, np.int64).ravel()
        for token in tokens[(tokens < 0) | (tokens >= len(self))][:1]:
            raise ValueError(f"{token} is no token: they go from 0 to {len(self) - 1}")
        return "".join(self.vocabulary[token] for token in tokens)
