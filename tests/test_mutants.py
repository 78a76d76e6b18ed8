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
    "tests/test_threads.py",
    "tests/test_states.py",
]
SETTINGS = f"""
[tool.mutmut]
source_paths = ["pagedkv"]
only_mutate = {MUTATED}
also_copy = ["notebooks"]
pytest_add_cli_args = ["-p", "no:nbval", "-o", "addopts=--import-mode=importlib"]
pytest_add_cli_args_test_selection = {TESTS}
"""
REASONS = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text("utf-8"))["reason"]
SURVIVED = {"survived", "no tests"}
KILLED = {"killed", "timeout", "segfault"}


def reason_for(diff):
    """Why a survivor is no hole in the tests: the first reason whose pattern the changed lines match."""
    lines = [line for line in diff.splitlines() if re.match(r"[-+](?![-+])", line)]
    for reason in REASONS:
        if re.search(reason["pattern"], "\n".join(lines)):
            return reason["why"]
    return "not judged yet"


@pytest.mark.skipif(not STRESS, reason="takes most of an hour: make stress")
def test_nine_in_ten_mutants_are_killed(tmp_path):
    need_module("mutmut", "stress")
    tree = tmp_path / "tree"
    kept_out = shutil.ignore_patterns(".*", "__pycache__", "mutants", "site")
    shutil.copytree(ROOT, tree, ignore=kept_out)
    with (tree / "pyproject.toml").open("a", encoding="utf-8") as settings:
        settings.write(SETTINGS)
    environment = {name: value for name, value in os.environ.items() if name != "PAGEDKV_STRESS"}
    environment |= {"PYTHONPATH": str(tree / "mutants"), "OPENBLAS_NUM_THREADS": "1"}

    def mutmut(*arguments):
        command = [sys.executable, "-m", "mutmut", *arguments]
        return subprocess.run(command, cwd=tree, env=environment, text=True, capture_output=True)

    ran = mutmut("run", "--max-children", str(os.cpu_count()))
    verdicts = dict(re.findall(r"^ *(\S+): (.+)$", mutmut("results", "--all", "true").stdout, re.MULTILINE))
    counts = collections.Counter(verdicts.values())
    assert counts and set(counts) <= SURVIVED | KILLED, (
        f"{dict(counts)}\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"
    )
    by_reason = collections.defaultdict(list)
    for name, verdict in verdicts.items():
        if verdict in SURVIVED:
            diff = mutmut("show", name).stdout
            by_reason[reason_for(diff)].append(diff)
    for why, diffs in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        print(f"\n{len(diffs)} survived: {why}")
        if why == "not judged yet":
            print(*diffs, sep="\n")
    killed = sum(counts[verdict] for verdict in KILLED)
    print(f"\n{killed} of {counts.total()} mutants killed, {killed / counts.total():.1%}: {dict(counts)}")
    assert killed >= 0.9 * counts.total()
