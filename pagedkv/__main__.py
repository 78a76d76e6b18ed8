"""One command that shows the whole engine: two sequences, a third that shares, one copy, one decode step."""

import numpy as np

from . import PagedKVCache, dense_attention

HEADS, HEAD_DIM, BLOCK_SIZE = 2, 64, 4


def main() -> None:
    random = np.random.default_rng(0)

    def vectors(n: int) -> np.ndarray:
        return random.standard_normal((1, n, HEADS, HEAD_DIM), np.float32)  # [layers, n, heads, head_dim]

    def show(what: str) -> None:
        tables = "  ".join(f"{s} {cache.block_tables([s])[0].tolist()}" for s in cache.seq_ids)
        print(f"{what:<44} {tables:<33} free {cache.num_free}")

    cache = PagedKVCache(8, BLOCK_SIZE, HEADS, HEAD_DIM)
    for seq in ("A", "B"):
        cache.add(seq)
        cache.append(seq, vectors(5), vectors(5), 5)
    show("A and B hold five tokens each")

    cache.fork("A", ["C"])
    cache.truncate("C", 3)
    show("C shares A's first three tokens")
    owners = cache.manager.allocator.ref_counts.tolist()
    print(f"{'':<44} owners of the blocks {owners}")

    copies = cache.append("C", vectors(1), vectors(1)).copies
    show("C writes a fourth token into a shared block")
    source, target, filled = copies[0]
    print(f"{'':<44} one copy: block {source} to {target}, {filled} filled slots")

    batch = ["A", "B", "C"]
    query = random.standard_normal((len(batch), HEADS, HEAD_DIM), np.float32)
    out = cache.attend(0, query, cache.plan(batch))  # [sequences, heads, head_dim]
    dense = [dense_attention(q[None], *cache.gather(0, seq))[0] for q, seq in zip(query, batch, strict=True)]
    print(
        f"one decode step for the three sequences      output {out.shape}, dense attention agrees: ", end=""
    )
    print(np.allclose(out, dense, atol=1e-6))

    cache.free(batch)
    show("all three leave")


if __name__ == "__main__":
    main()
