"""For pytest over the lessons: leave out those that need packages which are not installed, and say so.

With PAGEDKV_STRICT=1 nothing is left out; such a lesson then fails at its import.
"""

import os

import nbformat
import pytest

from pagedkv.teach.notebooks import missing_packages

LEFT_OUT = pytest.StashKey[list]()


def pytest_collection_modifyitems(config, items):
    if os.environ.get("PAGEDKV_STRICT") == "1":
        return
    reasons = {}
    for path in {item.path for item in items if item.path.suffix == ".ipynb"}:
        if absent := missing_packages(nbformat.read(path, as_version=4).metadata.get("pagedkv", {})):
            reasons[path] = f"{path.name} left out: it needs {absent}"
    left_out = [item for item in items if item.path in reasons]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.path not in reasons]
        config.stash[LEFT_OUT] = sorted(reasons.values())


def pytest_terminal_summary(terminalreporter, config):
    for reason in config.stash.get(LEFT_OUT, []):
        terminalreporter.write_line(reason)
