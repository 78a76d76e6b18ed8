"""The widgets without a browser: every frame, both ends, every prediction, and what a notebook stores."""

import subprocess
import sys

import numpy as np
import pytest
from needs import need_module

need_module("ipywidgets", "course")

from pagedkv.teach import story, widgets  # noqa: E402


@pytest.fixture(autouse=True)
def no_score():
    widgets.reset_score()


def a_history():
    pool = story.four_answers()
    for name, letter in story.POSITION_10.items():
        pool.append({name: letter})
    return pool.history


def a_player(**options):
    options = {"question": "How many?", "choices": [0, 1, 3, 4], "answer": 3, "ask_at": 3, **options}
    return widgets.PagePlayer(a_history(), **options)


def guess(widget, text):
    widget.entry.value = text
    widget.predict_button.click()


# The page player


@pytest.mark.parametrize("i", range(8))
def test_every_frame_of_the_player(i):
    player = a_player(ask_at=0)
    guess(player, "3")
    player.slider.value = i
    assert player.picture.value == player.frame(i)
    assert f"Step {i} of 7" in player.frame(i)
    assert (player.back.disabled, player.forward.disabled) == (i == 0, i == 7)
    assert player.play.value == i


def test_before_the_prediction_only_the_past_is_open():
    player = a_player()
    assert "Step 3 of 7" in player.picture.value
    for control in (player.forward, player.predict_button, player.play):
        assert control.disabled
    player.forward.click()
    player.slider.value = 7
    assert (player.slider.value, player.picture.value) == (3, player.frame(3))
    player.slider.value = 0
    assert player.picture.value == player.frame(0)
    assert not player.slider.disabled
    assert a_player(ask_at=0).slider.disabled


def test_a_prediction_opens_and_the_verdict_waits_for_the_answers_frame():
    player = a_player(reveal_at=7, because="d writes in place.")
    guess(player, "3")
    assert player.is_open
    for control in (player.entry, player.predict_button, player.show_button):
        assert control.disabled
    for i in range(4, 7):
        player.forward.click()
        assert player.slider.value == i
        assert "step forward" in player.verdict.value
    player.forward.click()
    assert "<b>Right:</b> you said 3. It is 3. d writes in place." in player.verdict.value
    player.back.click()
    assert "step forward" in player.verdict.value


def test_a_wrong_prediction_opens_too():
    player = a_player()
    guess(player, "4")
    player.forward.click()
    assert "<b>Not so:</b> you said 4. It is 3." in player.verdict.value
    assert repr(widgets.score()) == "1 of 1 predicted, 0 right"


def test_show_me_counts_as_not_predicted():
    player = a_player()
    player.show_button.click()
    player.forward.click()
    assert "Not predicted. It is 3." in player.verdict.value
    assert repr(widgets.score()) == "0 of 1 predicted"


def test_a_question_asked_again_keeps_its_first_prediction():
    guess(a_player(), "4")
    guess(a_player(), "3")
    a_player(question="And now?")
    assert repr(widgets.score()) == "1 of 2 predicted, 0 right"
    after_show_me = a_player(question="And then?")
    after_show_me.show_button.click()
    guess(a_player(question="And then?"), "3")
    assert widgets.score().predicted == 1, "who has seen the answer does not predict it any more"


@pytest.mark.parametrize(
    ("answer", "said", "right"),
    [(2, "2", True), (2, " 2.0 ", True), (2, "3", False), ("Block", "block", True), ("a", "b", False)],
)
def test_typed_answers(answer, said, right):
    player = a_player(choices=None, answer=answer)
    guess(player, said)
    assert player.right is right


@pytest.mark.parametrize("said", ["", "  ", "two", "nan", "inf"])
def test_what_is_no_number_opens_nothing(said):
    player = a_player(choices=None, answer=2)
    guess(player, said)
    assert not player.is_open
    assert player.predict_button.disabled == (not said.strip())
    assert ("must be a number" in player.verdict.value) == bool(said.strip())


@pytest.mark.parametrize(
    "options",
    [
        {"answer": 2},
        {"ask_at": 7},
        {"ask_at": -1},
        {"ask_at": 3, "reveal_at": 3},
        {"reveal_at": 8},
        {"storyboard": [3, 8]},
        {"storyboard": [3]},
    ],
)
def test_a_player_that_cannot_work_is_refused(options):
    with pytest.raises(ValueError):
        a_player(**options)
    assert widgets.score().asked == 0


def test_a_player_needs_two_frames():
    with pytest.raises(ValueError, match="at least 2 frames"):
        widgets.PagePlayer([story.one_question().strip()], question="?", answer=1)


def test_any_drawings_can_be_played():
    strips = [story.one_question().strip(), story.four_answers().strip()]
    player = widgets.PagePlayer(strips, question="?", answer=1)
    assert player.frame(1) == strips[1]._repr_html_()
    with pytest.raises(ValueError, match="frame must be 0 … 1"):
        player.frame(2)


def test_what_the_reader_types_is_escaped():
    player = a_player(choices=None, answer="x")
    guess(player, "<b>")
    player.forward.click()
    assert "&lt;b&gt;" in player.verdict.value


# The storyboard


