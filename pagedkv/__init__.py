"""A paged KV cache for language models, built lesson by lesson in the notebooks beside it."""

__version__ = "0.1.0"
