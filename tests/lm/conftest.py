import numpy as np
import pytest

from pagedkv.lm import Llama


@pytest.fixture(scope="session")
def model():
    """The model that ships with the package."""
    return Llama.load()


@pytest.fixture(scope="session")
def speech(model):
    """Tokens of a text like those that the model was trained on, longer than its context."""
    lines = "ROMEO:\nGood night, good night! parting is such sweet sorrow,\nThat I shall say good night.\n\n"
    return np.tile(model.tokenizer.encode(lines), 8)
