"""For pytest over the lessons: leave out those whose extra is not installed, and say so.

With PAGEDKV_STRICT=1 nothing is left out; such a lesson then fails at its import.
"""

import os
from importlib import metadata

import nbformat
import pytest
from packaging.requirements import Requirement

LEFT_OUT = pytest.StashKey[list]()


def missing_packages(extra):
    """The packages of pagedkv's extra that are absent here."""
    found = []
    for line in metadata.requires("pagedkv") or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            try:
                metadata.version(requirement.name)
            except metadata.PackageNotFoundError:
                found.append(requirement.name)
    return found


def pytest_collection_modifyitems(config, items):
    if os.environ.get("PAGEDKV_STRICT") == "1":
        return
    reasons = {}
    for path in {item.path for item in items if item.path.suffix == ".ipynb"}:
        facts = nbformat.read(path, as_version=4).metadata.get("pagedkv", {})
        absent = [extra for extra in facts.get("extras", []) if missing_packages(extra)]
        if absent:
            reasons[path] = f'{path.name} left out: pip install "pagedkv[{",".join(absent)}]"'
    left_out = [item for item in items if item.path in reasons]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.path not in reasons]
        config.stash[LEFT_OUT] = sorted(reasons.values())


def pytest_terminal_summary(terminalreporter, config):
    for reason in config.stash.get(LEFT_OUT, []):
        terminalreporter.write_line(reason)
