"""The running example's numbers, all of them, against the engine: what the lessons may state without computing."""

import numpy as np
import pytest
from needs import need_module

from pagedkv.allocator import BlockAllocator, PoolExhausted
from pagedkv.attention import merge, paged_attention
from pagedkv.block_table import BlockTables, slots_of
from pagedkv.manager import BlockManager
from pagedkv.teach import story


def tables_of(pool, names):
    return [pool.table(name) for name in names]


def test_the_texts_have_the_lengths_and_blocks_that_the_lessons_state():
    assert [len(text) for text in (story.NIGHT, story.DAY, story.MORROW, story.TWICE)] == [10, 8, 11, 22]
    blocks = [story.TWICE[i : i + 4] for i in range(0, 22, 4)]
    assert blocks == ["Good", " nig", "ht, ", "good", " nig", "ht"]
    assert (story.NUM_BLOCKS, story.BLOCK_SIZE, story.NUM_SLOTS) == (8, 4, 32)


# 01


def test_01_reserving_the_maximum_admits_two_and_leaves_14_slots_idle():
    packed = story.reserve_the_maximum()
    assert (packed.admitted, packed.used, packed.idle) == (2, 18, 14)
    assert packed.idle / story.NUM_SLOTS == 0.4375


def test_01_blocks_admit_all_three_and_leave_3_slots_idle():
    packed = story.in_blocks()
    assert (packed.admitted, packed.blocks, packed.idle) == (3, (3, 2, 3), 3)
    assert round(100 * packed.idle / story.NUM_SLOTS, 1) == 9.4


def test_01_the_engine_takes_the_same_blocks():
    pool = story.three_requests()
    assert tuple(len(pool.table(name)) for name in story.REQUESTS) == story.in_blocks().blocks
    assert pool.num_free == 0
    taken = sum(pool.owners()) * story.BLOCK_SIZE
    assert taken - pool.manager.lengths(story.REQUESTS).sum() == story.in_blocks().idle


@pytest.mark.parametrize(
    ("lengths", "blocks"), [([1, 1, 1, 1], (1, 1, 1, 1)), ([8], (2,)), ([32], (8,)), ([33], ()), ([], ())]
)
def test_01_blocks_are_rounded_up_per_request(lengths, blocks):
    assert story.in_blocks(lengths).blocks == blocks


# 02


def test_02_three_requests_as_block_ids_and_one_more_refused():
    allocator, tables = story.allocated()
    assert tables == {"night": [0, 1, 2], "day": [3, 4], "morrow": [5, 6, 7]}
    with pytest.raises(PoolExhausted, match="requested 1, free 0"):
        allocator.allocate(1)


def test_02_night_leaves_and_a_refusal_changes_nothing():
    allocator, _ = story.night_leaves()
    assert isinstance(allocator, BlockAllocator)
    with pytest.raises(PoolExhausted, match="requested 4, free 3"):
        allocator.allocate(4)
    assert allocator.queue() == [0, 1, 2]
    with pytest.raises(ValueError, match="block 0"):
        allocator.release([0])
    assert allocator.queue() == [0, 1, 2]


# 03


def test_03_morrow_goes_on_in_block_0():
    table, text, letters = story.morrow_goes_on()
    assert (table, text, len(text)) == ([5, 6, 7, 0], "Good morrow, ", 13)
    assert slots_of(table, [0, 4, 11, 12], 4).tolist() == [20, 24, 31, 0]
    assert letters.read(slots_of(table, range(13), 4)) == text
    assert letters.read(slots_of(sorted(table), range(13), 4)).replace(" ", "␣", 1) == "␣···Good morr"


def test_03_the_packages_tables_agree():
    allocator, ids = story.night_leaves()
    tables = BlockTables(4)
    row = np.array([tables.add("morrow")])
    tables.append(row, np.array([3]), np.array([11]), np.array(ids["morrow"]))
    tables.append(row, np.array([1]), np.array([2]), allocator.allocate(1))
    assert tables.entries(row[0]).tolist() == story.morrow_goes_on()[0]
    assert tables.slots(row, np.array([11]), np.array([2])).tolist() == [31, 0]


# 04


def test_04_whole_copies_are_refused_at_the_third_answer():
    pool = story.one_question()
    pool.add("b", story.NIGHT)
    with pytest.raises(PoolExhausted, match="requested 3, free 2"):
        pool.add("c", story.NIGHT)
    assert pool.manager.seq_ids == ["a", "b"]
    assert 4 * len(pool.table("a")) == 12


