"""`PagedCache`: our pages as the KV cache of Hugging Face transformers.

    cache = PagedCache(model.config, num_blocks=64, block_size=16)
    model.generate(**inputs, num_beams=4, cache=cache)        before 5.24: past_key_values=cache

The model asks for the keys and values of all positions after each step and attends to them itself, so a step
gathers them from the pages, as DynamicCache joins them with torch.cat. What is gained is memory: beams share the
blocks of what they have in common, and a block is copied when one of them writes into it. `generate` computes a
prompt once per beam or sample; to compute it once and share it from the start, run the model on all but its last
token, call `cache.batch_repeat_interleave(n)`, and generate from there.

What the interface cannot express: rows of different lengths. A batch is padded on the left, and the padding is
stored like tokens. Sliding windows are masked by the model; their old blocks are kept. Gradients do not flow
through pages. A cache is not told which model uses it: `reset` it before another one of the same shape does.

All that differs between releases of transformers is looked up here, by signature.
"""

import inspect
import operator
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..allocator import Observer, PoolExhausted
from ..block_table import SeqId
from ..cache import PagedKVCache
from ..manager import BlockManager
from ..storage import KVStorage

try:
    import torch
    import transformers
    from transformers import cache_utils
except ImportError as error:
    raise ImportError(
        'PagedCache needs torch and transformers: pip install "pagedkv[transformers]"'
    ) from error

WORDS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}  # dtypes of pages
KEEPS_ALL = {"full_attention", "sliding_attention", "chunked_attention"}  # layers whose keys can lie in pages


def _require_layers(cache_utils=cache_utils, version: str = transformers.__version__) -> None:
    """ImportError unless this transformers builds a cache from layers: Cache(layers=…), since 4.57."""
    cache, layer = (getattr(cache_utils, name, None) for name in ("Cache", "CacheLayerMixin"))
    if cache is None or layer is None or "layers" not in inspect.signature(cache.__init__).parameters:
        raise ImportError(
            f"transformers {version} has no Cache(layers=…) to put pages under: "
            'PagedCache needs 4.57 or later, and is tested with the one of pip install "pagedkv[transformers]"'
        )


_require_layers()
_crop = inspect.signature(cache_utils.DynamicLayer.crop).parameters
CROPS_TO_LENGTH = "tokens_to_remove" not in _crop  # in older releases, the length to keep


@dataclass(frozen=True)
class CacheStats:
    """What a cache holds and held, in blocks."""

    used: int  # now
    unshared: int  # what the same rows would use now if each had its own
    peak: int  # the most that were used at once since the last reset
    copied: int  # copies that a write into a shared block asked for since then


@dataclass(frozen=True)
class _Step:
    """One forward pass: what comes, where it goes and what attention reads; the same in every layer."""

    shape: torch.Size  # of the new keys: [batch, kv_heads, new, head_dim]
    dtype: torch.dtype
    slots: np.ndarray  # int32 [batch * new]
    vectors: torch.Tensor  # int64 [batch, kv_heads, length]  slot * kv_heads + head, of all positions