def test_the_players_storyboard():
    board = a_player(reveal_at=7, because="d writes in place.").storyboard()
    text = repr(board)
    order = [
        "Step 3 of 7",
        "Predict: How many? (0 / 1 / 3 / 4)",
        "Step 4 of 7",
        "Step 7 of 7",
        "3. d writes in place.",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    shown, folded = board._repr_html_().split("<details>")
    assert "Step 3" in shown and "How many?" in shown
    assert "Step 7" not in shown and "d writes" not in shown
    assert "Step 7" in folded and "d writes in place." in folded
    assert "Step 6 of 7" in repr(a_player(storyboard=[3, 6, 7]).storyboard())


@pytest.mark.parametrize("make", [a_player, lambda: widgets.FragmentationExplorer([5, 9])])
def test_a_notebook_stores_the_storyboard_beside_the_live_view(make):
    widget = make()
    bundle = widget._repr_mimebundle_()
    board = widget.storyboard()
    assert bundle["text/plain"] == repr(widget) == repr(board)
    assert bundle["text/html"] == board._repr_html_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert 2 <= len(board.frames) <= 4


@pytest.mark.parametrize("make", [a_player, lambda: widgets.FragmentationExplorer([5, 9])])
def test_every_control_has_a_description(make):
    def inside(widget):
        for child in getattr(widget, "children", ()):
            yield child
            yield from inside(child)

    controls = [w for w in inside(make()) if hasattr(w, "disabled")]
    assert len(controls) >= 5
    assert all(control.description for control in controls)
    kinds = {type(w).__name__ for w in inside(make())}
    assert not kinds & {"Output", "interactive"}


# Waste


LENGTHS = np.random.default_rng(0).integers(1, 1400, 1000)


@pytest.mark.parametrize("size", widgets.BLOCK_SIZES)
def test_waste_against_a_loop(size):
    blocks = [-(-int(n) // size) for n in LENGTHS]
    idle = [b * size - int(n) for b, n in zip(blocks, LENGTHS, strict=True)]
    measured = widgets.waste(LENGTHS, size)
    assert measured.idle == pytest.approx(sum(idle) / 1000)
    assert measured.share == pytest.approx(sum(idle) / (sum(blocks) * size))
    assert measured.entries == pytest.approx(sum(blocks) / 1000)
    assert measured.idle == pytest.approx((size - 1) / 2, rel=0.1, abs=0.1)


def test_waste_does_not_grow_with_length_and_tables_grow_as_blocks_shrink():
    short, long = (widgets.waste(factor * LENGTHS, 16) for factor in (1, 11))
    assert long.idle == pytest.approx(short.idle, rel=0.05)
    assert long.share < short.share / 9
    entries = [widgets.waste(LENGTHS, size).entries for size in widgets.BLOCK_SIZES]
    assert entries == sorted(entries, reverse=True)


def test_the_storys_waste():
    assert 3 * widgets.waste([10, 8, 11], 4).idle == 3


@pytest.mark.parametrize("lengths", [[], [0], [-3, 5], [1.5], {}, {"none": []}])
def test_impossible_lengths_are_refused(lengths):
    with pytest.raises(ValueError):
        widgets.FragmentationExplorer(lengths)


@pytest.mark.parametrize("lengths", [[1], [1] * 5, [10**6], LENGTHS, {"one": [1], "two": [2, 3]}])
def test_every_frame_of_the_explorer(lengths):
    explorer = widgets.FragmentationExplorer(lengths)
    guess(explorer, "7")
    for mix in explorer.mixes:
        explorer.mix.value = mix
        for size in widgets.BLOCK_SIZES:
            explorer.size.value = size
            assert explorer.picture.value == explorer.frame(size, mix)
            assert explorer.picture.value.count("▶") == 1
            assert mix in explorer.picture.value
            assert "nan" not in explorer.picture.value
    with pytest.raises(ValueError, match="block_size must be one of"):
        explorer.frame(3)


def test_the_explorer_is_covered_until_a_guess():
    explorer = widgets.FragmentationExplorer(LENGTHS)
    assert explorer.size.disabled and explorer.mix.disabled
    assert "<table" not in explorer.picture.value
    guess(explorer, "most")
    assert "must be a number" in explorer.verdict.value
    assert not explorer.is_open
    guess(explorer, f"{explorer.truth:.2f} %")
    assert explorer.right
    assert not explorer.size.disabled
    assert "<table" in explorer.picture.value


@pytest.mark.parametrize(("far", "right"), [(0.9, True), (-0.9, True), (1.5, False), (40, False)])
def test_how_near_a_guess_must_be(far, right):
    explorer = widgets.FragmentationExplorer(LENGTHS)  # 1.1 %
    guess(explorer, str(explorer.truth + far))
    assert explorer.right is right


def test_the_explorers_storyboard_asks_before_it_shows():
    board = widgets.FragmentationExplorer(LENGTHS).storyboard()
    shown, folded = board._repr_html_().split("<details>")
    assert "<table" not in shown
    assert folded.count("<table") == 3
    assert "half a block is 7.5" in folded
    assert repr(board).index("Predict:") < repr(board).index("block size")


def test_pages_and_story_need_no_widgets():
    code = "import sys; from pagedkv.teach import pages, story; print({'ipywidgets', 'IPython'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
