"""`pagedkv lab`: the course in JupyterLab."""

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from .common import FAILED, complain


def add(commands) -> None:
    parser = commands.add_parser(
        "lab",
        help="open the course in JupyterLab",
        description="Opens the course in JupyterLab: the copies without solutions, if there are any.",
    )
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="where the lessons are (default: the checkout's notebooks)"
    )
    parser.add_argument(
        "--solutions", action="store_true", help="open the lessons themselves, with outputs and solutions"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    folder = options.folder or lessons_folder()
    if folder is None or not folder.is_dir():
        where = folder or "a folder `notebooks`, here or beside the package"
        return complain(
            "lab", f"no lessons found: looked for {where}; clone the repository, or say --folder DIR", FAILED
        )
    if importlib.util.find_spec("jupyterlab") is None:
        return complain("lab", 'JupyterLab is not installed: pip install "pagedkv[course]"', FAILED)
    places = [folder] if options.solutions else [folder / "exercises", folder]
    starts = [place / "00_start_here.ipynb" for place in places]
    start = next((path for path in starts if path.exists()), folder)
    root = (
        [f"--ServerApp.root_dir={folder}"] if start.parent.parent == folder else []
    )  # the lessons stay in sight
    root += ["--allow-root"] if getattr(os, "geteuid", lambda: 1)() == 0 else []  # as in a container
    return subprocess.call([sys.executable, "-m", "jupyterlab", *root, str(start)])


def lessons_folder() -> Path | None:
    """The notebooks of the checkout that this package was installed from, or of the current folder."""
    places = [Path(__file__).parents[2] / "notebooks", Path("notebooks")]
    return next((place for place in places if place.is_dir()), None)