def test_04_forks_share_and_copy_nothing():
    pool = story.four_answers()
    assert tables_of(pool, "abcd") == [[0, 1, 2]] * 4
    assert pool.owners() == [4, 4, 4, 0, 0, 0, 0, 0]
    assert pool.num_free == 5
    assert not any(frame.copies for frame in pool.history.frames)


def test_04_position_10_copies_1_1_1_0():
    pool, copies = story.four_answers(), []
    for name, letter in story.POSITION_10.items():
        assert pool.manager.length(name) == 10
        copies.append(len(pool.append({name: letter}).copies))
    assert copies == [1, 1, 1, 0]
    one_by_one = tables_of(pool, "abcd")
    assert one_by_one == [[0, 1, 3], [0, 1, 4], [0, 1, 5], [0, 1, 2]]
    assert tables_of(story.diverged(), "abcd") == one_by_one  # all four in one batch
    assert pool.num_free == story.diverged().num_free == 2


def test_04_copies_are_of_block_2_and_of_its_two_filled_slots():
    copies = story.four_answers().append(story.POSITION_10).copies
    assert copies.tolist() == [[2, 3, 2], [2, 4, 2], [2, 5, 2]]


def test_04_position_11_needs_nothing_and_position_12_four_blocks():
    pool = story.diverged()
    assert pool.manager.blocks_needed(story.ANSWERS) == 0
    pool = story.at_the_wall()
    assert pool.manager.lengths(story.ANSWERS).tolist() == [12] * 4
    assert (pool.manager.blocks_needed(story.ANSWERS), pool.num_free) == (4, 2)


def test_04_the_wall_changes_nothing():
    pool = story.at_the_wall()
    before, queue = repr(pool), pool.manager.allocator.queue()
    with pytest.raises(PoolExhausted, match="requested 4, free 2"):
        pool.append(dict.fromkeys("abcd", "n"))
    assert repr(pool) == before
    assert pool.manager.allocator.queue() == queue
    assert [pool.read(name) for name in "abcd"] == [
        "Good night, ",
        "Good night! ",
        "Good night. ",
        "Good night; ",
    ]


def test_04_writing_without_looking_lets_a_read_bs_letter():
    pool = story.four_answers()
    slot = slots_of(pool.table("a"), [10], 4)
    pool.letters.write(slot, ",")
    pool.letters.write(slot, "!")
    assert pool.letters.read(slots_of(pool.table("a"), range(11), 4)) == "Good night!"


# 05


def test_05_shuffled_ids_rows_and_csr():
    pool = story.shuffled()
    names = list(story.REQUESTS)
    assert tables_of(pool, names) == [[6, 1, 3], [0, 5], [7, 2, 4]]
    assert [pool.read(name) for name in names] == list(story.REQUESTS.values())
    indptr, indices, last = pool.manager.to_csr(names)
    assert (indptr.tolist(), last.tolist()) == ([0, 3, 5, 8], [2, 4, 3])
    assert indices.tolist() == [6, 1, 3, 0, 5, 7, 2, 4]


def test_05_and_12_rows_read_and_padded():
    pool = story.shuffled()
    names = list(story.REQUESTS)
    assert pool.manager.lengths(names).sum() == 29
    assert pool.manager.block_tables(names).size * story.BLOCK_SIZE == 36


def test_05_its_history_begins_with_the_requests():
    kinds = [frame.event and frame.event.kind for frame in story.shuffled().history.frames]
    assert kinds == [None, "add", "extend", "add", "extend", "add", "extend"]


