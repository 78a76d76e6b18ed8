"""Fixtures and settings for all tests; what a test may need from outside is in needs.py."""

import hypothesis
import pytest
from needs import ROOT, STRESS, need_module, need_program

# The whole number of examples takes minutes: `make stress` runs it, every other run a tenth.
CI = hypothesis.settings(max_examples=50, stateful_step_count=30, deadline=None, derandomize=True)
hypothesis.settings.register_profile("ci", CI)
hypothesis.settings.register_profile("stress", max_examples=500, stateful_step_count=50, deadline=None)
FIND_ONLY = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # no smaller example of what was found
hypothesis.settings.register_profile("mutants", CI, phases=FIND_ONLY)
hypothesis.settings.load_profile("stress" if STRESS else "ci")


@pytest.fixture(autouse=True)
def _needed_by_marker(request):
    """Tests marked torch or browser skip (strictly: fail) where those are absent."""
    if request.node.get_closest_marker("torch"):
        need_module("torch", "train")
    if request.node.get_closest_marker("browser"):
        need_module("playwright.sync_api", "test")
        need_program("chromium")


@pytest.fixture
def shared():
    """The folder with traces, texts and golden vectors that lies beside some checkouts; never required."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("no ../shared folder beside this checkout (its data is not part of the project)")
    return folder
