"""A block of vLLM's CPU cache as one of our pages, and back; and what the page is called.

Exact: numbers move, none is computed.

vLLM keeps a layer as [num_blocks, num_kv_heads, block_size, 2 × head_dim], but the keys of a block are transposed:
per head, first head_dim rows of block_size numbers (the keys), then block_size rows of head_dim (the values). Ours
are token-major, [block_size, num_kv_heads, head_dim] each.
"""

import hashlib

import numpy as np

from ...store.record import Layout


def page_key(layout: Layout, block_hash: bytes) -> bytes:
    """The key of a page: 32 bytes that stand for its text, all before it, the model and the layout.

    Args: block_hash: vLLM's, of the block and all before it; also of its salt, images and adapter.
    """
    return hashlib.sha256(layout.digest + block_hash).digest()


def to_page(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of one layer, each [block_size, num_kv_heads, head_dim]: views of vLLM's block.

    Args: block: [num_kv_heads, block_size, 2 * head_dim], contiguous.
    """
    heads, size, width = block.shape
    halves = block.reshape(heads, 2, size * width // 2)
    keys = halves[:, 0].reshape(heads, width // 2, size).transpose(2, 0, 1)
    values = halves[:, 1].reshape(heads, size, width // 2).transpose(1, 0, 2)
    return keys, values


def from_page(keys: np.ndarray, values: np.ndarray, block: np.ndarray) -> None:
    """Write keys and values, each [block_size, num_kv_heads, head_dim], into vLLM's block of one layer."""
    their_keys, their_values = to_page(block)
    their_keys[...], their_values[...] = keys, values
