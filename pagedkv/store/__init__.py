"""Caches that outlive their process: pages as checked records, snapshots of whole caches, and recovery.

In reading order: `record` (one page as bytes), `tables` (what says whose they are), `files` and `folder` (where they
lie), `redis` (how they travel), `saving`, `recovery` and `loading`.
"""

from .files import SaveFailed
from .folder import PageStore
from .loading import load, recover
from .record import DamagedPage, Layout
from .redis import RedisPageStore
from .saving import Loss, Report, model_name, save
from .tables import SnapshotError

__all__ = [
    "Layout",
    "DamagedPage",
    "PageStore",
    "RedisPageStore",
    "SnapshotError",
    "SaveFailed",
    "save",
    "load",
    "recover",
    "Report",
    "Loss",
    "model_name",
]
