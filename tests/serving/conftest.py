import pytest
from needs import ROOT

from pagedkv.lm import Llama


@pytest.fixture(scope="session")
def model():
    """The model that ships with the package."""
    return Llama.load()


@pytest.fixture(scope="module")
def shared_traces():
    """Traces of real traffic, which lie beside some checkouts; never required."""
    folder = ROOT.parent / "shared" / "data" / "traces"
    if not folder.is_dir():
        pytest.skip("no ../shared/data/traces beside this checkout (its data is not part of the project)")
    return folder


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Matrices of this size take ten times as long on two threads, which mostly wait for each other."""
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        yield
    else:
        with threadpool_limits(1):
            yield