class _Rows:
    """The rows of a batch over one manager: one table per row serves all layers."""

    def __init__(self, num_layers: int, manager: BlockManager, poison: bool):
        self.manager, self.poison = manager, poison
        self.engine: PagedKVCache | None = None  # made when the first keys tell their shape
        self.seq_ids: list[SeqId] = []
        self.lengths = [0] * num_layers  # tokens that each layer has written
        self.length = 0  # tokens that the tables have room for
        self.peak = self.copied = 0
        self._step: _Step | None = None

    @property
    def used(self) -> int:
        return self.manager.num_blocks - self.manager.num_free

    # A forward pass

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values of a layer; return all it holds, each [batch, kv_heads, length, head_dim]."""
        if self.lengths[layer] == self.length:  # the first layer of a forward pass makes room for all
            self._step = self._begin(keys, values)
        step, after = self._step, self.lengths[layer] + keys.shape[2]
        same = keys.shape == values.shape == step.shape and keys.dtype == values.dtype == step.dtype
        if not same or after != self.length:
            raise ValueError(
                f"layer {layer} got {keys.dtype} {tuple(keys.shape)} behind its {self.lengths[layer]} tokens, "
                f"layers before it got {step.dtype} {tuple(step.shape)} and hold {self.length} now"
            )
        self.engine.storage.put(layer, step.slots, {"keys": _by_token(keys), "values": _by_token(values)})
        self.lengths[layer] = after
        stored_keys, stored_values = self._pages[layer]
        return torch.embedding(stored_keys, step.vectors), torch.embedding(stored_values, step.vectors)

    def _begin(self, keys: torch.Tensor, values: torch.Tensor) -> _Step:
        """Make room for a forward pass, or refuse it before anything is changed."""
        _check_new(keys, values)
        self._check_level()
        if self.length == 0:
            self.start(keys)
        self._check_same(keys)
        batch, heads, new, _ = keys.shape
        try:
            reservation = self.engine.extend(self.seq_ids, new)
        except PoolExhausted as refusal:
            refusal.add_note(
                f"{batch} rows of {self.length} tokens asked for room for {new} more each: PagedCache needs "
                f"more than its {self.manager.num_blocks} blocks of {self.manager.block_size}, or fewer rows"
            )
            if self.length == 0:
                self.reset()
            raise
        self.length += new
        self.copied += len(reservation.copies)
        self.peak = max(self.peak, self.used)
        position, size = np.arange(self.length), self.manager.block_size
        tables = self.manager.block_tables(self.seq_ids)
        slots = tables[:, position // size].astype(np.int64) * size + position % size  # [batch, length]
        vectors = slots[:, None, :] * heads + np.arange(heads)[:, None]  # [batch, kv_heads, length]
        return _Step(keys.shape, keys.dtype, reservation.slots, torch.from_numpy(vectors))

    def start(self, keys: torch.Tensor) -> None:
        """Begin with a batch: a sequence per row, and pages for keys of this shape and dtype."""
        batch, heads, _, head_dim = keys.shape
        if self.engine is None or self._shape() != (heads, head_dim, WORDS[keys.dtype]):
            self.make_pages(heads, head_dim, WORDS[keys.dtype])
        if len(self.seq_ids) != batch:
            self.reset()
            self.seq_ids += [self.manager.add(row) for row in range(batch)]

    def make_pages(self, num_kv_heads: int, head_dim: int, dtype: str) -> None:
        pool, layers = (self.manager.num_blocks, self.manager.block_size), len(self.lengths)
        storage = KVStorage(layers, *pool, num_kv_heads, head_dim, dtype, poison=self.poison)
        self.engine = PagedKVCache(*pool, num_kv_heads, head_dim, manager=self.manager, storage=storage)
        # As torch sees the same memory: keys and values of each layer, as vectors [slots * kv_heads, head_dim].
        seen = [
            _as_torch(storage.arrays[name], dtype).view(layers, -1, head_dim) for name in ("keys", "values")
        ]
        self._pages = list(zip(*seen, strict=True))

    def _shape(self) -> tuple[int, int, str]:
        storage = self.engine.storage
        return storage.num_kv_heads, storage.head_dim, storage.dtype

    def _check_level(self) -> None:
        held = min(self.lengths)
        if held < self.length:
            raise ValueError(
                f"layer {self.lengths.index(held)} holds {held} tokens, others {self.length}: a forward pass broke "
                f"off, or a model with fewer layers used this cache; crop({held - self.length}) or reset() it"
            )

    def _check_same(self, keys: torch.Tensor) -> None:
        batch, heads, _, head_dim = keys.shape
        began, given = (len(self.seq_ids), *self._shape()), (batch, heads, head_dim, WORDS[keys.dtype])
        if given != began:
            raise ValueError(
                f"this cache holds (batch, kv_heads, head_dim, dtype) {began}, got keys of {given}: "
                "reset() it for another batch or model"
            )

    # Rows

    def select(self, indices: torch.Tensor | Iterable[int]) -> None:
        """Row i continues what row indices[i] holds now; tables are re-pointed and no byte moves."""
        try:
            parents = torch.arange(len(self.seq_ids))[torch.as_tensor(indices).cpu()].tolist()
        except IndexError as error:
            raise ValueError(f"rows are 0 … {len(self.seq_ids) - 1}: {error}") from None
        if len(parents) == len(self.seq_ids):
            self.engine.reorder(self.seq_ids, parents)
            return
        rows, old = [], list(self.seq_ids)
        for parent in parents:
            first = old[parent] not in rows
            rows += [old[parent]] if first else self.engine.fork(old[parent])
        self.engine.free([seq_id for seq_id in old if seq_id not in rows])
        self.seq_ids[:] = rows

    def crop(self, length: int) -> None:
        """Forget every row's tokens from position `length` on; blocks without a token become free."""
        for seq_id in self.seq_ids:
            self.engine.truncate(seq_id, length)
        self.length = length
        self.lengths[:] = [min(held, length) for held in self.lengths]

    def take(self, other: "_Rows") -> None:
        """Become what `other` is, in this pool."""
        if other.engine is not None:
            self.make_pages(*other._shape())
            self.engine.restore(other.manager.snapshot(other.seq_ids), other.engine)
        self.seq_ids[:], self.lengths[:] = other.seq_ids, other.lengths
        self.length, self.peak, self.copied = other.length, other.peak, other.copied

    def reset(self) -> None:
        """Give all blocks back."""
        if self.seq_ids:
            self.engine.free(self.seq_ids)
        self.seq_ids.clear()
        self.lengths[:] = [0] * len(self.lengths)
        self.length = self.peak = self.copied = 0


