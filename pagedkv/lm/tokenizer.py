"""Text to tokens and back: one character a token, which the pictures of pages need, or pieces of words."""

from collections.abc import Iterable, Sequence

import numpy as np


class CharacterTokenizer:
    """The simplest there is: a token is a character's place in the vocabulary.

    Args: vocabulary: the known characters, each once.
    Raises: ValueError if a character is in it twice.
    """

    end = None  # no token ends a text

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
        return "".join(self.vocabulary[token] for token in _checked(tokens, len(self)))


class BytePairTokenizer:
    """Byte pair encoding as GPT-2 does it, each digit by itself: frequent words are one token, any byte is some.

    `encode` reads all text as text: what looks like the name of a special token never becomes that token, so nobody
    can end a chat's turn by writing so.

    Args: pieces: what each token stands for, in GPT-2's letters for bytes; merges: "left right", the first to be
        merged first; end: the token that ends a text.
    Raises: ImportError without the package tokenizers; ValueError for pieces and merges that do not fit together.
    Source: Sennrich et al. 2016; Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """

    def __init__(self, pieces: Sequence[str], merges: Sequence[str], end: int):
        try:
            from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        except ImportError as error:
            raise ImportError('pieces of words need tokenizers: pip install "pagedkv[model]"') from error
        self.end = end
        self._size = len(pieces)
        try:
            pairs = [tuple(merge.split(" ")) for merge in merges]
            model = models.BPE({piece: token for token, piece in enumerate(pieces)}, pairs)
        except Exception as error:  # tokenizers raises no class of its own
            raise ValueError(f"pieces and merges do not fit together: {error}") from error
        self._tokenizer = Tokenizer(model)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._tokenizer.decoder = decoders.ByteLevel()

    def __len__(self) -> int:
        return self._size

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text: int64 [count]."""
        return np.array(self._tokenizer.encode(text).ids, np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, with "�" at the end where they stop within a character.

        Raises: ValueError for a number that is no token.
        """
        return self._tokenizer.decode(_checked(tokens, len(self)).tolist(), skip_special_tokens=False)


def _checked(tokens: Iterable[int], size: int) -> np.ndarray:
    tokens = np.asarray(tokens, np.int64).ravel()
    for token in tokens[(tokens < 0) | (tokens >= size)][:1]:
        raise ValueError(f"{token} is no token: they go from 0 to {size - 1}")
    return tokens
