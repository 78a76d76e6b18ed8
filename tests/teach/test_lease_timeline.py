"""The evening of the two workers: every pause, with and without tokens; then the widget without a browser."""

import pytest
from needs import need_module

need_module("ipywidgets", "course")

from pagedkv.teach import lease_timeline, story, variants, widgets  # noqa: E402
from pagedkv.teach.lease_timeline import (  # noqa: E402
    END,
    FOREIGN,
    FREE,
    LETTERS,
    LONGEST,
    OWN,
    REFUSED,
    LeaseTimeline,
    play,
)

EVENINGS = [
    (worker, pause, tokens) for worker in (1, 2) for pause in range(LONGEST + 1) for tokens in (False, True)
]


@pytest.fixture(autouse=True)
def no_score():
    widgets.reset_score()


def guess(widget, text):
    widget.entry.value = text
    widget.predict_button.click()


# What happens


def test_the_story():
    """Row 11 of the running example: free 2, then 4; the late write carries 1 against 2."""
    evening = play(1, 7, tokens=True)
    assert evening.timeline.free[8:12] == (2, 4, 4, 2)
    reclaimed, refused = evening.moments[9], evening.moments[12]
    assert "blocks 3 and 4 come free, 2 free become 4" in reclaimed.said
    assert [box.count for box in reclaimed.strip.boxes][:2] == [2, 2]
    assert "Its number is 1, on record is 2: refused" in refused.said
    assert refused.texts == {"c": "Good night. n", "d": "Good night; n"}


def test_without_tokens_the_late_write_makes_another_word():
    last = play(1, 7).moments[END]
    assert last.texts == {"c": "Good night. how ", "d": "Good night; how "}
    assert last.damaged == ("c", "d")


@pytest.mark.parametrize("worker", [1, 2])
def test_where_the_pages_go_for_each_pause(worker):
    outcomes = [play(worker, pause).outcome for pause in range(LONGEST + 1)]
    assert outcomes == [OWN] * 4 + [FREE] * 2 + [FOREIGN] * 5
    fenced = [play(worker, pause, True).outcome for pause in range(LONGEST + 1)]
    assert fenced == [OWN] * 4 + [REFUSED] * 7


@pytest.mark.parametrize("evening", EVENINGS, ids=str)
def test_only_a_foreign_write_does_harm(evening):
    worker, pause, _ = evening
    played = play(*evening)
    assert bool(played.moments[END].damaged) == (played.outcome == FOREIGN)
    assert not any(moment.damaged for moment in played.moments[: played.wakes])
    marks = played.timeline.lanes[f"worker {worker}"]
    assert marks.count("z") == pause
    assert marks.count("!") == (played.outcome in (FREE, FOREIGN))
    assert marks.count("x") == (played.outcome == REFUSED)
    assert {len(lane) for lane in played.timeline.lanes.values()} == {END + 1}


@pytest.mark.parametrize("evening", EVENINGS, ids=str)
def test_blocks_are_reclaimed_once_and_shared_ones_stay(evening):
    played = play(*evening)
    over = [second for second, mark in enumerate(played.timeline.lanes[f"lease {evening[0]}"]) if mark == "R"]
    assert len(over) == (played.outcome != OWN)
    assert "R" not in played.timeline.lanes[f"lease {3 - evening[0]}"]
    for second, moment in enumerate(played.moments):
        names = set(moment.texts)
        assert len(names) == (2 if over and second >= over[0] else 4)
        for box in moment.strip.boxes:
            assert set(box.owners) <= names and box.free == (not box.owners)
        assert moment.strip.boxes[0].count == len(names)


def test_what_the_living_write_is_theirs_when_tokens_are_compared():
    for worker, pause in ((1, 7), (2, 9)):
        texts = play(worker, pause, True).moments[END].texts
        assert all(text.endswith("".join(LETTERS.values())) for text in texts.values())


def test_the_question_by_hand_says_the_same():
    """Variant 0 has the sleep of second 5 to 12 and the lease of 5 s that the board has."""
    case = variants.late_writes(0)
    assert (case.lease, case.beat) == (lease_timeline.LEASE, lease_timeline.BEAT)
    [across] = [letter for letter, _, looked, arrives in case.writes if (looked, arrives) == (5, 12)]
    _, refused, alone = case.answer
    assert (play(1, 7, True).outcome, across in refused) == (REFUSED, True)
    assert (play(1, 7, False).outcome, across in alone) == (FOREIGN, True)


