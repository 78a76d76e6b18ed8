import pytest

from pagedkv.lm import Llama


@pytest.fixture(scope="session")
def model():
    """The model that ships with the package."""
    return Llama.load()
