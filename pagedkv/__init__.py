"""A paged KV cache for language models, built lesson by lesson in the notebooks beside it."""

from .allocator import BlockAllocator, Event, PoolExhausted
from .attention import dense_attention, merge, paged_attention
from .block_table import BlockTables, slots_of
from .cache import PagedKVCache
from .decode import AttentionPlan, StalePlan
from .manager import BlockManager, Reservation, Snapshot
from .storage import KVStorage

__version__ = "0.1.0"

__all__ = [
    "BlockAllocator",
    "PoolExhausted",
    "Event",
    "BlockTables",
    "slots_of",
    "KVStorage",
    "BlockManager",
    "Reservation",
    "Snapshot",
    "dense_attention",
    "paged_attention",
    "merge",
    "AttentionPlan",
    "StalePlan",
    "PagedKVCache",
]
