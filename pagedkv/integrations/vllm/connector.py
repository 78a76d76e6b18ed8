"""Our page store as vLLM's external KV cache: what one engine computed, another one loads.

    KVTransferConfig(
        kv_connector="PagedKVConnector",
        kv_connector_module_path="pagedkv.integrations.vllm.connector",
        kv_role="kv_both",
        kv_connector_extra_config={"store": "/a/folder"},  # or redis://host:port/0
    )

Whole blocks go there as checked records, under a key made of vLLM's own hash of the text and of what else the keys
and values depend on. The store is a cache: a page that is missing, damaged or another model's is computed again, and
a store that fails never stops the engine. Written for vLLM 0.32 on a CPU, one process per model.
"""

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...prefix_cache import tagged
from ...storage import KVStorage
from ...store.folder import PageStore
from ...store.record import Layout, Page
from .layout import from_page, page_key, to_page

try:
    import torch
    import vllm._custom_ops as ops
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
    )
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    from vllm.v1.kv_cache_interface import FullAttentionSpec
except ImportError as error:
    raise ImportError(f"the connector runs in a Python that has vLLM 0.32 for CPUs: {error}") from error

log = logging.getLogger(__name__)
DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
PAUSE = 10.0  # seconds that a store which failed is left alone: each call could wait for it again
SAMPLES, SAMPLE_BYTES = 64, 4096  # of each file of weights, to tell it from others


@dataclass
class Work(KVConnectorMetadata):
    """What the scheduler's side asks of the worker's side in one step."""

    load: list[tuple[int, Page]] = field(default_factory=list)  # block, what belongs there
    save: list[tuple[int, bytes]] = field(default_factory=list)  # block, its key


@dataclass
class Followed:
    """A request that runs, as the scheduler's side knows it."""

    request: Any
    blocks: list[int] = field(default_factory=list)
    kept: int = 0  # so many of its first blocks are in the store, or on their way