@pytest.mark.parametrize("wrong", [(0, 7), (3, 7), (1, -1), (1, LONGEST + 1), (1, 1.5), ("1", 3)])
def test_an_evening_that_cannot_be_played(wrong):
    with pytest.raises(ValueError):
        play(*wrong)
    with pytest.raises(ValueError):
        LeaseTimeline(*wrong)
    assert widgets.score().asked == 0


# The board


@pytest.mark.parametrize("evening", EVENINGS, ids=str)
def test_every_frame_up_to_the_end(evening):
    board = LeaseTimeline()
    played = play(*evening)
    for second in (0, played.wakes, END):
        text, drawing = board.text_frame(*evening, second), board.frame(*evening, second)
        assert f"second {second}" in text and f"second {second}" in drawing
        assert played.moments[second].said in text
        damaged = len(played.moments[second].damaged)
        assert text.count("(not what it wrote)") == drawing.count("not what it wrote") == damaged
    for second in (-1, END + 1, 0.5):
        with pytest.raises(ValueError):
            board.frame(*evening, second)


def test_before_the_prediction_nothing_has_arrived():
    board = LeaseTimeline()
    controls = (board.worker, board.pause, board.tokens, board.second)
    assert all(control.disabled for control in controls)
    assert board.picture.value == board.frame(1, 7, False, 11)
    assert "!" not in board.text_frame(1, 7, False, 11)
    assert "covered until you predict" in board.verdict.value


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("they land, in blocks of c and d", True),
        ("they are refused", False),
        ("they land, in blocks of a and b", False),
        ("they land, in blocks of nobody", False),
    ],
)
def test_a_prediction_opens_it(said, right):
    board = LeaseTimeline(because="It looked before.")
    guess(board, said)
    assert board.right is right
    assert board.second.value == END and board.picture.value == board.frame(1, 7, False, END)
    assert f"you said {said}. The pages land in other people" in board.verdict.value
    assert board.verdict.value.count("It looked before.") == 1
    assert not any(c.disabled for c in (board.worker, board.pause, board.tokens, board.second))


def test_show_me_and_then_play_at_the_extremes():
    board = LeaseTimeline()
    board.show_button.click()
    assert "Not predicted." in board.verdict.value
    board.tokens.value = True
    assert "are refused" in board.verdict.value
    for pause, found in ((0, "the lease held"), (LONGEST, "are refused")):
        board.pause.value = pause
        assert found in board.verdict.value
        for second in (0, END):
            board.second.value = second
            assert board.picture.value == board.frame(1, pause, True, second)
    board.tokens.value, board.worker.value = False, 2
    assert "a and b read what nobody wrote" in board.verdict.value
    board.pause.value = 4
    assert "Luck, not order" in board.verdict.value


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"tokens": True}, "they are refused"),
        ({"pause": 3}, "they land, in blocks of a and b"),
        ({"pause": 5}, "they land, in blocks of nobody"),
        ({"worker": 2, "pause": 10}, "they land, in blocks of a and b"),
    ],
)
def test_the_answer_of_other_evenings(options, answer):
    assert LeaseTimeline(**options).answer == answer


def test_the_storyboard():
    board = LeaseTimeline(because="It looked before.")
    text = repr(board)
    order = [
        "second 11",
        "Predict: Worker 1 sleeps",
        "second 12",
        "how␣",
        "tokens are compared: second 17",
        "now␣",
        "It looked",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    shown, folded = board.storyboard()._repr_html_().split("<details>")
    assert "how" not in shown and "how" in folded
    bundle = board._repr_mimebundle_()
    assert (bundle["text/plain"], bundle["text/html"]) == (text, board.storyboard()._repr_html_())
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_every_control_has_a_description():
    def inside(widget):
        for child in getattr(widget, "children", ()):
            yield child
            yield from inside(child)

    controls = [w for w in inside(LeaseTimeline()) if hasattr(w, "disabled")]
    assert len(controls) == 7
    assert all(control.description for control in controls)
    assert not {type(w).__name__ for w in inside(LeaseTimeline())} & {"Output", "interactive"}


def test_the_story_is_left_as_it_was():
    play(1, 7)
    assert repr(story.at_the_wall().strip()).count("ht") == 4
