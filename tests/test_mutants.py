"""Mutation run over the two files that may never miscount: nine in ten small changes must fail a test or a check.

mutmut changes one expression at a time (an operator, a number, a text, an argument) and runs the tests that reach
it, among them the course's own checks on the package's classes. It runs in a copy of the tree and takes the better
part of an hour on two processors, so only `make stress` does it. What survived is printed with the reason from
mutants.toml, or as not judged yet.
"""

import collections
import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from needs import ROOT, STRESS, need_module

MUTATED = ["pagedkv/allocator.py", "pagedkv/manager.py"]
TESTS = [
    "tests/test_allocator.py",
    "tests/test_manager.py",
    "tests/test_prefix_cache.py",
    "tests/conformance",
    "tests/test_cache.py",
    "tests/teach/test_planted.py::test_the_package_itself_behaves_as_the_check_demands",
    "tests/teach/test_pages.py",
    "tests/test_threads.py",
    "tests/test_states.py",
]
SETTINGS = f"""
[tool.mutmut]
source_paths = ["pagedkv"]
only_mutate = {MUTATED}
also_copy = ["notebooks"]
pytest_add_cli_args = ["-p", "no:nbval", "--hypothesis-profile=mutants", "-o", "addopts=--import-mode=importlib"]
pytest_add_cli_args_test_selection = {TESTS}
"""
REASONS = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text("utf-8"))["reason"]
SURVIVED = {"survived", "no tests"}
KILLED = {"killed", "timeout", "segfault"}


def reason_for(diff):
    """Why a survivor is no hole in the tests: the first reason whose pattern the changed lines match, or None."""
    lines = [line for line in diff.splitlines() if re.match(r"[-+](?![-+])", line)]
    return next((reason for reason in REASONS if re.search(reason["pattern"], "\n".join(lines))), None)


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("for a, b in zip(x, y, strict=True):", "for a, b in zip(x, y, ):", "second guard"),
        ("order = np.array(queue, np.int32)", "order = np.array(queue, None)", "same numbers"),
        ('tokens = _one_each("tokens", tokens, ids)', 'tokens = _one_each("TOKENS", tokens, ids)', "wording"),
        ("if needed > free:", "if needed >= free:", None),
        (
            "[n for n in zip(x, y, strict=True) if n > 0]",
            "[n for n in zip(x, y, strict=True) if n >= 0]",
            None,
        ),
        ('n = whole_number("n", n, minimum=1)', 'n = whole_number("n", n, )', None),
        ('told = {"new": new}', 'told = {"XXnewXX": new}', None),
    ],
)
def test_a_survivor_is_judged_by_the_lines_that_changed(before, after, why):
    reason = reason_for(f"--- a.py\n+++ a.py\n@@ -1 +1 @@\n-    {before}\n+    {after}\n")
    assert reason is None if why is None else why in reason["why"]


@pytest.mark.skipif(not STRESS, reason="takes most of an hour: make stress")
def test_nine_in_ten_mutants_are_killed(tmp_path):
    need_module("mutmut", "stress")
    tree = tmp_path / "tree"
    kept_out = shutil.ignore_patterns(".*", "__pycache__", "mutants")
    shutil.copytree(ROOT, tree, ignore=kept_out)
    with (tree / "pyproject.toml").open("a", encoding="utf-8") as settings:
        settings.write(SETTINGS)
    mutants = tree / "mutants"
    mutants.mkdir()  # it writes there, and a path that did not exist would never be looked into
    environment = {name: value for name, value in os.environ.items() if name != "PAGEDKV_STRESS"}
    environment |= {"PYTHONPATH": str(mutants), "OPENBLAS_NUM_THREADS": "1"}

    def mutmut(*arguments):
        command = [sys.executable, "-m", "mutmut", *arguments]
        return subprocess.run(command, cwd=tree, env=environment, text=True, capture_output=True)

    ran = mutmut("run", "--max-children", str(os.cpu_count()))
    verdicts = dict(re.findall(r"^ *(\S+): (.+)$", mutmut("results", "--all", "true").stdout, re.MULTILINE))
    counts = collections.Counter(verdicts.values())
    assert counts and set(counts) <= SURVIVED | KILLED, (
        f"{dict(counts)}\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"
    )
    survivors, same = collections.defaultdict(list), 0
    for name, verdict in verdicts.items():
        if verdict in SURVIVED:
            diff = mutmut("show", name).stdout
            reason = reason_for(diff) or {"why": "not judged yet"}
            survivors[reason["why"]].append(diff)
            same += reason.get("same", False)
    for why, diffs in sorted(survivors.items(), key=lambda item: -len(item[1])):
        print(f"\n{len(diffs)} survived: {why}", *diffs, sep="\n")
    killed = sum(counts[verdict] for verdict in KILLED)
    counted = counts.total() - same
    print(
        f"\n{killed} of {counted} mutants killed, {killed / counted:.1%}; {same} more behave as the original does"
    )
    print(dict(counts))
    assert killed >= 0.9 * counted
