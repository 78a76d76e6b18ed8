"""Drawings: their text exactly, their HTML by structure (well formed, letters, owners, captions, own colours)."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from pagedkv.allocator import BlockAllocator, PoolExhausted
from pagedkv.cache import PagedKVCache
from pagedkv.manager import BlockManager
from pagedkv.teach import pages, story

FOUR = (
    "0 Good abcd | 1 ␣nig abcd | 2 ht·· abcd | 3 ···· – | 4 ···· – | 5 ···· – | 6 ···· – | 7 ···· –   free 5"
)


class Table(HTMLParser):
    """Rows of (tag, attributes, text) of one table; insists on balanced tags and on scopes."""

    def __init__(self, html):
        super().__init__()
        self.rows, self.caption, self.open, self.struck = [], "", [], []
        self.feed(html)
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        if tag == "br":
            return
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append([tag, dict(attributes), ""])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if "caption" in self.open:
            self.caption += text
        elif "s" in self.open:
            self.struck.append(text)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1][2] += text

    def texts(self, name):
        """The cells of the row that begins with `name`."""
        (row,) = [row for row in self.rows if row[0][2] == name]
        return [cell[2] for cell in row[1:]]


def table(drawing):
    return Table(drawing._repr_html_())


def a_cache(**options):
    cache = PagedKVCache(8, 4, 1, 2, **options)
    cache.add("x")
    zeros = np.zeros((1, 6, 1, 2), np.float32)
    cache.append("x", zeros, zeros, 6)
    return cache


# The strip


def test_the_strip_in_text():
    assert repr(story.four_answers()) == FOUR
    tables = {name: [0, 1, 2] for name in "abcd"}
    lengths = dict.fromkeys("abcd", 10)
    assert repr(pages.strip_of(tables, {"a": story.NIGHT}, lengths=lengths)) == FOUR


def test_the_strip_in_html():
    drawn = table(story.four_answers())
    assert drawn.texts("block") == [*"01234567"]
    assert drawn.texts("letters")[:4] == ["Good", "␣nig", "ht··", "····"]
    assert drawn.texts("owners")[:4] == ["abcd ×4"] * 3 + ["free"]
    assert drawn.caption == "The pool now free 5"
    assert {cell[1]["scope"] for row in drawn.rows for cell in row if cell[0] == "th"} == {"row", "col"}


def test_every_background_has_its_own_foreground():
    for drawing in (story.at_the_wall(), story.three_requests(), story.at_the_wall().tables()):
        for style in re.findall(r'style="([^"]*)"', drawing._repr_html_()):
            if "background-color:#" in style:
                assert ";color:#" in style


def contrast(one, other):
    def light(colour):
        digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    bright, dark = sorted((light(one), light(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_letters_are_legible_on_every_colour():
    assert all(contrast(*pair) >= 4.5 for pair in pages.PALETTE)


def test_a_sequence_has_one_colour_and_the_storys_differ():
    assert len({pages.colours(name) for name in "abcd"}) == 4
    assert len({pages.colours(name) for name in story.REQUESTS}) == 3
    assert [pages.colours(n) for n in (0, 1)] == [pages.colours(n) for n in ("a", "b")]


def test_a_freed_block_keeps_its_letters_struck_through():
    pool = story.three_requests()
    pool.free("night")
    assert repr(pool).startswith("0 Good – | 1 ␣nig – | 2 ht·· – | 3 Good day |")
    assert table(pool).struck == ["Good", "␣nig", "ht··"]


def test_a_poisoned_block_says_nan():
    pool = story.three_requests(poison=True)
    pool.free("night")
    assert repr(pool).startswith("0 NaN – | 1 NaN – | 2 NaN – | 3 Good day |")
    assert table(pool).texts("letters")[:3] == ["NaN"] * 3
    assert repr(a_cache(poison=True)).endswith(
        "0 ▪▪▪▪ x | 1 ▪▪·· x | 2 NaN – | 3 NaN – | 4 NaN – | 5 NaN – | 6 NaN – | 7 NaN –   free 6"
    )


def test_a_stale_letter_behind_the_end_is_not_drawn():
    pool = story.three_requests()
    pool.free("night")
    pool.append({"morrow": ", "})
    assert " | 2 ␣··· morrow | " in repr(pool)
    assert pool.letters.block(2) == " t··"  # night's t is still there


def test_a_lost_block_and_one_that_is_used_and_free():
    drawn = pages.strip_of({"a": [0, 1]}, {"a": "Good"}, num_blocks=4, free=[1, 2])
    assert repr(drawn) == "0 Good a | 1 ···· a– | 2 ···· – | 3 ···· ?   free 2"
    assert table(drawn).texts("owners") == ["a", "a and free!", "free", "? lost"]


def test_blanks_and_markup_are_visible_and_harmless():
    drawn = pages.strip_of({"<b>": [0]}, {"<b>": "a\n<\t"}, num_blocks=1, caption="<i>")
    assert repr(drawn) == "<i>\n0 a↵<� <b>   free 0"
    seen = table(drawn)
    assert (seen.texts("letters"), seen.caption) == (["a↵<�"], "<i> free 0")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 16, 256])
def test_every_block_size_and_text_form_on_both_sides(size):
    text = "x" * (size + 1)
    drawn = pages.strip_of({"a": [1, 0]}, {"a": text}, num_blocks=9, block_size=size)
    assert "".join(table(drawn).rows[1][i][2] for i in (2, 1)).rstrip("·") == text
    assert repr(drawn).count("\n") == 1  # the ninth box starts a new row
    manager = BlockManager(9, size)
    manager.add("a")
    manager.extend("a", size + 1)
    wanted = f"1/{size}" if size > pages.WIDEST_BLOCK else "▪" + "·" * (size - 1)
    assert f"1 {wanted} a" in repr(manager)


def test_pieces_of_words_get_half_as_many_boxes_a_row():
    manager, letters = BlockManager(9, 2), pages.Letters(9, 2)
    manager.add("a")
    letters.write(manager.extend("a", 2).slots, [" assistant", " named"])
    assert repr(pages.strip(manager, letters)).count("\n") == 2
    assert [row[0][2] for row in table(pages.strip(manager, letters)).rows].count("block") == 3


def test_a_large_pool_is_summed_up():
    manager = BlockManager(5000, 16)
    manager.add("a")
    manager.extend("a", 1000)
    manager.fork("a", 300)
    line = "5000 blocks of 16: 63 in use (63 shared), 4937 free, 301 sequences"
    assert repr(pages.strip(manager)) == line
    assert len(repr(manager)) < 200
    assert len(manager._repr_html_()) < 2000
    assert [cell[2] for cell in table(pages.strip(manager)).rows[1]] == ["5000", "63", "63", "4937"]


def test_many_owners_are_counted_not_listed():
    manager = BlockManager(4, 4)
    manager.add("a")
    manager.extend("a", 4)
    manager.fork("a", 200)
    assert repr(manager).splitlines()[1].startswith("0 ▪▪▪▪ a,0,1,2,3,4,5,6… ×201 | 1 ")
    assert "… ×201" in table(manager).texts("owners")[0]


def test_a_strip_stays_as_it_was():
    pool = story.one_question()
    before = pool.strip()
    text = repr(before)
    pool.free("a")
    pool.letters.write(range(32), "x" * 32)
    assert repr(before) == text


@pytest.mark.parametrize(
    ("tables", "texts"), [({"a": [8]}, {}), ({"a": [-2]}, {}), ({"a": [0]}, {"a": "Good night"})]
)
def test_a_readers_impossible_lists_are_refused(tables, texts):
    with pytest.raises(ValueError, match="'a'"):
        pages.strip_of(tables, texts)


def test_a_window_that_left_blocks_behind():
    manager = BlockManager(8, 4)
    manager.add("a")
    manager.extend("a", 10)
    manager.release_before("a", 5)
    assert repr(pages.strip(manager)).startswith("0 ···· – | 1 ▪▪▪▪ a | 2 ▪▪·· a |")
    assert "[–, 1, 2]" in repr(pages.tables(manager))
    assert "position 12" not in repr(pages.sequence(manager, "a"))
    assert table(pages.sequence(manager, "a")).texts("slot")[:5] == ["–"] * 4 + ["4"]


# What shows itself


@pytest.mark.parametrize("kind", [BlockAllocator, BlockManager, PagedKVCache, story.TextPool])
def test_a_half_built_object_has_a_repr(kind):
    if kind is not story.TextPool:
        assert repr(kind.__new__(kind)) == f"<{kind.__name__}>"
        assert kind.__new__(kind)._repr_html_() is None


def test_the_engines_parts_show_themselves():
    allocator = BlockAllocator(4)
    allocator.share(allocator.allocate(2)[:1])
    assert (
        repr(allocator)
        == "BlockAllocator, 4 blocks: 2 in use (1 shared), 2 free\n0 ×2 | 1 ×1 | 2 – | 3 –   free 2"
    )
    assert table(allocator).texts("owners") == ["×2", "×1", "free", "free"]
    cache = a_cache()
    head = "8 blocks of 4: 2 in use, 6 free, 1 sequence"
    assert repr(cache).splitlines()[0] == f"PagedKVCache, {head}"
    assert table(cache.manager).caption == f"BlockManager, {head}"


# Tables and one sequence


def test_tables_in_text_and_html():
    view = story.diverged().tables()
    assert repr(view).splitlines() == [
        "sequence  tokens  block table  text",
        "a             11  [0, 1, 3]    Good␣night,",
        "b             11  [0, 1, 4]    Good␣night!",
        "c             11  [0, 1, 5]    Good␣night.",
        "d             11  [0, 1, 2]    Good␣night;",
    ]
    assert table(view).texts("a") == ["0", "1", "3", "11", "Good␣night,"]
    assert table(view).texts("logical block")[:3] == ["0", "1", "2"]


def test_a_readers_own_tables():
    view = pages.tables_of({"a": [2, 0]}, {"a": "Good n"})
    assert repr(view).splitlines()[1] == "a              6  [2, 0]       Good␣n"
    assert repr(pages.tables_of({"a": [2]})).splitlines()[1] == "a              4  [2]"


def test_many_sequences_are_cut_short():
    manager = BlockManager(4, 4)
    for _ in range(50):
        manager.add()
    assert repr(pages.tables(manager)).endswith("… and 30 more")
    assert table(pages.tables(manager)).caption.endswith("30 more")


def test_a_sequence_in_text():
    table_, text, _ = story.morrow_goes_on()
    view = pages.sequence_of(table_, text, name="morrow")
    assert repr(view).splitlines() == [
        "morrow: 13 tokens, block table [5, 6, 7, 0]",
        "position  0  1  2  3 |  4  5  6  7 |  8  9 10 11 | 12",
        "letter    G  o  o  d |  ␣  m  o  r |  r  o  w  , |  ␣",
        "block     5          |  6          |  7          |  0",
        "offset    0  1  2  3 |  0  1  2  3 |  0  1  2  3 |  0",
        "slot     20 21 22 23 | 24 25 26 27 | 28 29 30 31 |  0",
    ]
    seen = table(view)
    assert seen.texts("block") == ["5", "6", "7", "0"]
    assert seen.texts("slot")[-2:] == ["31", "0"]


def test_a_sequence_of_the_engine_agrees_with_its_slots():
    pool = story.shuffled()
    view = pool.sequence("morrow")
    assert view.text == story.MORROW
    assert [slot for *_, slot in view.columns] == [28, 29, 30, 31, 8, 9, 10, 11, 16, 17, 18]
    with pytest.raises(KeyError):
        pool.sequence("nobody")


@pytest.mark.parametrize("length", [0, 1, 96, 97, 1000])
def test_a_sequence_of_any_length(length):
    view = pages.sequence_of(range(250), length=length)
    assert len(view.columns) == min(length, pages.MOST_POSITIONS)
    assert ("more positions" in repr(view)) == (length > pages.MOST_POSITIONS)
    table(view)


def test_a_table_too_short_for_its_tokens_is_refused():
    with pytest.raises(ValueError, match="11 tokens"):
        pages.sequence_of([0, 1], "Good morrow")


# History


def test_letters_written_after_an_event_belong_to_its_frame():
    pool = story.four_answers()
    pool.append({"a": ","})
    pool.append({"b": "!"})
    frames = pool.history.frames
    assert frames[0].event is None
    assert [frame.what for frame in frames[3:]] == [
        "fork a to b, c, d",
        "extend a (1 token)",
        "extend b (1 token)",
    ]
    assert "3 ht,· a | 4 ···· –" in repr(frames[4].strip)
    assert "3 ht,· a | 4 ht!· b" in repr(frames[5].strip)
    assert frames[4].notes == {3: "copy of 2"}


def test_what_was_found_and_what_was_given_up_is_noted():
    pool = story.everybody_left()
    pool.add("again", story.NIGHT)
    assert pool.history.frames[-2].notes == {0: "hit", 1: "hit", 5: "new"}
    pool.free("again")
    pool.add("stranger", story.STRANGER)
    assert pool.history.frames[-2].notes == {5: "new", 2: "new", 6: "new", 7: "new"} | dict.fromkeys(
        [3, 4, 1], "evicted"
    )


def test_frames_do_not_change_when_the_pool_goes_on():
    pool = story.four_answers()
    before = repr(pool.history.frames[-1].strip)
    pool.append(story.POSITION_10)
    assert repr(pool.history.frames[3].strip) == before


def test_the_history_in_text_and_html():
    pool = story.at_the_wall()
    with pytest.raises(PoolExhausted):
        pool.append(dict.fromkeys("abcd", "n"))
    pool.free("d")
    rows = repr(pool.history).splitlines()
    assert rows[0].split() == ["what", "new", "copied", "freed", "free"]
    assert rows[5].split("  ")[1] == "extend a, b, c, d (4 tokens)"
    assert "2→3 2→4 2→5" in rows[5]
    assert "refuse a, b, c, d: needs 4 blocks, has 2" in rows[7]
    assert rows[8].split()[-2:] == ["2", "3"]  # block 2 freed, 3 free
    assert len(table(pool.history).rows) == len(rows)
    assert table(pool.history).texts("7")[-2:] == ["2", "3"]


def test_a_history_of_a_cache():
    cache = PagedKVCache(4, 4, 1, 2, poison=True)
    history = pages.History(cache)
    cache.manager.observers.append(history)
    cache.add("x")
    cache.extend("x", 5)
    cache.free("x")
    assert [repr(frame.strip)[:24] for frame in history.frames[2:]] == [
        "0 ▪▪▪▪ x | 1 ▪··· x | 2 ",
        "0 NaN – | 1 NaN – | 2 Na",
    ]


def test_a_history_of_a_large_pool_keeps_numbers_only():
    manager = BlockManager(5000, 4)
    manager.observers.append(history := pages.History(manager))
    manager.add("a")
    manager.extend("a", 9)
    assert [frame.strip.num_free for frame in history.frames] == [5000, 5000, 4997]
    assert history.frames[-1].strip.boxes == ()


# Letters


def test_letters_keep_what_was_written_until_it_is_overwritten():
    letters = pages.Letters(2, 4)
    letters.write([4, 5], "ab")
    letters.copy_blocks([[1, 0, 1]])
    assert letters.read([0, 1, 4, 5]) == "a·ab"
    letters.write([4], "c")
    assert letters.read([0, 4]) == "ac"
    letters.copy_blocks(np.zeros((0, 3), np.int32))
    letters.copy_blocks([(1, 0)])
    assert letters.block(0) == "cb··"
    letters.poison([1], start=1)
    assert letters.block(1) == "c✗✗✗"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda letters: letters.write([0, 1], "a"),
        lambda letters: letters.write([32], "a"),
        lambda letters: letters.read([-1]),
        lambda letters: letters.copy_blocks([[0, 8, 1]]),
        lambda letters: letters.copy_blocks([[0, 1, 5]]),
        lambda letters: letters.copy_blocks([[0, 1, 2, 3]]),
        lambda letters: letters.poison([8]),
        lambda letters: pages.Letters(0, 4),
    ],
)
def test_letters_refuse_what_they_cannot_do_and_change_nothing(wrong):
    letters = pages.Letters()
    letters.write(range(8), "Good nig")
    before = repr(letters)
    with pytest.raises(ValueError):
        wrong(letters)
    assert repr(letters) == before


def test_slots_can_hold_pieces_of_words_and_no_line_tears_one():
    manager = BlockManager(3, 4)
    manager.add("a")
    slots = manager.extend("a", 5).slots
    letters = pages.Letters(3, 4)
    letters.write(slots, ["The", " capital", " of", " France", " is"])
    strip = pages.strip(manager, letters)
    assert repr(strip) == "0 The␣capital␣of␣France a | 1 ␣is··· a | 2 ···· –   free 1"
    assert "The<br>␣capital<br>␣of<br>␣France<" in strip._repr_html_()
    assert "The␣capital␣of␣France␣is" in repr(pages.tables(manager, letters))
    letters.copy_blocks([[0, 2, 2]])
    assert letters.read([8, 9, 10]) == "The capital·"
    with pytest.raises(ValueError, match="2 slots need as many letters, got 1"):
        letters.write([0, 1], ["The"])
