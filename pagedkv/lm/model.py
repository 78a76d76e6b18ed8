"""A Llama decoder in NumPy, on one page: what it computes, and what it puts into the paged cache.

Touvron et al. 2023, "LLaMA", section 2.2: RMSNorm before each part, rotary positions, SwiGLU. In the shapes, n is the
number of tokens of all sequences in this step, one after the other; nothing is padded.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from ..attention import dense_attention
from ..block_table import SeqId, as_ids
from ..cache import PagedKVCache
from .tokenizer import BytePairTokenizer, CharacterTokenizer
from .weights import SHIPPED, Config, Weights, read_weights

Attend = Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class Llama:
    """The decoder. `forward` remembers keys and values in a paged cache, `forward_full` remembers nothing.

    Args: config: the shape; tokenizer: turns texts into its tokens and back; weights: of that shape.
    """

    def __init__(self, config: Config, tokenizer: CharacterTokenizer | BytePairTokenizer, weights: Weights):
        self.config, self.tokenizer = config, tokenizer
        self.embedding, self.layers, self.final_norm = weights
        self.cos, self.sin = rotations(config)  # [context, head_dim] each

    @classmethod
    def load(cls, path: str | Path = SHIPPED) -> Self:
        """The model in a weights file; without a path, the one that ships with the package.

        Raises: WeightsError (a ValueError) if the file is missing or damaged.
        """
        config, vocabulary, weights = read_weights(Path(path))
        return cls(config, CharacterTokenizer(vocabulary), weights)

    def new_cache(self, num_blocks: int, block_size: int, **options) -> PagedKVCache:
        """An empty paged cache of this model's shape; options as in PagedKVCache."""
        c = self.config
        options = {"num_layers": c.num_layers, "max_length": c.context} | options
        return PagedKVCache(num_blocks, block_size, c.num_kv_heads, c.head_dim, **options)

    # The computation

    def forward(
        self, cache: PagedKVCache, seq_ids: SeqId | Iterable[SeqId], tokens: Sequence[ArrayLike]
    ) -> np.ndarray:
        """Run each sequence's next tokens: whole prompts, chunks of prompts and single tokens, all in one batch.

        Args: seq_ids: registered sequences; tokens: per sequence its next tokens, whole numbers [count].
        Returns: logits of every token, float32 [n, vocabulary], sequence after sequence.
        Raises: ValueError for tokens outside the vocabulary or a sequence longer than the context, PoolExhausted if
            the pool cannot hold them; nothing is changed.
        """
        return self._run(cache, *self._checked(cache, seq_ids, tokens))

    def next_logits(
        self, cache: PagedKVCache, seq_ids: SeqId | Iterable[SeqId], tokens: Sequence[ArrayLike]
    ) -> np.ndarray:
        """As forward, but of each sequence's last token only: float32 [batch, vocabulary]."""
        ids, chunks, counts = self._checked(cache, seq_ids, tokens)
        return self._run(cache, ids, chunks, counts, wanted=np.cumsum(counts) - 1)

    def _run(self, cache, ids, chunks, counts, wanted=slice(None)) -> np.ndarray:
        """A step that was checked."""
        reservation = cache.extend(ids, counts)
        plan = cache.plan(ids, counts)

        def attend(layer, q, k, v):
            cache.write(layer, reservation, k, v)
            return cache.attend(layer, q, plan)  # [n, q_heads, head_dim]

        first = np.repeat(reservation.start - np.cumsum(counts) + counts, counts)  # [n]
        return self.decode(np.concatenate(chunks), first + np.arange(len(first)), attend, wanted)

    def forward_full(self, tokens: ArrayLike) -> np.ndarray:
        """Run one sequence from its beginning, without any cache: logits, float32 [len(tokens), vocabulary]."""
        tokens = self._tokens(tokens)  # [n]

        def attend(layer, q, k, v):
            return dense_attention(q, k, v, dtype=np.float32)  # [n, q_heads, head_dim]

        return self.decode(tokens, np.arange(len(tokens)), attend)

    def decode(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        attend: Attend,
        wanted: slice | np.ndarray = slice(None),
    ) -> np.ndarray:
        """The network itself; who remembers what is the business of `attend`.

        Args: tokens, positions: whole numbers [n]; attend: called once a layer with its number, queries
            [n, num_q_heads, head_dim], new keys and values [n, num_kv_heads, head_dim]; returns what queries find;
            wanted: the rows whose logits are asked for.
        Returns: logits, float32 [n, vocabulary], or as many rows as are wanted.
        """
        eps, hidden = self.config.norm_eps, self.config.hidden
        q_heads, kv_heads = self.config.num_q_heads, self.config.num_kv_heads
        cos, sin = self.cos[positions, None], self.sin[positions, None]  # [n, 1, head_dim]
        x = self.embedding[tokens]  # [n, width]
        for i, layer in enumerate(self.layers):
            h = rms_norm(x, layer.attention_norm, eps)  # [n, width]
            qkv = self._heads(h @ layer.query_key_value.T)  # [n, q_heads + 2 kv_heads, head_dim]
            qk, v = rotate(qkv[:, :-kv_heads], cos, sin), qkv[:, -kv_heads:]
            found = attend(i, qk[:, :q_heads], qk[:, q_heads:], v)  # [n, q_heads, head_dim]
            x = x + found.reshape(len(x), -1) @ layer.output.T  # [n, width]
            h = rms_norm(x, layer.mlp_norm, eps)  # [n, width]
            gate_up = h @ layer.gate_up.T  # [n, 2 hidden]
            h = silu(gate_up[:, :hidden]) * gate_up[:, hidden:]  # [n, hidden]
            x = x + h @ layer.down.T  # [n, width]
        return rms_norm(x[wanted], self.final_norm, eps) @ self.embedding.T  # [n, vocabulary]

    def _heads(self, x: np.ndarray) -> np.ndarray:  # [n, heads * head_dim]
        return x.reshape(len(x), -1, self.config.head_dim)  # [n, heads, head_dim]

    # What callers may say

    def _checked(self, cache, seq_ids, tokens) -> tuple[tuple[SeqId, ...], list[np.ndarray], np.ndarray]:
        """Ids, tokens and counts of a step, or a ValueError before anything has changed."""
        ids, chunks = as_ids(seq_ids), [self._tokens(chunk) for chunk in tokens]
        if len(chunks) != len(ids) or not ids:
            raise ValueError(f"each sequence needs its tokens: {len(ids)} sequences, {len(chunks)} arrays")
        wanted = (self.config.num_layers, self.config.num_kv_heads, self.config.head_dim)
        pages = (cache.storage.num_layers, cache.storage.num_kv_heads, cache.storage.head_dim)
        if pages != wanted:
            raise ValueError(f"the cache has (layers, kv_heads, head_dim) {pages}, the model needs {wanted}")
        counts = np.array([len(chunk) for chunk in chunks])  # [batch]
        after = cache.lengths(ids) + counts
        for i in np.flatnonzero(after > self.config.context)[:1]:
            limit = self.config.context
            raise ValueError(
                f"sequence {ids[i]!r} would hold {after[i]} tokens; the model's context is {limit}"
            )
        return ids, chunks, counts

    def _tokens(self, tokens: ArrayLike) -> np.ndarray:
        tokens = np.asarray(tokens)
        if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens must be whole numbers [count], at least one; got {tokens!r}")
        for token in tokens[(tokens < 0) | (tokens >= self.config.vocabulary_size)][:1]:
            raise ValueError(f"{token} is no token: they go from 0 to {self.config.vocabulary_size - 1}")
        if len(tokens) > self.config.context:
            raise ValueError(f"{len(tokens)} tokens; the model's context is {self.config.context}")
        return tokens