class PagedLayer(cache_utils.CacheLayerMixin):
    """One layer's face of the rows. What concerns rows, and so all layers, layer 0 does for all."""

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, rows: _Rows, layer: int):
        super().__init__()
        self._rows, self._layer = rows, layer

    @property
    def batch_size(self) -> int:
        """Rows, or −1 before the first update."""
        return len(self._rows.seq_ids) or -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        """Make the pages, for keys and values of this batch, heads, head_dim and dtype."""
        _check_new(key_states, key_states if value_states is None else value_states)
        if self._rows.length == 0:
            self._rows.start(key_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new keys and values of one layer, and return all that it holds.

        Args: key_states, value_states: [batch, kv_heads, new, head_dim].
        Returns: keys and values, each [batch, kv_heads, length, head_dim], contiguous.
        Raises: PoolExhausted, or ValueError for another batch, shape or dtype than the cache began with; the first
            layer of a forward pass refuses it, and nothing is changed.
        """
        everything = self._rows.update(self._layer, key_states.detach(), value_states.detach())
        self.is_initialized = True
        return everything

    def get_seq_length(self) -> int:
        return self._rows.lengths[self._layer]

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """How many keys the next update will return, and the first one's position. Before 5.8 positions came."""
        new = query_length if isinstance(query_length, int) else len(query_length)
        return self.get_seq_length() + new, 0

    def get_max_length(self) -> int:
        """No maximum: the pool bounds all rows together."""
        return -1

    get_max_cache_shape = get_max_length  # its name before 5.24

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last −n tokens of every row; blocks without a token become free.

        ValueError for n > 0; where transformers says `max_length`, n >= 0 is the length to keep.
        """
        n, held = operator.index(tokens_to_remove), self._rows.length
        if n > 0 and not CROPS_TO_LENGTH:
            raise ValueError(f"crop takes minus the number of tokens to remove, got {n}")
        keeps = CROPS_TO_LENGTH and n >= 0
        if self._layer == 0:
            self._rows.crop(min(n, held) if keeps else max(held + n, 0))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i continues row beam_idx[i]: tables are re-pointed, no byte of a page moves."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in this order; a row named twice is shared."""
        if self._layer == 0 and self._rows.length:
            self._rows.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let each row be followed by repeats − 1 that share all its blocks."""
        if self._layer == 0 and self._rows.length:
            self._rows.select(torch.arange(len(self._rows.seq_ids)).repeat_interleave(repeats))

    def reset(self) -> None:
        """Free all blocks; what comes next may have another batch size, shape and dtype."""
        self.is_initialized = False
        if self._layer == 0:
            self._rows.reset()

    def offload(self) -> None:
        """Nothing to do: pages lie in main memory."""

    prefetch = offload


class PagedCache(cache_utils.Cache):
    """A cache for `generate` whose rows share blocks, counted and copied on write.

    One manager holds one table per row for all layers; the pages are made when the first keys tell their shape,
    with their dtype (bfloat16 as raw 16-bit words), so attention reads the very bits that it wrote.
    A pool too small for a step raises PoolExhausted before anything is changed.

    Args: config: of the model; num_blocks: of the pool, for all rows together: rows * ceil(length / block_size)
        always suffice; block_size: tokens per block; poison: as in KVStorage; observers: as in BlockManager.
    Raises: ValueError for a model whose layers keep something else than keys and values.
    Source: Kwon et al. 2023, section 4.4.
    """

    def __init__(
        self,
        config: "transformers.PretrainedConfig",
        num_blocks: int,
        block_size: int = 16,
        *,
        poison: bool = False,
        observers: Iterable[Observer] = (),
    ):
        manager = BlockManager(num_blocks, block_size, observers=observers)
        self._config = config
        self._rows = rows = _Rows(_num_layers(config), manager, poison)
        super().__init__(layers=[PagedLayer(rows, layer) for layer in range(len(rows.lengths))])

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs):
        """As PagedLayer.update. ValueError for a layer that the model of this cache has not."""
        if not 0 <= layer_idx < len(self.layers):
            raise ValueError(f"there is no layer {layer_idx}: this cache was made for {len(self.layers)}")
        return self.layers[layer_idx].update(key_states, value_states)

    @property
    def manager(self) -> BlockManager:
        """The tables and the pool; `teach.pages` draws it."""
        return self._rows.manager

    @property
    def engine(self) -> PagedKVCache | None:
        """Manager and pages together, or None before the first update."""
        return self._rows.engine

    @property
    def block_size(self) -> int:
        return self.manager.block_size

    @property
    def seq_ids(self) -> list[SeqId]:
        """The sequences of the batch's rows, in order."""
        return list(self._rows.seq_ids)

    @property
    def blocks_used(self) -> int:
        return self._rows.used

    @property
    def stats(self) -> CacheStats:
        """Blocks used now, without sharing, at most, and copied."""
        rows = self._rows
        unshared = len(rows.seq_ids) * -(-rows.length // self.manager.block_size)
        return CacheStats(rows.used, unshared, rows.peak, rows.copied)

    def __deepcopy__(self, memo: dict) -> "PagedCache":
        """The same rows in a pool of their own of the same size, sharing kept; observers stay behind."""
        twin = PagedCache(self._config, self.manager.num_blocks, self.block_size, poison=self._rows.poison)
        twin._rows.take(self._rows)
        for layer, mine in zip(twin.layers, self.layers, strict=True):
            layer.is_initialized = mine.is_initialized
        return twin

    def __repr__(self) -> str:
        return repr(self.manager)

    def _repr_html_(self) -> str | None:
        return self.manager._repr_html_()


def _num_layers(config: "transformers.PretrainedConfig") -> int:
    """Layers of the decoder, or ValueError if one keeps something else than keys and values of its own."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(config).__name__} is an encoder and a decoder: PagedCache serves decoders alone"
        )
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or []
    other = sorted(set(kinds) - KEEPS_ALL)
    shares = getattr(text, "kv_sharing_modes", None) or getattr(text, "num_kv_shared_layers", None)
    if other or shares:
        why = f"layers of type {', '.join(other)}" if other else "layers that use the keys of others"
        raise ValueError(f"PagedCache has no pages for {type(config).__name__}: it has {why}")
    return text.num_hidden_layers


def _by_token(new: torch.Tensor) -> np.ndarray:
    """[batch, kv_heads, new, head_dim] as the storage keeps it: [batch * new, kv_heads, head_dim]."""
    batch, heads, tokens, head_dim = new.shape
    if tokens > 1:
        new = new.transpose(1, 2)
    new = new.reshape(batch * tokens, heads, head_dim)
    return new.view(torch.int16).numpy().view(np.uint16) if new.dtype == torch.bfloat16 else new.numpy()


def _as_torch(array: np.ndarray, dtype: str) -> torch.Tensor:
    """The same memory as a tensor."""
    if dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _check_new(keys: torch.Tensor, values: torch.Tensor) -> None:
    """ValueError for keys and values that no page can hold."""
    if keys.ndim != 4 or keys.shape != values.shape:
        raise ValueError(
            "keys and values must have one shape (batch, kv_heads, new, head_dim), "
            f"got {tuple(keys.shape)} and {tuple(values.shape)}"
        )
    if keys.dtype != values.dtype or keys.dtype not in WORDS:
        raise ValueError(f"pages hold {', '.join(WORDS.values())}, got {keys.dtype} and {values.dtype}")
    if keys.device.type != "cpu" or values.device.type != "cpu":
        raise ValueError(f"pages lie in main memory, got keys on {keys.device}, values on {values.device}")
