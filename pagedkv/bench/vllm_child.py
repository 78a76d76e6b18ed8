"""vLLM's CPU kernel, run by a Python that has vLLM: `python vllm_child.py FOLDER THREADS`.

Reads the arrays that `vllm_peer.py` left in FOLDER, then obeys one line of standard input at a time, and answers
each with one line: `run LAYER` (the result goes to FOLDER/out.npy) or `time LAYER …` (seconds of these calls).
Imports nothing of pagedkv, which need not be installed there. Written for vLLM 0.32.
"""

import os
import sys
import time

BLOCK_SIZE = 128  # what vLLM takes on a CPU if not asked


def main(folder: str, threads: int) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to standard output, too
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import numpy as np
    import torch

    torch.set_num_threads(threads)
    query, keys, values, lengths = (
        np.load(f"{folder}/{n}.npy") for n in ("query", "keys", "values", "lengths")
    )
    call = kernel(query, keys, values, lengths)
    print("ready", file=answers)
    for line in sys.stdin:
        what, *layers = line.split()
        started = time.perf_counter()
        for layer in layers:
            out = call(int(layer))
        seconds = time.perf_counter() - started
        if what == "run":
            np.save(f"{folder}/out.npy", out.numpy())
        print(seconds, file=answers)


def kernel(query, keys, values, lengths, seed=0):
    """Fill vLLM's cache with its own function, block ids shuffled, and return a call for one layer.

    Args: query: [batch, q_heads, head_dim]; keys, values: [layers, batch, kv_heads, longest, head_dim].
    """
    import numpy as np
    import torch
    import vllm._custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    num_layers, batch, kv_heads, _, head_dim = keys.shape
    isa = _get_attn_isa(torch.float32, BLOCK_SIZE, head_dim, "auto")
    counts = -(-lengths // BLOCK_SIZE)
    ids = np.random.default_rng(seed).permutation(counts.sum() + 8).astype(np.int32)
    table = np.zeros((batch, counts.max()), np.int32)
    for row, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
        table[row, :count] = ids[end - count : end]
    caches = []
    for layer in range(num_layers):
        pages = torch.zeros(len(ids), kv_heads, BLOCK_SIZE, 2 * head_dim)
        halves = pages.view(len(ids), kv_heads, 2 * BLOCK_SIZE, head_dim).chunk(2, dim=2)  # keys, values
        for row, length in enumerate(lengths):
            positions = np.arange(length)
            slots = table[row, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
            new = (torch.from_numpy(a[layer, row, :, :length].swapaxes(0, 1).copy()) for a in (keys, values))
            ops.cpu_attn_reshape_and_cache(*new, *halves, torch.from_numpy(slots), isa)
        caches.append(halves)
    q, out = torch.from_numpy(query), torch.empty(query.shape)
    starts = torch.arange(batch + 1, dtype=torch.int32)
    filled, tables = torch.from_numpy(lengths.astype(np.int32)), torch.from_numpy(table)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=batch,
        num_heads=query.shape[1],
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        seq_lens=filled,
        dtype=torch.float32,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
    )

    def call(layer: int):
        ops.cpu_attention_with_kv_cache(
            query=q,
            key_cache=caches[layer][0],
            value_cache=caches[layer][1],
            output=out,
            query_start_loc=starts,
            seq_lens=filled,
            scale=head_dim**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=tables,
            softcap=0.0,
            scheduler_metadata=plan,
            s_aux=None,
        )
        return out

    return call


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its modules are not what vLLM means by their names
    main(sys.argv[1], int(sys.argv[2]))