class PagedKVConnector(KVConnectorBase_V1):
    """Loads the beginning of a prompt from a store of pages, and stores every block that becomes full.

    The scheduler's side reads and checks pages before it promises them, so a promise is always kept.
    Options (`kv_connector_extra_config`): store: a folder or the URL of a Redis; model: words that tell this model's
    weights from all others, if its files cannot be asked.

    Raises: ValueError for a model or engine whose pages it cannot move.
    """

    def __init__(self, vllm_config, role: KVConnectorRole, kv_cache_config):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.layers, spec = _attention(vllm_config, kv_cache_config)
        self.block_size = spec.block_size
        options = self._kv_transfer_config.kv_connector_extra_config
        if not options.get("store"):
            raise ValueError('kv_connector_extra_config needs "store": a folder or the URL of a Redis')
        self.layout = layout_of(spec, len(self.layers), options.get("model") or model_identity(vllm_config))
        self.store = open_store(options["store"], self.layout)
        self.loaded = self.saved = self.failed = 0  # pages, pages, calls of the store
        self._caches: list[torch.Tensor] = []  # of the layers, [blocks, kv_heads, block_size, 2 * head_dim]
        self._paused_until = 0.0  # by time.monotonic
        self._found: dict[str, tuple[int, list[Page]]] = {}  # request -> first block, pages read for it
        self._followed: dict[str, Followed] = {}
        self._work = Work()

    # The scheduler's side

    def get_num_new_matched_tokens(self, request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens behind the computed ones that the store has; the last one of a prompt is always computed."""
        first = num_computed_tokens // self.block_size
        if num_computed_tokens % self.block_size or request.skip_reading_prefix_cache or _foreign(request):
            return 0, False
        known = self._found.get(request.request_id)
        if known is None or known[0] != first:  # a request that has to wait asks again in every step
            end = (request.num_tokens - 1) // self.block_size
            pages = self._read(self._keys(request, first, end))
            known = self._found[request.request_id] = first, pages
        return len(known[1]) * self.block_size, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens: int) -> None:
        """The request has blocks now: what was found for it goes there in this step."""
        self._followed.setdefault(request.request_id, Followed(request))
        first, pages = self._found.pop(request.request_id, (0, []))
        count = num_external_tokens // self.block_size
        places = blocks.get_block_ids()[0][first : first + count]
        self._work.load += zip(places, pages[:count], strict=True)

    def build_connector_meta(self, scheduler_output) -> Work:
        """All that the worker has to load and to save in this step."""
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            followed = self._followed[new.req_id]
            followed.blocks = list(new.block_ids[0])
            followed.kept = new.num_computed_tokens // self.block_size
            self._plan_saves(followed, new.num_computed_tokens + scheduled[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            followed = self._followed[name]
            if name in cached.resumed_req_ids:
                followed.blocks = []
            followed.blocks += blocks[0] if blocks is not None else []
            self._plan_saves(followed, computed + scheduled[name])
        work, self._work = self._work, Work()
        return work

    def request_finished(self, request, block_ids) -> tuple[bool, None]:
        """Nothing is left to do: pages are saved in the step that computes them."""
        self._followed.pop(request.request_id, None)
        self._found.pop(request.request_id, None)
        return False, None

    def _plan_saves(self, followed: Followed, computed: int) -> None:
        """Save the blocks that are full after this step and whose text is final (drafts have no hash yet)."""
        if _foreign(followed.request):
            return
        keys = self._keys(followed.request, followed.kept, computed // self.block_size)
        self._work.save += zip(followed.blocks[followed.kept :], keys, strict=False)
        followed.kept += len(keys)

    def _keys(self, request, first: int, end: int) -> list[bytes]:
        """What the pages of a request's blocks first … end − 1 are called, as far as their text is known."""
        return [page_key(self.layout, digest) for digest in request.block_hashes[first:end]]

    def _read(self, keys: Sequence[bytes]) -> list[Page]:
        """Pages up to the first that cannot be had. Asks for 1, 2, 4, …: a miss costs little, a hit few calls."""
        pages: list[Page] = []
        count = 1
        while len(pages) < len(keys):
            asked = keys[len(pages) : len(pages) + count]
            got = self._safely("read", lambda asked=asked: self.store.get_many(asked)) or [None]
            if None in got:
                return pages + got[: got.index(None)]
            pages += got
            count *= 2
        return pages

    # The worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the tensors of all layers. ValueError if they are not laid out as expected."""
        if set(kv_caches) != set(self.layers):
            raise ValueError(f"pages have the layers {self.layers}, vLLM has {sorted(kv_caches)}")
        self._caches = [kv_caches[name] for name in self.layers]
        size, heads, head_dim = self.layout.block_size, self.layout.num_kv_heads, self.layout.head_dim
        for name, cache in zip(self.layers, self._caches, strict=True):
            expected = (heads, size, 2 * head_dim)
            if (
                tuple(cache.shape[1:]) != expected
                or cache.device.type != "cpu"
                or not cache[0].is_contiguous()
            ):
                raise ValueError(
                    f"{name}: blocks must be contiguous {expected} on a CPU, got {tuple(cache.shape[1:])} on "
                    f"{cache.device}"
                )
        prove_layout(self._caches[0], self._vllm_config.cache_config.cache_dtype)

    def start_load_kv(self, forward_context, **options) -> None:
        """Put the pages of this step where they belong, before anything is computed."""
        for block, page in self._get_connector_metadata().load:
            for layer, cache in enumerate(self._caches):
                from_page(page["keys"][layer], page["values"][layer], as_numpy(cache[block]))
            self.loaded += 1

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are there since `start_load_kv`."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata, **options) -> None:
        """Pages hold all layers: `wait_for_save` takes them when the step is computed."""

    def wait_for_save(self) -> None:
        """Store the blocks that this step filled."""
        save = self._get_connector_metadata().save
        if save:
            pages = ((key, self._page(block)) for block, key in save)
            self.saved += self._safely("write", lambda: self.store.put_many(pages)) or 0

    def _page(self, block: int) -> Page:
        parts = [to_page(as_numpy(cache[block])) for cache in self._caches]
        keys, values = zip(*parts, strict=True)
        return {"keys": np.stack(keys), "values": np.stack(values)}

    def _safely(self, what: str, call):
        """What the store says; None, and a line in the log, if it fails: the engine then does without it awhile."""
        if time.monotonic() < self._paused_until:
            return None
        try:
            return call()
        except Exception as error:  # whatever a disk or a server may say
            self.failed += 1
            self._paused_until = time.monotonic() + PAUSE
            log.warning("the page store cannot %s: %r", what, error)
            return None


def _foreign(request) -> bool:
    """Whether its keys and values depend on weights that only this process knows by their name."""
    return request.lora_request is not None


# What pages look like, and whose they are


def _attention(vllm_config, kv_cache_config) -> tuple[list[str], FullAttentionSpec]:
    """The layers in their order, and what each keeps. ValueError for what cannot be moved."""
    ranks = vllm_config.parallel_config.world_size
    if ranks != 1:
        raise ValueError(f"each of {ranks} ranks has a part of every page: only 1 is supported")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        raise ValueError(f"all layers must keep full attention in one group, got {len(groups)} of {kinds}")
    spec = groups[0].kv_cache_spec
    if spec.dtype not in DTYPES or spec.head_size_v != spec.head_size:
        raise ValueError(f"keys and values must be {sorted(DTYPES.values())} of one size, got {spec}")
    return list(groups[0].layer_names), spec


def layout_of(spec: FullAttentionSpec, num_layers: int, model: str) -> Layout:
    """The layout of the pages: what a `KVStorage` of ours has for the same model."""
    storage = KVStorage(num_layers, 1, spec.block_size, spec.num_kv_heads, spec.head_size, DTYPES[spec.dtype])
    return Layout.of(storage, model)


def open_store(where: str, layout: Layout):
    """The pages in a folder, or in the Redis behind a URL."""
    if where.startswith(("redis://", "rediss://", "unix://")):
        from ...store.redis import RedisPageStore

        return RedisPageStore(where, layout)
    return PageStore(where, layout)


def model_identity(vllm_config) -> str:
    """Words that tell this model's keys and values from all others, equal in every process that serves it.

    Covers the name, revision and configuration, types, vLLM's way of hashing, and samples of the files of weights
    where the model is a folder.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    folder = Path(model.model) if Path(model.model).is_dir() else None
    ignored = ("_name_or_path", "transformers_version")
    config = {name: value for name, value in model.hf_config.to_dict().items() if name not in ignored}
    digest = hashlib.sha256(
        tagged(
            model=None if folder else str(model.model),  # a folder may be moved
            revision=model.revision,
            config=json.dumps(config, sort_keys=True, default=str),
            dtype=str(model.dtype),
            cache_dtype=str(cache.cache_dtype),
            quantization=model.quantization and str(model.quantization),
            hashed_by=str(cache.prefix_caching_hash_algo),
            load_format=str(vllm_config.load_config.load_format),
        )
    )
    for path in sorted(folder.iterdir()) if folder else ():
        if path.suffix in (".safetensors", ".bin", ".pt", ".gguf"):
            digest.update(tagged(name=path.name, weights=_sampled(path)))
    return f"vllm sha256:{digest.hexdigest()[:32]}"


def _sampled(path: Path) -> bytes:
    """A digest of a file's size and of pieces all over it: whole files of weights would take minutes."""
    size = path.stat().st_size
    digest = hashlib.sha256(b"%d" % size)
    with open(path, "rb") as file:
        for i in range(SAMPLES):
            file.seek(i * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()


# vLLM's tensors


def as_numpy(block: torch.Tensor) -> np.ndarray:
    """The same memory for NumPy; bfloat16 as its bits."""
    if block.dtype == torch.bfloat16:
        return block.view(torch.int16).numpy().view(np.uint16)
    return block.numpy()


def prove_layout(cache: torch.Tensor, cache_dtype: str) -> None:
    """Let vLLM's own kernel write known keys and values, and find them with `to_page`.

    The layout is nobody's promise: it depends on vLLM's version and on the processor.

    Raises: ValueError if they are elsewhere.
    """
    heads, size, width = cache.shape[1:]
    shape = (size, heads, width // 2)
    numbers = torch.arange(1, 1 + size * heads * width // 2).reshape(shape)
    keys, values = (numbers % 251).to(cache.dtype), (numbers % 241).to(cache.dtype)
    scratch = torch.zeros((1, *cache.shape[1:]), dtype=cache.dtype)
    halves = scratch.view(1, heads, 2 * size, width // 2).chunk(2, dim=2)
    isa = _get_attn_isa(cache.dtype, size, width // 2, cache_dtype)
    ops.cpu_attn_reshape_and_cache(keys, values, *halves, torch.arange(size), isa)
    for ours, theirs in zip(to_page(as_numpy(scratch[0])), (keys, values), strict=True):
        if not np.array_equal(ours, as_numpy(theirs)):
            raise ValueError(f"vLLM lays out its cache in another way here ({isa}, {cache.dtype})")