def attend(values, table, length):
    """Result and log-sum-exp of the readable kernel where all scores are 0."""
    keys = np.zeros((len(values) // 4, 4, 1, 1), np.float32)
    pages = np.asarray(values, np.float32).reshape(-1, 4, 1, 1)
    out, lse = paged_attention(
        np.zeros((1, 1, 1), np.float32), keys, pages, np.array([table]), np.array([length]), return_lse=True
    )
    return float(out[0, 0, 0]), float(lse[0, 0])


def test_05_equal_scores_give_5_5_and_empty_slots_would_change_it():
    values = [*range(1, 11), 0, 0]
    assert attend(values, [0, 1, 2], 10)[0] == pytest.approx(5.5)
    assert round(attend(values, [0, 1, 2], 12)[0], 2) == 4.58
    poisoned = [*range(1, 11), np.nan, np.nan]
    assert attend(poisoned, [0, 1, 2], 10)[0] == pytest.approx(5.5)
    assert np.isnan(attend(poisoned, [0, 1, 2], 12)[0])


def test_05_parts_are_merged_not_averaged():
    values = [*range(1, 11), 0, 0]
    full, tail = attend(values, [0, 1], 8), attend(values, [2], 2)
    assert full == pytest.approx((4.5, np.log(8)))
    assert tail == pytest.approx((9.5, np.log(2)))
    out, lse = merge([full[0]], full[1], [tail[0]], tail[1])
    assert (out.item(), lse.item()) == pytest.approx((5.5, np.log(10)))
    assert (full[0] + tail[0]) / 2 == pytest.approx(7.0)
    per_block = [attend(values, [0], 4)[0], attend(values, [1], 4)[0], tail[0]]
    assert round(np.mean(per_block), 2) == 6.17


# 06


@pytest.mark.parametrize(("block_size", "blocks"), story.ANSWER_BLOCKS.items())
def test_06_blocks_of_four_answers(block_size, blocks):
    assert story.answer_blocks(block_size) == blocks
    unshared, shared = BlockManager(200, block_size), BlockManager(200, block_size)
    for name in "abcd":
        unshared.add(name)
    unshared.extend(story.ANSWERS, 50)
    shared.add("a")
    shared.extend("a", 10)
    shared.fork("a", [*"bcd"])
    for _ in range(40):
        shared.extend(story.ANSWERS)
    assert tuple(200 - manager.num_free for manager in (unshared, shared)) == blocks


# 07


def test_07_three_prompts_share_block_0():
    pool = story.three_prompts()
    assert tables_of(pool, story.REQUESTS) == [[0, 1, 2], [0, 3], [0, 4, 5]]
    assert [pool.read(name) for name in story.REQUESTS] == list(story.REQUESTS.values())
    assert pool.owners() == [3, 1, 1, 1, 1, 1, 0, 0]
    assert pool.num_free == 2


def test_07_hits_are_whole_blocks_and_leave_the_last_token():
    pool = story.three_prompts()
    assert [pool.match(text) for text in (story.DAY, story.NIGHT, story.TWICE)] == [4, 8, 8]
    assert repr(pool) == repr(story.three_prompts())
    pool.add("again", story.DAY)
    assert (pool.table("again"), pool.num_free) == ([0, 6], 1)


def test_07_everybody_left_and_nothing_is_lost():
    pool = story.everybody_left()
    assert pool.manager.allocator.queue() == [5, 2, 6, 7, 1, 3, 4, 0]
    assert (pool.num_free, pool.manager.allocator.num_cached) == (8, 4)
    assert pool.match(story.NIGHT) == 8
    pool.add("night", story.NIGHT)
    assert (pool.table("night"), pool.read("night")) == ([0, 1, 5], story.NIGHT)


def test_07_a_stranger_leaves_only_what_was_shared_last():
    pool = story.everybody_left()
    pool.add("stranger", story.STRANGER)
    assert pool.table("stranger") == [5, 2, 6, 7, 1, 3, 4]
    assert pool.read("stranger") == story.STRANGER
    assert [pool.match(text) for text in (*story.REQUESTS.values(), story.TWICE)] == [4] * 4
    pool.free("stranger")
    pool.add("all", "?" * 32)
    assert pool.match(story.NIGHT) == 0


def test_07_answers_become_findable_too():
    pool = story.three_prompts()
    pool.append({"night": ", "})
    assert pool.match(story.TWICE) == 12


# 08


def test_08_preempting_d_frees_one_block():
    pool = story.at_the_wall()
    assert len(pool.table("d")) == 3
    assert pool.free("d").tolist() == [2]
    assert (pool.manager.blocks_needed([*"abc"]), pool.num_free) == (3, 3)


def test_08_after_the_preemption_the_pool_is_full_and_the_next_wall_is_at_16():
    pool = story.preempted()
    assert tables_of(pool, "abc") == [[0, 1, 3, 2], [0, 1, 4, 6], [0, 1, 5, 7]]
    assert pool.num_free == 0
    pool = story.second_wall()
    assert pool.manager.lengths([*"abc"]).tolist() == [16] * 3
    assert (pool.manager.blocks_needed([*"abc"]), pool.num_free) == (3, 0)
    assert len(pool.free("c")) == 2
    assert (pool.manager.blocks_needed([*"ab"]), pool.num_free) == (2, 2)


def test_08_the_evening_who_gives_way_and_when_all_are_done():
    need_module("ipywidgets", "course")
    from pagedkv.teach.scheduler_timeline import serve

    evening = [(name, len(text), new, arrival) for name, text, new, arrival in story.EVENING]
    served = [serve(evening, story.NUM_BLOCKS, story.BLOCK_SIZE, w) for w in range(5)]
    assert served[0].preemptions == story.EVENING_GIVES_WAY
    assert tuple(round(each.mean) for each in served) == story.EVENING_MS
    sooner = served[2].done
    assert all(sooner[name] <= ms for name, ms in served[0].done.items()), "fewer at once, and nobody later"


# 09, 10, 11


def test_09_a_snapshot_at_the_wall_has_12_entries_and_6_pages():
    snapshot = story.at_the_wall().manager.snapshot()
    assert (len(snapshot.indices), len(set(snapshot.indices.tolist()))) == story.SNAPSHOT == (12, 6)


@pytest.mark.parametrize(
    ("damaged", "left"),
    [(1, [4, 4, 4, 4]), (3, [8, 12, 12, 12]), (0, [0, 0, 0, 0]), (2, [12, 12, 12, 8]), (7, [12, 12, 12, 12])],
)
def test_09_what_a_damaged_page_costs(damaged, left):
    assert list(story.tokens_left(story.at_the_wall(), damaged).values()) == left


@pytest.mark.parametrize(("damaged", "left"), [((2, 4), [12, 8, 12, 8]), ((3, 1), [4] * 4), ((), [12] * 4)])
def test_09_the_first_damaged_page_counts(damaged, left):
    assert list(story.tokens_left(story.at_the_wall(), *damaged).values()) == left


def test_09_a_sequence_keeps_its_half_page_if_that_is_whole():
    assert list(story.tokens_left(story.preempted(), 2).values()) == [12, 13, 13]


@pytest.mark.parametrize("pool", [story.one_question(), story.at_the_wall(), story.preempted()])
def test_09_a_cache_says_what_the_pool_says(pool):
    cache = story.in_a_cache(pool)
    for name in pool.manager.seq_ids:
        for array in cache.gather(0, name):
            assert "".join(chr(int(code)) for code in array.ravel()) == pool.read(name)
    assert cache.num_free == pool.num_free


def test_10_counters_at_the_wall():
    pool = story.at_the_wall()
    with pytest.raises(PoolExhausted):
        pool.append(dict.fromkeys("abcd", "n"))
    events = [frame.event for frame in pool.history.frames[4:]]  # after the fork
    appended = sum(event.counts.get("tokens", 0) for event in events)
    cloned = sum(len(event.blocks.get("copies", ())) for event in events)
    refused = [event.kind for event in events].count("refuse")
    assert (appended, cloned, refused, 1 - pool.num_free / story.NUM_BLOCKS) == story.COUNTED
    assert 1 - story.preempted().num_free / story.NUM_BLOCKS == story.USAGE_PREEMPTED


def test_11_reclaiming_a_and_b_frees_two_blocks_not_six():
    pool = story.at_the_wall()
    freed = pool.free(["a", "b"])
    assert sorted(freed.tolist()) == [3, 4]
    assert pool.num_free == 4
    assert pool.owners()[:2] == [2, 2]


# The pool of letters itself


def test_an_append_is_all_or_nothing_for_letters_too():
    pool = story.three_requests()
    before = repr(pool)
    with pytest.raises(PoolExhausted):
        pool.append({"morrow": "!", "day": "!"})
    assert repr(pool) == before


def test_a_refused_add_leaves_no_sequence_behind():
    pool = story.three_requests()
    with pytest.raises(PoolExhausted):
        pool.add("extra", "x")
    assert "extra" not in pool.manager.seq_ids
    pool.free("day")
    pool.add("extra", "x")
    assert pool.read("extra") == "x"


def test_drafts_continue_other_drafts():
    pool = story.TextPool()
    for name, text in zip("abc", ("Good n", "Good d", "Good m"), strict=True):
        pool.add(name, text)
    pool.reorder([*"abc"], [0, 0, 1])
    assert [pool.read(name) for name in "abc"] == ["Good n", "Good n", "Good d"]


def test_truncate_and_poison():
    pool = story.one_question(poison=True)
    assert pool.truncate("a", 4).tolist() == [2, 1]
    assert pool.read("a") == "Good"
    assert "1 NaN – | 2 NaN –" in repr(pool)
    assert "1 ␣nig – " in repr(_truncated(story.one_question()))


def _truncated(pool):
    pool.truncate("a", 4)
    return pool
