"""Prefix reuse: numbers of vLLM V1's block manager, and public fault reports of engines in this field.

vLLM's ids begin at 1 (its block 0 is a null block), ours at 0: the numbers below are vLLM's minus one. Every step
runs on a poisoned cache beside a list model; what a slot holds depends on the whole text before it, so a wrong
hit is seen, and all invariants are checked after every operation (tests/pools.py).
"""

import hashlib
import struct
import subprocess
import sys

import pytest
from pools import Model, refused, state_of

from pagedkv import BlockManager, prefix_cache
from pagedkv.prefix_cache import PrefixStats


def model(num_blocks, block_size, **options):
    return Model(num_blocks, block_size, prefix_cache=True, **options)


def hit(pool, prompt, **options):
    """Tokens that a prompt would find; touches nothing."""
    before = pool.num_free
    seq = pool.add(tokens=prompt, **options)
    found = pool.match(seq)
    pool.free(seq)
    assert pool.num_free == before
    return found


# Hash chains


def chain(tokens, block_size=4, **options):
    """The digests of a prompt's full blocks."""
    text = prefix_cache.Text(prefix_cache.root_link(block_size, **options))
    text.announce(prefix_cache.token_bytes("tokens", tokens), block_size, hashed=True)
    return list(text.digests)


def test_a_block_has_no_digest_until_it_is_full():
    assert [len(chain(range(n))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_equal_tokens_give_equal_chains_and_one_changed_token_changes_every_later_digest():
    tokens = list(range(20))
    assert chain(tokens) == chain(tokens)
    other = chain([*tokens[:9], 99, *tokens[10:]])
    assert [a == b for a, b in zip(chain(tokens), other, strict=True)] == [True, True, False, False, False]
    assert len(set(chain([7] * 20))) == 5, "equal blocks at other places are other blocks"


@pytest.mark.parametrize(
    "other", [{"cache_salt": "x"}, {"adapter": "x"}, {"namespace": "x"}, {"block_size": 8}]
)
def test_another_salt_adapter_model_or_block_size_gives_another_chain(other):
    """B2: carried through every block of the chain, not only the first."""
    assert not set(chain(range(32))) & set(chain(range(32), **other))


def test_fields_cannot_be_taken_for_each_other():
    """B8: vllm#44701, an adapter that is named like another tenant's salt; and what runs together."""
    roots = [
        {"cache_salt": "s"},
        {"adapter": "s"},
        {"cache_salt": "s", "adapter": ""},
        {"cache_salt": "", "adapter": "s"},
        {"cache_salt": "sa", "adapter": "b"},
        {"cache_salt": "s", "adapter": "ab"},
        {"cache_salt": b"s"},
        {"cache_salt": ""},
        {},
        {"namespace": "s"},
        {"cache_salt": "4:adapter:str:1:s"},
    ]
    digests = [prefix_cache.root_link(4, **fields).digest for fields in roots]
    assert len(set(digests)) == len(digests)


def test_digests_are_equal_in_every_process():
    """B4: vllm PR#51875, a random seed per process. The number changes only with the format's version."""
    code = """from pagedkv.prefix_cache import block_digest, root_link, token_bytes
print(block_digest(root_link(4).digest, token_bytes("tokens", [1, 2])).hex())"""
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    root = hashlib.sha256(b"format:str:9:pagedkv-1namespace:bytes:0:block_size:int:1:4").digest()
    by_hand = hashlib.sha256(root + struct.pack("<2q", 1, 2)).hexdigest()
    assert runs == [by_hand] * 2
    assert by_hand == "5a170094e101abc32943bfd17ad38896fc64ebf34bfcd4f3770be859f29821b5"


def test_another_format_version_gives_other_digests(monkeypatch):
    before = chain(range(4))
    monkeypatch.setattr(prefix_cache, "FORMAT", "another")
    assert chain(range(4)) != before


# vLLM V1's numbers


def test_the_ten_block_example():
    """Blocks of 16: a second prompt finds 48 tokens; the queue after both are free; 160 tokens evict three blocks."""
    m = model(10, 16)
    common = list(range(48))
    m.start(common + [100 + i for i in range(7)], "req0")
    assert m.table("req0") == [0, 1, 2, 3] and m.pool.manager.is_cached(range(4)).tolist() == [1, 1, 1, 0]
    m.pool.add("req1", tokens=common + [200 + i for i in range(5)])
    m.tokens["req1"] = []
    assert m.pool.match("req1") == 48
    m.text("req1", common + [200 + i for i in range(5)])
    assert m.table("req1") == [0, 1, 2, 4]
    assert m.refs[:3] == [2, 2, 2] and m.num_free == 5
    m.free("req0"), m.free("req1")
    assert m.num_free == 10 and m.queue == [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]
    assert m.num_cached == 3
    m.start([1000 + i for i in range(160)], "req2")
    assert m.table("req2") == [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]
    m.free("req2")
    assert hit(m.pool, [*common, 0]) == 0, "all three were evicted"


def test_a_prompt_revives_what_it_begins_with():
    """87 tokens (6 blocks) and 48 others (3); after the first is free, its first 35 tokens find two blocks."""
    m = model(10, 16)
    first = list(range(87))
    m.start(first, "req0"), m.start([500 + i for i in range(48)], "req1")
    assert m.num_free == 1
    m.free("req0")
    assert m.queue == [5, 9, 4, 3, 2, 1, 0]
    m.start(first[:35], "req2")
    assert m.table("req2")[:2] == [0, 1] and m.queue == [9, 4, 3, 2]


def test_hits_count_as_needed_blocks_when_they_must_be_revived():
    """vLLM's test: 5 free, of which 3 are hits, and 3 new are needed: refused, and the hits stay as they are."""
    m = model(10, 16)
    common = list(range(48))
    m.start(common, "req0"), m.start([*common, *range(100, 148)], "req1")
    assert m.table("req1") == [0, 1, 2, 3, 4, 5]
    m.free("req1")
    m.start([300 + i for i in range(16)], "req2")
    assert m.refs[:6] == [1, 1, 1, 0, 0, 0]
    m.alloc(16 * 1, "filler")
    long = [*common, *range(100, 148), *range(700, 748)]
    seq = m.pool.add(tokens=long)
    m.tokens[seq] = []
    assert m.pool.match(seq) == 96 and m.pool.blocks_needed(seq, None) == 3 + 3 and m.num_free == 5
    with refused(m.pool) as caught:
        m.pool.extend(seq, None)
    assert (caught.value.requested, caught.value.available) == (6, 5)
    assert m.refs[:6] == [1, 1, 1, 0, 0, 0] and m.pool.match(seq) == 96


def test_the_script_of_vllm_0_32():
    """A recorded run of its KVCacheManager, 11 usable blocks of 4: hits, new blocks and the queue after each step."""
    m, a = model(11, 4), list(range(10))

    def start(seq, prompt, **options):
        m.pool.add(seq, tokens=prompt, **options)
        m.tokens[seq] = []
        found = m.pool.match(seq)
        m.text(seq, prompt)
        return found, [b + 1 for b in m.table(seq)]

    def queue():
        return [b + 1 for b in m.queue]

    assert start("A", a) == (0, [1, 2, 3])
    m.text("A", [*a, 10, 11, 12])
    assert queue() == [5, 6, 7, 8, 9, 10, 11]
    assert start("B", [*a[:8], 90, 91, 92]) == (8, [1, 2, 5])
    assert start("C", a[:8]) == (4, [1, 6]), "the last token is always computed, so a whole block"
    m.free("A"), m.free("C"), m.free("B")
    assert queue() == [5, 4, 7, 8, 9, 10, 11, 3, 6, 2, 1]
    assert start("D", a[:9]) == (8, [1, 2, 5])
    assert queue() == [4, 7, 8, 9, 10, 11, 3, 6]
    assert start("E", list(range(100, 120))) == (0, [4, 7, 8, 9, 10])
    assert queue() == [11, 3, 6]
    m.add("F")
    with refused(m.pool):
        m.pool.extend("F", 40)
    m.free(["D"]), m.free(["E"])
    assert start("G", a[:9], cache_salt="x")[0] == 0
    m.free("G"), m.free("F")
    assert m.pool.reset_prefix_cache()


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_a_fully_cached_prompt_still_computes_its_last_token(blocks, block_size):
    """B16: nano-vllm#144, vllm#8268, transformers PR#42094. A hit of k − 1 blocks, and the last is its own."""
    m = model(16, block_size)
    prompt = list(range(blocks * block_size))
    m.start(prompt, "a")
    reservation = m.pool.extend(m.pool.add("b", tokens=prompt), None)
    assert reservation.start.tolist() == [(blocks - 1) * block_size]
    assert m.table("b")[:-1] == m.table("a")[:-1] and m.table("b")[-1] != m.table("a")[-1]


@pytest.mark.parametrize("d", [0, 1, 3, 4, 5, 7, 8, 9, 11])
def test_sequences_that_part_at_token_d_share_the_full_blocks_before_it(d):
    m = model(16, 4)
    m.start(list(range(12)), "a")
    m.start([*range(d), *range(100, 112 - d)], "b")
    shared = [x for x, y in zip(m.table("a"), m.table("b"), strict=True) if x == y]
    assert len(shared) == d // 4


def test_hit_rate_over_the_last_five_requests():
    stats = PrefixStats(window=5)
    for observed, rate in (((1, 20, 9), 0.45), ((4, 80, 16), 0.25), ((1, 10, 2), 0.2)):
        stats.observe(*observed)
        assert stats.hit_rate == pytest.approx(rate)
    stats.reset()
    assert stats.hit_rate == 0
    assert (stats.total_requests, stats.total_queries, stats.total_hits) == (6, 110, 27), "totals go on"


def test_f1_the_rate_is_hits_per_token_asked_for():
    """vllm PR#14136: 10 tokens asked for, 4 found: 0.4, not 2.5."""
    m = model(8, 4)
    m.start(list(range(4)), "a")
    m.pool.prefix_stats.reset()
    m.start([*range(4), *range(50, 56)], "b")
    assert m.pool.prefix_stats.hit_rate == 0.4


def test_b20_reset_refuses_while_a_block_is_in_use():
    """vllm PR#12284, #28827."""
    m = model(4, 4)
    m.start(list(range(9)), "a")
    before = state_of(m.pool)
    assert m.pool.reset_prefix_cache() is False and state_of(m.pool) == before
    m.free("a")
    assert hit(m.pool, list(range(9))) == 8
    order = m.queue
    assert m.pool.reset_prefix_cache() is True
    assert hit(m.pool, list(range(9))) == 0 and m.num_cached == 0 and m.queue == order
    m.check()


def test_a_cropped_block_is_found_no_more():
    """Crop a block 8 → 6, append two others: neither in the cropped sequence nor after it is freed."""
    m = model(6, 4)
    old = list(range(8))
    m.start(old, "a")
    m.truncate("a", 6)
    assert hit(m.pool, [*old, 9]) == 4
    m.text("a", [*old[:6], 70, 71])
    assert hit(m.pool, [*old, 9]) == 4 and hit(m.pool, [*old[:6], 70, 71, 9]) == 8
    m.free("a")
    assert hit(m.pool, [*old, 9]) == 4 and hit(m.pool, [*old[:6], 70, 71, 9]) == 8


def test_a_block_that_another_owns_stays_findable_when_it_is_cropped():
    """The text is there as long as nobody writes into it; the last owner who does ends that."""
    m = model(8, 4)
    old = list(range(8))
    m.start(old, "a")
    m.fork("a", ["b"])
    m.truncate("b", 6)
    assert hit(m.pool, [*old, 9]) == 8
    m.free("a")
    m.truncate("b", 6)  # nothing to do: the block is still whole
    m.check()
    assert hit(m.pool, [*old, 9]) == 8
    assert m.text("b", [*old[:6], 70]).copies.tolist() == [], "alone again, b writes in place"
    assert hit(m.pool, [*old, 9]) == 4


def test_a_prompt_may_find_the_block_that_its_neighbour_is_about_to_write():
    """One batch: x would write in place into a block that y finds; y owns it first, so x copies."""
    m = model(8, 4)
    old = list(range(8))
    m.start(old, "a")
    m.fork("a", ["x"])
    m.truncate("x", 6)
    m.free("a")
    m.pool.add("y", tokens=[*old, 9])
    assert m.pool.blocks_needed(["x", "y"], [1, 1]) == 2
    reservation = m.pool.extend(["x", "y"], [1, 1])
    assert reservation.start.tolist() == [6, 8] and reservation.copies.tolist() == [[1, 2, 2]]
    assert m.pool.block_tables(["x", "y"]).tolist() == [[0, 2, -1], [0, 1, 3]]


# Fault reports: A, lifetime and order


def test_a4_hits_are_never_handed_out_as_new_blocks():
    """vllm PR#33775: the table names no block twice; where it does not fit, both hits stay cached."""
    prompt = list(range(1, 9))
    m = model(3, 4)
    m.start(prompt, "a")
    m.free("a")
    m.start([*prompt, 20, 21, 22, 23], "b")
    assert m.table("b") == [0, 1, 2]
    m = model(2, 4)
    m.start(prompt, "a")
    m.free("a")
    seq = m.pool.add("b", tokens=[*prompt, 20, 21, 22, 23])
    m.tokens["b"] = []
    with refused(m.pool):
        m.pool.extend("b", None)
    assert m.num_cached == 2 and m.pool.match(seq) == 8


def test_a5_a_reused_block_has_lost_its_old_text():
    """nano-vllm#163, vllm PR#4761, kvcached#362."""
    m = model(2, 4)
    m.start(list(range(1, 9)), "a")
    m.free("a")
    m.start([9, 10, 11], "b")
    assert m.table("b") == [1]
    assert hit(m.pool, list(range(1, 10))) == 4


def test_a8_a_sequence_is_evicted_from_its_tail_in_however_many_batches_it_leaves():
    """vllm#48489."""
    for cuts in ([], [4], [8], [8, 4]):
        m = model(3, 4)
        m.start(list(range(12)), "a")
        for cut in cuts:
            m.truncate("a", cut)
        m.free("a")
        assert m.queue == [2, 1, 0], cuts


def test_a14_cached_blocks_are_counted_once():
    """sglang#35270: cached + free + in use is the pool, also where sequences shared."""
    m = model(8, 4)
    m.start(list(range(12)), "a"), m.start([*range(8), *range(50, 54)], "b")
    assert m.table("b")[:2] == m.table("a")[:2]
    m.free("a"), m.free("b")
    assert (m.num_cached, m.num_free) == (4, 8)


def test_a16_only_the_shortfall_is_evicted():
    """sglang PR#32016: 4 plain and 6 cached are free, 5 are needed: one is evicted."""
    m = model(10, 4)
    m.start(list(range(24)), "a")
    m.free("a")
    assert (m.num_free - m.num_cached, m.num_cached) == (4, 6)
    m.alloc(20, "b")
    assert m.num_cached == 5 and hit(m.pool, [*range(24), 0]) == 20


def test_a22_of_two_equal_blocks_both_stay_and_the_oldest_is_found():
    """mini-sglang PR#142: no deduplication, so no table points to a block that was freed."""
    m = model(6, 4)
    prompt = list(range(8))
    m.pool.add("a", tokens=prompt), m.pool.add("b", tokens=prompt)
    m.tokens = {"a": [], "b": []}
    m.text("a", prompt, commit=False), m.text("b", prompt, commit=False)
    m.pool.commit(["a", "b"])
    assert (m.table("a"), m.table("b"), m.refs) == ([0, 1], [2, 3], [1, 1, 1, 1, 0, 0])
    m.pool.add("c", tokens=[*prompt, 9])
    m.tokens["c"] = []
    m.text("c", [*prompt, 9])
    assert m.table("c")[:2] == [0, 1]
    m.free("c"), m.free("a")
    m.alloc(16, "d")  # evicts what a left
    assert hit(m.pool, [*prompt, 9]) == 8, "b's blocks are found now"
    m.check()
    m.free("b"), m.free("d")
    m.alloc(24, "e")
    assert hit(m.pool, [*prompt, 9]) == 0


def test_a25_a_revived_block_is_owned_and_can_be_found_again():
    """nano-vllm 9fa256a, vmlx#198."""
    m = model(6, 4)
    prompt = list(range(9))
    m.start(prompt, "a")
    m.free("a")
    m.start(prompt, "b")
    assert m.table("b") == [0, 1, 2] and m.refs == [1, 1, 1, 0, 0, 0] and m.num_free == 3
    m.free("b")
    assert hit(m.pool, prompt) == 8


# B, identity and isolation


def test_b1_a_partly_filled_block_is_not_found():
    """vllm PR#5188."""
    m = model(6, 4)
    m.start(list(range(1, 7)), "a"), m.start(list(range(1, 8)), "b")
    assert (m.table("a"), m.table("b")) == ([0, 1], [0, 2])


@pytest.mark.parametrize(
    "digest", [lambda parent, tokens: b"\0" * 32, lambda parent, tokens: bytes([tokens[0]]) * 32]
)
def test_b5_a_hit_is_trusted_after_its_tokens_were_compared(digest, monkeypatch):
    """vllm#11829: with a digest that tells nothing apart, other texts are still not found."""
    monkeypatch.setattr(prefix_cache, "block_digest", digest)
    m = model(12, 4)
    m.start([1, 2, 3, 4], "a")
    assert hit(m.pool, [5, 6, 7, 8, 1]) == 0 and hit(m.pool, [1, 2, 3, 4, 1]) == 4
    m.start([5, 6, 7, 8, 1, 2, 3, 4], "b")
    assert hit(m.pool, [1, 2, 3, 4, 1, 2, 3, 4, 0]) == 4, "the same tokens at another place"
    assert hit(m.pool, [5, 6, 7, 8, 1, 2, 3, 4, 0]) == 8
    m.start([9, 9, 9, 9, 1, 2, 3, 4], "c")
    m.start([9, 9, 9, 9, 1, 2, 3, 4, 0], "d")
    assert m.table("d")[:2] == m.table("c"), "not b's second block, which follows other tokens"


def test_b7_tenants_find_only_what_has_their_salt():
    """vllm PR#17045."""
    m, prompt = model(8, 4), list(range(5))
    m.start(prompt, "a", cache_salt="x")
    assert [hit(m.pool, prompt, cache_salt=salt) for salt in ("x", "y", "", None)] == [4, 0, 0, 0]
    m.start(prompt, "b")
    assert hit(m.pool, prompt) == 4 and m.table("b")[0] != m.table("a")[0]


def test_b8_an_adapter_is_no_salt():
    m, prompt = model(8, 4), list(range(5))
    m.start(prompt, "a", adapter="s")
    assert hit(m.pool, prompt, cache_salt="s") == 0 and hit(m.pool, prompt, adapter="s") == 4


@pytest.mark.parametrize("other", [{"namespace": b"model B"}, {"dtype": "float16"}], ids=["model", "dtype"])
def test_b11_b13_what_moves_to_another_model_or_type_is_not_found_there(other):
    """sglang#24758, omlx#2045: a text that was computed otherwise is another text."""
    a, b = model(4, 4, namespace=b"model A"), model(4, 4, **{"namespace": b"model A", **other})
    assert a.pool.manager._root.digest != b.pool.manager._root.digest
    if "dtype" not in other:
        a.start(list(range(8)), "a")
        b.swap_in(a, ["a"])
        assert hit(b.pool, list(range(9))) == 0
        b.text("a", [*range(8), 1, 2])  # goes on under its own identity


def test_b17_only_what_was_not_found_is_computed():
    """nano-vllm PR#211, #233: a prompt of 10 with a hit of 8 computes positions 8 and 9."""
    m = model(8, 4)
    m.start(list(range(10)), "a")
    reservation = m.pool.extend(m.pool.add("b", tokens=list(range(10))), None)
    assert reservation.start.tolist() == [8] and reservation.counts.tolist() == [2]
    assert reservation.slots.tolist() == [12, 13]


def test_b19_drafts_are_not_found_before_they_are_accepted():
    """vllm PR#18668, #12193: 6 tokens and 3 drafts, all rejected."""
    m = model(8, 4)
    text = [1, 2, 3, 4, 5, 6]
    m.start(text, "a")
    m.text("a", [*text, 7, 8, 9], commit=False)
    assert hit(m.pool, [*text, 7, 8, 9]) == 4
    m.truncate("a", 6)
    assert len(m.tokens["a"]) == 6 and hit(m.pool, [*text, 7, 8, 9]) == 4
    m.text("a", [*text, 7, 8], commit=False)
    m.pool.commit("a", [7])  # one of two is accepted
    m.truncate("a", 7)
    assert hit(m.pool, [*text, 7, 8, 9]) == 4
    m.text("a", [*text, 7, 50])
    assert hit(m.pool, [*text, 7, 50, 9]) == 8


def test_b23_reuse_is_by_whole_blocks():
    """sglang PR#35635."""
    m = model(6, 4)
    m.start(list(range(1, 9)), "a")
    assert hit(m.pool, [1, 2, 3, 4, 5, 6, 99]) == 4


def test_without_the_cache_nothing_is_found_and_ids_are_as_before():
    found = []
    for options in ({}, {"prefix_cache": False}):
        m = Model(6, 4, **options)
        m.start(list(range(9)), "a")
        m.free("a")
        assert m.num_cached == 0 and hit(m.pool, list(range(9))) == 0
        found.append(m.queue)
    assert found == [[2, 1, 0, 3, 4, 5]] * 2


# Every length at a boundary


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_every_prompt_length_finds_all_full_blocks_before_its_last_token(block_size):
    bs = block_size
    m = model(24, bs)
    text = list(range(2 * bs + 1))
    m.start(text, "a")
    for length in sorted({0, 1, bs - 1, bs, bs + 1, 2 * bs - 1, 2 * bs, 2 * bs + 1}):
        assert hit(m.pool, text[:length]) == max(length - 1, 0) // bs * bs
        m.start(text[:length] or [0], f"length {length}")


def test_traces_give_hashes_instead_of_tokens():
    """The numbers of the ten-block example, by hash ids; that of a block that is not full does not count."""
    m = BlockManager(10, 16, prefix_cache=True)
    m.add("req0", block_hashes=[7, 8, 9, 10], num_tokens=55)
    assert m.extend("req0", None).counts.tolist() == [55]
    m.commit("req0")
    m.add("req1", block_hashes=[7, 8, 9, 10], num_tokens=53)
    assert m.match("req1") == 48
    assert m.extend("req1", None).start.tolist() == [48]
    m.commit("req1")
    m.extend("req1", 11)
    m.commit("req1", block_hashes=["decoded"])
    m.add("req2", block_hashes=[7, 8, 9, "decoded", 12], num_tokens=70)
    assert m.match("req2") == 64
    m.add("salted", block_hashes=[7, 8, 9, 10], num_tokens=53, cache_salt="x")
    assert m.match("salted") == 0
