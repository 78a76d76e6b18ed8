"""Caches that outlive their process: pages as checked records, snapshots of whole caches, and recovery.

In reading order: `record` (one page as bytes), `tables` (what says whose they are), `files` and `folder` (where they
stand), `snapshot` (save, load, recover). One page is Kwon et al. 2023's KV block, of all layers.
"""

from .files import SaveFailed
from .folder import PageStore
from .record import DamagedPage, Layout
from .snapshot import Loss, Report, load, model_name, recover, save
from .tables import SnapshotError

__all__ = [
    "Layout",
    "DamagedPage",
    "PageStore",
    "SnapshotError",
    "SaveFailed",
    "save",
    "load",
    "recover",
    "Report",
    "Loss",
    "model_name",
]
