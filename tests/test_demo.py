"""`python -m pagedkv`: the one-command demo prints the counts that the text around it explains."""

import subprocess
import sys

EXPECTED = """\
A and B hold five tokens each                A [0, 1]  B [2, 3]                free 4
C shares A's first three tokens              A [0, 1]  B [2, 3]  C [0]         free 4
                                             owners of the blocks [2, 1, 1, 1, 0, 0, 0, 0]
C writes a fourth token into a shared block  A [0, 1]  B [2, 3]  C [4]         free 3
                                             one copy: block 0 to 4, 3 filled slots
one decode step for the three sequences      output (3, 2, 64), dense attention agrees: True
all three leave                                                                free 8
"""


def test_the_demo_prints_tables_owners_copies_and_free_blocks():
    done = subprocess.run([sys.executable, "-m", "pagedkv"], capture_output=True, text=True, encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.rstrip() for line in done.stdout.splitlines()] == EXPECTED.splitlines()
