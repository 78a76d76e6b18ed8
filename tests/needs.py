"""What a test needs beyond the package: skip with the remedy where it is absent, fail in strict mode.

PAGEDKV_STRICT=1 (set by .ci/run) turns a skipped heavy part into a failure: there, everything has to run.
"""

import importlib
import os
import shutil
from pathlib import Path

import pytest

from pagedkv.teach.notebooks import missing_packages

STRICT = os.environ.get("PAGEDKV_STRICT") == "1"
STRESS = os.environ.get("PAGEDKV_STRESS") == "1"
ROOT = Path(__file__).resolve().parent.parent


def absent(reason):
    """Skip the running test, or fail it in strict mode."""
    if STRICT:
        pytest.fail(f"strict mode: {reason}", pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def need_module(name, extra):
    """Import and return module `name`; `extra` is the pagedkv extra that brings it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        absent(f'{name} is not installed: pip install "pagedkv[{extra}]"')


def need_program(name, how=None):
    """The path of program `name`; `how` says how to install it (default: Debian's package of that name)."""
    path = os.environ.get(name.upper()) or shutil.which(name)
    if path is None:
        absent(f"{name} is not on PATH: {how or f'apt-get install {name}'}")
    return path


def need_packages(lesson):
    """What a lesson (a notebook) says that it needs beyond the course."""
    if missing := missing_packages(lesson.metadata.get("pagedkv", {})):
        absent(f"{lesson.metadata['pagedkv']['title']!r} needs {missing}")
