"""The scheduler's timeline without a browser: every step, the predictions, and what a notebook stores."""

import pytest
from needs import need_module

need_module("ipywidgets", "course")

from pagedkv.teach import story, widgets  # noqa: E402
from pagedkv.teach.scheduler_timeline import MARKS, SchedulerTimeline, Timeline, serve  # noqa: E402

EVENING = [(name, len(text), new, arrival) for name, text, new, arrival in story.EVENING]
WATERMARKS = range(5)


@pytest.fixture(autouse=True)
def no_score():
    widgets.reset_score()


@pytest.fixture
def who():
    return SchedulerTimeline(EVENING, preemption=1)


@pytest.fixture
def mark():
    return SchedulerTimeline(EVENING, ask="watermark")


def guess(widget, text):
    widget.entry.value = text
    widget.predict_button.click()


# The record


def test_a_request_alone_runs_its_prompt_and_then_one_token_a_step():
    served = serve([("a", 4, 4, 0)], 8, 4)
    assert (served.timeline.lanes, served.done) == ({"a": "Pddd"}, {"a": 4 * 10 + 4 * 2})
    assert served.timeline.free == (7, 6, 6, 6)


@pytest.mark.parametrize("watermark", WATERMARKS)
def test_each_request_writes_what_it_was_asked_for_and_each_loss_is_computed_again(watermark):
    served = serve(EVENING, 8, 4, watermark)
    for name, _, new, arrival in EVENING:
        lane = served.timeline.lanes[name].strip(" ")
        assert sum(lane.count(mark) for mark in "PRd") == new
        assert lane.count("R") == lane.count("x")
        assert len(served.timeline.lanes[name]) - len(served.timeline.lanes[name].lstrip(" ")) == arrival
    assert sum(lane.count("x") for lane in served.timeline.lanes.values()) == len(served.preemptions)
    assert (served.recomputed > 0) == bool(served.preemptions)


def test_who_gives_way_is_the_last_of_those_that_run():
    served = serve(EVENING, 8, 4)
    names = [name for name, *_ in EVENING]
    for step, victim, _ in served.preemptions:
        ran = [name for name in names if served.timeline.lanes[name][step] in "dx"]
        assert ran[-1] == victim


def test_nobody_arrives_in_a_hole_of_time_without_a_lane_mark():
    served = serve([("a", 4, 1, 0), ("b", 4, 1, 3)], 8, 4)
    assert served.timeline.lanes == {"a": "P   ", "b": "   P"}


# The drawing


def test_text_form():
    drawn = Timeline({"night": "Pdd", "day": "··Pdx·R"}, (5, 5, 12), "Two")
    assert repr(drawn).splitlines() == [
        "Two",
        "       0    5",
        "night  Pdd",
        "day    ··Pdx·R",
        "free   55+",
        "P runs its prompt, d writes one token, x gives way, R is computed again, · waits",
    ]


def test_a_picture_keeps_its_width_however_far_one_has_stepped():
    whole = serve(EVENING, 8, 4).timeline
    widths = {whole.until(step)._repr_html_().count("<td") for step in range(whole.steps)}
    free_cells = range(1, whole.steps + 1)
    assert widths == {6 * whole.steps + n for n in free_cells}


def test_every_mark_is_a_letter_with_a_meaning():
    assert len({meaning for meaning, _ in MARKS.values()}) == len(MARKS)
    with pytest.raises(ValueError, match="'q'"):
        Timeline({"a": "Pq"})


def test_names_are_escaped():
    assert "<b>" not in Timeline({"<b>": "P"}, caption="<b>")._repr_html_()


@pytest.mark.parametrize("watermark", WATERMARKS)
def test_every_frame(who, watermark):
    who.show_button.click()
    who.watermark.value = watermark
    for step in range(who.served[watermark].timeline.steps):
        who.step.value = step
        assert who.picture.value == who.frame(watermark, step)
        assert f"Watermark {watermark}, step {step} of {who.step.max}" in who.picture.value
        assert f"Watermark {watermark}, step {step} of" in who.text(watermark, step)