def rotations(config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of every position's angles: float32 [context, head_dim] each (Su et al. 2021, "RoFormer").

    Angles are rounded to float32 where training rounded them; at position 500 the logits would show the difference.
    """
    pair = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)  # [head_dim / 2]
    frequency = np.float32(config.rope_theta) ** -pair  # [head_dim / 2]  radians per position
    angles = np.outer(np.arange(config.context, dtype=np.float32), frequency)  # [context, head_dim / 2]
    angles = np.concatenate([angles, angles], axis=1)  # feature i turns with feature i + head_dim / 2
    return np.cos(angles), np.sin(angles)


def rotate(
    x: np.ndarray, cos: np.ndarray, sin: np.ndarray
) -> np.ndarray:  # [n, heads, head_dim], [n, 1, head_dim]
    """Turn each pair of features by its position's angle, so that q · k depends on the distance only."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]  # [n, heads, head_dim / 2]
    return x * cos + np.concatenate([-second, first], axis=-1) * sin  # [n, heads, head_dim]


def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:  # [n, width], [width]
    """Scale each row to mean square 1, then each feature by its gain."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * gain  # [n, width]


def silu(x: np.ndarray) -> np.ndarray:
    """x · sigmoid(x), written with tanh because exp(−x) overflows for large negative x."""
    return x * (np.tanh(x * np.float32(0.5)) + 1) * np.float32(0.5)
