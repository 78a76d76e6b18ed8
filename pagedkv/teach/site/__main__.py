"""The command line: `python -m pagedkv.teach.site [--out FOLDER]`, from the checkout's folder."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .build import build


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the site; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pagedkv.teach.site", description="Write the course as pages."
    )
    parser.add_argument("--out", type=Path, default=Path("site"), help="the folder to write (default: site)")
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="LESSON", help="lessons to write, such as 04_copy_on_write"
    )
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    try:
        files = build(Path.cwd(), options.out, options.only)
    except (ValueError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in files)
    print(f"{options.out}: {len(files)} files, {size / 1e6:.1f} MB, {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