# The predictions


def test_before_the_prediction_the_victim_is_not_shown(who):
    assert who.watermark.disabled and who.step.disabled
    assert "Step 8" not in who.picture.value and "step 8 of 26" in who.picture.value
    assert "lord gives way" not in who.picture.value
    who.step.value = 20  # as if it were moved all the same
    assert "step 8 of 26" in who.picture.value


@pytest.mark.parametrize(("said", "right"), [("lord", True), ("even", False), ("day", False)])
def test_predicting_who(who, said, right):
    guess(who, said)
    assert who.right is right
    assert "It is lord, of those that run the last that arrived: 4 blocks come free" in who.verdict.value
    assert "lord gives way" in who.picture.value


@pytest.mark.parametrize(("said", "right"), [("sooner", True), ("later", False), ("no change", False)])
def test_predicting_the_watermark(mark, said, right):
    assert "269 ms on average" in mark.picture.value
    guess(mark, said)
    assert mark.right is right
    assert "214 ms instead of 269, with 0 preemptions instead of 3" in mark.verdict.value
    assert "Watermark 2, step 27 of 27" in mark.picture.value


def test_a_watermark_can_be_too_much(mark):
    assert SchedulerTimeline(EVENING, ask="watermark", watermark=4).answer == "later"
    mark.show_button.click()
    mark.watermark.value = 4
    assert "297 ms on average" in mark.picture.value, "who looks at the end goes on looking at the end"


def test_show_me_counts_as_not_predicted(who):
    who.show_button.click()
    assert "Not predicted. It is lord" in who.verdict.value
    assert repr(widgets.score()) == "0 of 1 predicted"


def test_the_slider_never_points_behind_the_last_step(mark):
    mark.show_button.click()
    mark.watermark.value = 4
    assert (mark.step.value, mark.step.max) == (40, 40)
    mark.watermark.value = 0
    assert (mark.step.value, mark.step.max) == (26, 26)
    mark.step.value = 3
    mark.watermark.value = 4
    assert mark.step.value == 3


# Stored, and refused


@pytest.mark.parametrize("ask", ["victim", "watermark"])
def test_a_notebook_stores_the_storyboard_beside_the_live_view(ask):
    widget = SchedulerTimeline(EVENING, ask=ask, preemption=1)
    bundle, board = widget._repr_mimebundle_(), widget.storyboard()
    assert bundle["text/plain"] == repr(widget) == repr(board)
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert len(board.frames) == 3
    shown, folded = board._repr_html_().split("<details>")
    assert widget._truth() not in shown and "It is " in folded
    assert widget.question in shown


def test_every_control_has_a_description(who):
    assert all(control.description for control in (who.watermark, who.step, who.entry))


@pytest.mark.parametrize(
    ("requests", "options"),
    [
        ([], {}),
        ([("a", 4, 2, 3), ("b", 4, 2, 0)], {}),  # out of order
        ([("a", 4, 2, 0), ("a", 4, 2, 0)], {}),  # one name twice
        ([("a", 40, 2, 0)], {}),  # too long for the pool
        ([("a", 4, 2, 0)], {}),  # nobody has to give way
        (EVENING, {"preemption": 3}),
        (EVENING, {"ask": "when"}),
        (EVENING, {"watermark": 0}),
        (EVENING, {"watermark": 5}),
        (EVENING, {"most": 8}),
        ([("a", 4, 300, 0)], {"num_blocks": 100}),
    ],
)
def test_what_cannot_be_served_is_refused(requests, options):
    with pytest.raises(ValueError):
        SchedulerTimeline(requests, **options)
    assert widgets.score().asked == 0


@pytest.mark.parametrize("place", [(5, 0), (0, 27), (0, -1), (-1, 0)])
def test_frames_that_do_not_exist(who, place):
    with pytest.raises(ValueError):
        who.frame(*place)
