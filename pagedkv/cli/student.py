"""`pagedkv student`: copies of the lessons without the solutions."""

import argparse
from pathlib import Path

from .common import FAILED, complain, number
from .lab import lessons_folder


def add(commands) -> None:
    parser = commands.add_parser(
        "student",
        help="write copies of the lessons without the solutions",
        description="Writes a copy of every lesson to work in: without solutions and outputs, with a name field.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder for the copies")
    parser.add_argument(
        "--variant",
        type=number(0),
        default=0,
        metavar="N",
        help="for graded work: other texts, block sizes and lengths in the questions by hand (0: the lessons' own)",
    )
    parser.add_argument(
        "--nbgrader",
        action="store_true",
        help="write the teacher's version for nbgrader's source folder instead: with the solutions, marked",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace copies that are there and may have been worked in"
    )
    parser.add_argument(
        "--lessons",
        type=Path,
        metavar="DIR",
        help="where the lessons are (default: the checkout's notebooks)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from ..teach import student

    folder = options.lessons or lessons_folder()
    if folder is None or not any(folder.glob("*.ipynb")):
        where = folder or "a folder `notebooks`, here or beside the package"
        return complain("student", f"no lessons found: looked for {where}; say --lessons DIR", FAILED)
    if options.out.resolve() == folder.resolve():
        return complain("student", f"{options.out} holds the lessons themselves: say another folder", FAILED)
    make = student.nbgrader_source if options.nbgrader else student.student_copy
    try:
        written = student.write_copies(
            folder, options.out, variant=options.variant, over=options.force, make=make
        )
    except FileExistsError as error:
        return complain("student", f"{error}; nothing was written (--force replaces them)", FAILED)
    except (OSError, ImportError) as error:
        return complain("student", error, FAILED)
    print(f"{len(written)} copies written to {options.out}")
    return 0
