"""Several processes over one pool of blocks: who owns what stands in Redis.

    manager = RedisBlockManager("redis://127.0.0.1:6379", "pool", num_blocks=512, block_size=16)   # the first worker
    manager = RedisBlockManager("redis://127.0.0.1:6379", "pool")                              # every other one

The methods, ids, order and errors are those of `BlockManager`; a step of a whole batch is one script on the
server, so it happens as a whole or not at all. What the server has acknowledged it may forget when it dies,
unless it runs with `appendonly yes` and `appendfsync always`.

In reading order: `manager` (who owns which block), `shared_memory` and `pages` (where its keys and values are),
`requests` and `worker` (processes that write texts over one pool).
"""

from .errors import CoordinatorError, LeaseLost, PoolLost, Unreachable
from .manager import Reclaimed, RedisBlockManager, Worker
from .pages import SharedCache
from .requests import RequestQueue, TextRequest
from .server import embedded_server
from .shared_memory import SharedStorage
from .worker import TextWorker, shared_cache

__all__ = [
    "RedisBlockManager",
    "Worker",
    "Reclaimed",
    "embedded_server",
    "SharedStorage",
    "SharedCache",
    "RequestQueue",
    "TextRequest",
    "TextWorker",
    "shared_cache",
    "CoordinatorError",
    "LeaseLost",
    "PoolLost",
    "Unreachable",
]
