"""The board of damages without a browser: every page, letter and bit, predictions, and losses against the store."""

import pytest
from needs import need_module

need_module("ipywidgets", "course")

from pagedkv.store import load, save  # noqa: E402
from pagedkv.teach import story, widgets  # noqa: E402
from pagedkv.teach.damage_board import BITS, DamageBoard, flip  # noqa: E402


@pytest.fixture(autouse=True)
def no_score():
    widgets.reset_score()


def a_board(pool=None, **options):
    return DamageBoard(pool or story.at_the_wall(), **options)


def guess(widget, text):
    widget.entry.value = text
    widget.predict_button.click()


# What a flipped bit costs


def test_one_bit_makes_another_word():
    damage = flip(story.at_the_wall(), 1, 1, 1)
    assert (damage.was, damage.reads) == (" nig", " lig")
    assert list(damage.unchecked.values()) == ["Good light, ", "Good light! ", "Good light. ", "Good light; "]
    assert damage.kept == dict.fromkeys("abcd", 4)


@pytest.mark.parametrize("block", range(8))
def test_exactly_one_bit_differs_in_the_texts_of_the_owners(block):
    pool = story.preempted()
    for byte in range(4):
        for bit in range(BITS):
            damage = flip(pool, block, byte, bit)
            for name, text in damage.unchecked.items():
                pairs = zip(text, pool.read(name), strict=True)
                differing = [ord(x) ^ ord(y) for x, y in pairs if x != y]
                filled = block in pool.table(name) and damage.was[byte] != "·"
                assert differing == [1 << bit] * filled


@pytest.mark.parametrize("pool", [story.at_the_wall(), story.preempted(), story.diverged()])
def test_the_store_keeps_as_many(pool, tmp_path):
    """A flipped bit in a page of a real snapshot."""
    path = tmp_path / "wall.npz"
    blocks = list(dict.fromkeys(b for name in pool.manager.seq_ids for b in pool.table(name)))
    report = save(story.in_a_cache(pool), path)
    data, size = path.read_bytes(), 48 + 2 * 4 * 4  # a record: its head, 4 keys and 4 values
    start = data.index(b"PKV1")
    assert report.num_pages == len(blocks)
    for page, block in enumerate(blocks):
        damaged = bytearray(data)
        damaged[start + page * size + 50] ^= 1
        path.write_bytes(damaged)
        loaded = load(path)
        kept = {name: loaded.cache.length(name) for name in loaded.seq_ids}
        assert (list(loaded.damaged), kept) == ([page], flip(pool, block, 0, 0).kept)


@pytest.mark.parametrize("place", [(-1, 0, 0), (8, 0, 0), (0, 4, 0), (0, 0, 8), (0, 0, -1), (0.5, 0, 0)])
def test_places_that_do_not_exist(place):
    for call in (a_board().frame, a_board().text_frame):
        with pytest.raises(ValueError):
            call(*place)


# The frames


@pytest.mark.parametrize("block", range(8))
def test_every_page(block):
    board = a_board()
    board.show_button.click()
    for byte in (0, 3):
        for bit in (0, 7):
            board.block.value, board.byte.value, board.bit.value = block, byte, bit
            assert board.picture.value == board.frame(block, byte, bit)
            kept = story.tokens_left(board.pool, block)
            text = board.text_frame(block, byte, bit)
            for name, tokens in kept.items():
                assert f"{tokens} of 12" in text and f"{tokens} of 12" in board.frame(block, byte, bit)
                line = next(line for line in text.splitlines() if line.startswith(f"{name}  "))
                assert line.count("╳") == 12 - tokens
                assert (f"({block})" in line) == (block in board.pool.table(name))
            assert f"{48 - sum(kept.values())} tokens are lost" in board.verdict.value


def test_a_free_page_is_not_in_the_file():
    assert "Block 6 is free" in a_board().frame(6, 0, 0)
    assert a_board().text_frame(6, 0, 0).count("12 of 12") == 4


def test_letters_are_escaped():
    pool = story.TextPool()
    pool.add("<i>", "<b>&")
    board = a_board(pool, block=0)
    for drawing in (board.frame(), board.frame(0, 3, 0)):
        assert "<b>" not in drawing and "<i>" not in drawing


# Predictions


def test_before_the_prediction_nothing_is_damaged():
    board = a_board()
    assert all(control.disabled for control in (board.block, board.byte, board.bit))
    assert board.picture.value == board.frame()
    assert "covered until you predict" in board.verdict.value
    assert board.choices == ("a 4, b 12, c 12, d 12", "all 8", "all 4", "all 12")


@pytest.mark.parametrize(("said", "right"), [("all 4", True), ("all 8", False), ("all 12", False)])
def test_a_prediction_opens_it(said, right):
    board = a_board(because="A hole cannot be read over.")
    guess(board, said)
    assert board.right is right
    assert board.picture.value == board.frame(1, 1, 1)
    assert f"you said {said}. It is all 4. A hole cannot be read over." in board.verdict.value
    for control in (board.entry, board.predict_button, board.show_button):
        assert control.disabled
    assert not any(control.disabled for control in (board.block, board.byte, board.bit))
    assert widgets.score().right == right


def test_show_me_counts_as_not_predicted():
    board = a_board()
    board.show_button.click()
    assert "Not predicted. It is all 4." in board.verdict.value
    assert repr(widgets.score()) == "0 of 1 predicted"


def test_the_answer_for_other_damages():
    assert a_board(block=3).answer == "a 8, b 12, c 12, d 12"
    assert a_board(block=7).answer == "all 12"
    assert a_board(story.preempted(), block=2).answer == "a 12, b 13, c 13"


@pytest.mark.parametrize("options", [{"block": 8}, {"byte": 4}, {"bit": 8}, {"block": -1}, {"bit": 1.5}])
def test_a_board_that_cannot_work_is_refused(options):
    with pytest.raises(ValueError):
        a_board(**options)
    assert widgets.score().asked == 0


def test_a_pool_that_cannot_lose_anything_is_refused():
    with pytest.raises(ValueError, match="no sequence"):
        a_board(story.TextPool())
    pool = story.TextPool()
    pool.add("a", "夜")
    with pytest.raises(ValueError, match="one byte"):
        a_board(pool)


# What a notebook stores


def test_the_storyboard():
    board = a_board(because="A hole cannot be read over.")
    text = repr(board)
    order = [
        "What is saved",
        "Predict: A bit flips in block 1",
        "(a 4, b 12, c 12, d 12 / all 8 / all 4 / all 12)",
        "␣nig becomes ␣lig",
        "in block 2",
        "Block 6 is free",
        "A hole cannot be read over.",
    ]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)
    shown, folded = board.storyboard()._repr_html_().split("<details>")
    assert "light" not in shown and "light" in folded
    bundle = board._repr_mimebundle_()
    assert (bundle["text/plain"], bundle["text/html"]) == (text, board.storyboard()._repr_html_())
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_every_control_has_a_description():
    def inside(widget):
        for child in getattr(widget, "children", ()):
            yield child
            yield from inside(child)

    controls = [w for w in inside(a_board()) if hasattr(w, "disabled")]
    assert len(controls) == 6
    assert all(control.description for control in controls)
    assert not {type(w).__name__ for w in inside(a_board())} & {"Output", "interactive"}
