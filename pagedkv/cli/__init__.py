"""The command `pagedkv`: one module per command, each with `add` (its options) and `run`."""

import os
import sys

from .. import __version__
from . import bench, cluster_demo, generate, grade, lab, replay, student, worker
from .common import FAILED, Parser

COMMANDS = (lab, generate, bench, replay, worker, cluster_demo, student, grade)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 if it could not be finished, 2 for a wrong request."""
    parser = Parser(
        prog="pagedkv", description="PagedAttention's KV cache in NumPy, and the course that builds it."
    )
    parser.add_argument("--version", action="version", version=f"pagedkv {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    options = parser.parse_args(arguments)
    try:
        code = options.run(options)
        sys.stdout.flush()  # a closed pipe shows here, not after main
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `pagedkv generate … | head`: whoever read has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
