"""What is measured: attention shapes, and the data that every kernel gets."""

from dataclasses import dataclass

import numpy as np

from ..attention import dense_attention
from ..cache import PagedKVCache

_draw = np.random.default_rng(7)  # the lengths are part of a shape: the same in every run


@dataclass(frozen=True)
class Shape:
    """One decode step of one model layer: a batch of sequences, one new query each.

    Args: lengths: tokens per sequence; prefix: leading tokens that all of them share; num_layers: layers that calls
        walk through (a shape that fits into the processor's cache needs several to be honest).
    """

    name: str
    lengths: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    prefix: int = 0
    num_layers: int = 1
    block_size: int = 16

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Keys that a step reads, as if nothing were shared."""
        return sum(self.lengths)

    def num_bytes(self, bytes_per_token_and_head: float) -> float:
        """Bytes of keys and values that a step has to read at least; a shared prefix counts once."""
        tokens = self.num_tokens - self.prefix * (self.batch - 1)
        return tokens * self.num_kv_heads * bytes_per_token_and_head

    def smaller(self, factor: int) -> "Shape":
        """The same shape with shorter sequences: for a quick look, not for a comparison."""
        prefix = self.prefix // factor
        lengths = (max(prefix + 1, length // factor) for length in self.lengths)
        return Shape(**{**self.__dict__, "lengths": tuple(lengths), "prefix": prefix})


def drawn(low: int, high: int, batch: int) -> tuple[int, ...]:
    return tuple(_draw.integers(low, high + 1, batch).tolist())


def beams(width: int, prefix: int = 2048, own: int = 64) -> Shape:
    """Beams of a Llama-3-8B layer that share a prompt: `own` tokens each, and the last few not alike."""
    lengths = tuple(prefix + own - i % min(own, 8) for i in range(width))
    return Shape(f"d{width}", lengths, 32, 8, 128, prefix)


SHAPES = {
    shape.name: shape
    for shape in [
        Shape("b8", drawn(512, 4096, 8), 32, 8, 128),  # a Llama-3-8B layer
        Shape("b32", drawn(512, 4096, 32), 32, 8, 128),
        Shape("c", drawn(128, 2048, 16), 14, 2, 64, num_layers=4),  # Qwen2.5-0.5B
        Shape("a", (100, 237, 380, 500), 4, 4, 64),  # small: the calls themselves count
        beams(16),
        beams(64),
    ]
}


class Workload:
    """A shape filled with random numbers: contiguous for the peers, in shuffled pages for us, and the right answer.

    Args: shape; seed: of the numbers and of the order of the blocks.
    """

    def __init__(self, shape: Shape, seed: int = 0):
        self.shape, self.seed = shape, seed
        self.seq_ids = tuple(range(shape.batch))
        random = np.random.default_rng(seed)
        self.lengths = np.array(shape.lengths)  # [batch]
        self.query = random.standard_normal((shape.batch, shape.num_q_heads, shape.head_dim), np.float32)
        heads = (shape.num_layers, shape.batch, shape.num_kv_heads, max(shape.lengths), shape.head_dim)
        self.keys = np.zeros(
            heads, np.float32
        )  # [layers, batch, kv_heads, longest, head_dim], zeros behind a tail
        self.values = np.zeros(heads, np.float32)
        for contiguous in (self.keys, self.values):
            self._fill(contiguous, random)
        self._caches: dict[tuple[str, int], PagedKVCache] = {}
        self._expected: dict[str, tuple[np.ndarray, float]] = {}

    def _fill(self, contiguous: np.ndarray, random: np.random.Generator) -> None:
        for row, length in enumerate(self.lengths):
            shared = self.shape.prefix if row else 0
            contiguous[:, row, :, :shared] = contiguous[:, 0, :, :shared]
            own = (contiguous.shape[0], length - shared, *contiguous[0, 0, :, 0].shape)
            contiguous[:, row, :, shared:length] = random.standard_normal(own, np.float32).swapaxes(1, 2)

    def contiguous(self, layer: int, row: int, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of one sequence from a position on, as a cache takes them: [tokens, kv_heads, head_dim]."""
        part = (layer, row, slice(None), slice(start, self.lengths[row]))
        return self.keys[part].swapaxes(0, 1), self.values[part].swapaxes(0, 1)

    def cache(self, dtype: str = "float32", block_size: int | None = None) -> PagedKVCache:
        """The same tokens in pages whose ids are fully shuffled; built once per dtype and block size."""
        block_size = block_size or self.shape.block_size
        key = (dtype, block_size)
        if key not in self._caches:
            self._caches[key] = self._paged(dtype, block_size)
        return self._caches[key]

    def _paged(self, dtype: str, block_size: int) -> PagedKVCache:
        shape = self.shape
        blocks = sum(-(-length // block_size) + 1 for length in shape.lengths)
        cache = PagedKVCache(
            blocks, block_size, shape.num_kv_heads, shape.head_dim, num_layers=shape.num_layers, dtype=dtype
        )
        shuffle(cache, self.seed)
        for row in self.seq_ids:
            shared = shape.prefix if row else 0
            if shared:
                cache.fork(0, [row])
                cache.truncate(row, shared)
            else:
                cache.add(row)
            reservation = cache.extend(row, int(self.lengths[row]) - shared)
            for layer in range(shape.num_layers):
                cache.write(layer, reservation, *self.contiguous(layer, row, shared))
        return cache

    def expected(self, dtype: str = "float32") -> tuple[np.ndarray, float]:
        """The float64 answer on what a dtype stores, [layers, batch, num_q_heads, head_dim], and the largest |V|."""
        if dtype not in self._expected:
            cache, out, largest = self.cache(dtype), [], 0.0
            for layer in range(self.shape.num_layers):
                for row in self.seq_ids:
                    keys, values = cache.gather(layer, row)
                    out.append(dense_attention(self.query[row : row + 1], keys, values)[0])
                    largest = max(largest, float(np.abs(values).max()))
            self._expected[dtype] = np.array(out).reshape(-1, *self.query.shape), largest
        return self._expected[dtype]


def shuffle(cache: PagedKVCache, seed: int = 0) -> None:
    """Put the free blocks of an unused cache into random order, as after a long day of serving."""
    ids = [f"shuffle {i}" for i in range(cache.num_blocks)]
    for seq in ids:
        cache.add(seq)
    cache.extend(ids, 1)
    cache.free([ids[i] for i in np.random.default_rng(seed).permutation(len(ids))])
