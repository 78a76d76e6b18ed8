"""The stepper without a browser: every step, both ends, every prediction, and numbers against dense attention."""

import numpy as np
import pytest
from needs import need_module

need_module("ipywidgets", "course")

from pagedkv.attention import dense_attention  # noqa: E402
from pagedkv.teach import widgets  # noqa: E402
from pagedkv.teach.decode_stepper import HIGHEST, LOWEST, DecodeStepper, running  # noqa: E402


@pytest.fixture(autouse=True)
def no_score():
    widgets.reset_score()


def a_stepper(**options):
    options = {"question": "What then?", "choices": [5.5, 6.17, 7], "text": "Good night", **options}
    return DecodeStepper([6, 1, 3], range(1, 11), **options)


def guess(widget, text):
    widget.entry.value = text
    widget.predict_button.click()


# The numbers


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_what_runs_along_is_dense_attention_over_the_keys_so_far(block_size, length):
    scores, values = np.random.default_rng(length).normal(size=(2, length)) * 5
    states = running(scores, values, block_size)
    assert len(states) == -(-length // block_size)
    for number, state in enumerate(states, start=1):
        end = min(number * block_size, length)
        k, v = scores[:end, None, None], values[:end, None, None]
        out, lse = dense_attention(np.ones((1, 1, 1)), k, v, scale=1, return_lse=True)
        assert (state.out, state.lse) == pytest.approx((out.item(), lse.item()))
        assert len(state.shares) == end
        assert sum(state.shares) == pytest.approx(1)
        assert state.peak == scores[:end].max()


def test_the_storys_numbers():
    first, second, tail = running(np.zeros(10), np.arange(1, 11), 4)
    assert (first.out, second.out, tail.out) == pytest.approx((2.5, 4.5, 5.5))
    assert (second.lse, tail.lse) == pytest.approx((np.log(8), np.log(10)))
    assert (second.own, tail.own) == (6.5, 9.5)


def test_a_late_large_score_rescales_everything_before_it():
    *_, tail = running([*[0] * 9, 6], np.arange(1, 11), 4)
    assert tail.earlier == pytest.approx(np.exp(-6))
    assert tail.shares[-1] > 0.97
    assert tail.lse == pytest.approx(np.log(9 + np.exp(6)))


def test_scores_of_a_thousand_do_not_overflow():
    with np.errstate(all="raise", under="ignore"):
        *_, tail = running([0, 1000, 2000], [1, 2, 3], 1)
    assert (tail.out, tail.earlier) == (3, 0)
    *_, faint = running([1000, 0], [1, 2], 1)
    assert (faint.own, faint.out) == (2, 1)


# The frames


@pytest.mark.parametrize("i", range(4))
def test_every_step(i):
    stepper = a_stepper()
    guess(stepper, "5.5")
    stepper.slider.value = i
    assert stepper.picture.value == stepper.frame(i)
    assert (stepper.back.disabled, stepper.forward.disabled) == (i == 0, i == 3)
    for drawing in (stepper.frame(i), stepper.text_frame(i)):
        assert f"step {i} of 3" in drawing
        assert ("2.50" in drawing, "4.50" in drawing, "5.50" in drawing) == (i > 0, i > 1, i > 2)
    assert stepper.frame(i).count("<tr") == 6 + 1 + i


def test_frames_that_do_not_exist():
    stepper = a_stepper()
    for i in (-1, 4, 1.5):
        with pytest.raises(ValueError):
            stepper.frame(i)


def test_the_read_blocks_carry_weights_and_the_others_none():
    text = a_stepper().text_frame(2)
    assert "▶1" in text
    weights = next(line for line in text.splitlines() if line.startswith("weight"))
    assert a_stepper().frame(2).count("dashed") == 2 * 5  # two tokens in five rows
    assert weights.split("%")[1].split() == ["12.5"] * 4 + ["|"] + ["12.5"] * 4 + ["|", "·", "·"]


def test_letters_are_escaped_and_unknown_ones_drawn():
    assert "&lt;" in a_stepper(text="<b>").frame(3)
    assert "▪" in a_stepper(text="").text_frame(0)


# Predictions


def test_before_the_prediction_the_tail_is_covered():
    stepper = a_stepper()
    assert stepper.forward.disabled and stepper.score.disabled
    stepper.slider.value = 3
    assert stepper.slider.value == 2
    stepper.forward.click()
    assert "5.50" not in stepper.picture.value
    stepper.slider.value = 0
    assert "nothing is read yet" in stepper.picture.value
    assert "covered until you predict" in stepper.verdict.value


@pytest.mark.parametrize(("said", "right"), [("5.5", True), ("7", False), ("6.17", False)])
def test_a_prediction_opens_the_tail(said, right):
    stepper = a_stepper(because="A tenth each.")
    guess(stepper, said)
    assert stepper.right is right
    assert "step 3 of 3" in stepper.picture.value
    assert f"you said {said}. It is 5.5. A tenth each." in stepper.verdict.value
    assert not stepper.score.disabled
    for control in (stepper.entry, stepper.predict_button, stepper.show_button):
        assert control.disabled
    assert widgets.score().right == right


def test_show_me_counts_as_not_predicted():
    stepper = a_stepper()
    stepper.show_button.click()
    assert "Not predicted. It is 5.5." in stepper.verdict.value
    assert repr(widgets.score()) == "0 of 1 predicted"


@pytest.mark.parametrize("score", [LOWEST, 1, HIGHEST])
def test_the_last_tokens_score_may_be_changed_afterwards(score):
    stepper = a_stepper()
    stepper.show_button.click()
    stepper.score.value = score
    assert stepper.picture.value == stepper.frame(3, score)
    assert f"With score {score} for the last token" in stepper.verdict.value
    stepper.back.click()
    assert stepper.picture.value == stepper.frame(2, score)
    stepper.score.value = 0
    assert stepper.picture.value == stepper.frame(2)


@pytest.mark.parametrize(
    ("table", "values", "options"),
    [
        ([6, 1], range(1, 11), {}),
        ([6], range(4), {}),
        ([6, 1, 3], [*range(9), np.nan], {}),
        ([6, 1, 3], range(1, 11), {"scores": [0]}),
        ([6, 1, 3], range(1, 11), {"choices": [1, 2]}),
        (list(range(9)), range(33), {}),
        ([6, 1, 3], range(1, 11), {"block_size": 0}),
    ],
)
def test_a_stepper_that_cannot_work_is_refused(table, values, options):
    with pytest.raises(ValueError):
        DecodeStepper(table, values, question="What then?", **options)
    assert widgets.score().asked == 0


# What a notebook stores


def test_the_storyboard():
    stepper = a_stepper(because="A tenth each.")
    text = repr(stepper)
    order = [
        "step 2 of 3",
        "Predict: What then? (5.5 / 6.17 / 7)",
        "step 3 of 3",
        "has score 6",
        "A tenth each.",
    ]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)
    shown, folded = stepper.storyboard()._repr_html_().split("<details>")
    assert "step 2" in shown and "step 3" not in shown
    assert "5.50" in folded
    bundle = stepper._repr_mimebundle_()
    assert (bundle["text/plain"], bundle["text/html"]) == (text, stepper.storyboard()._repr_html_())
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_every_control_has_a_description():
    def inside(widget):
        for child in getattr(widget, "children", ()):
            yield child
            yield from inside(child)

    controls = [w for w in inside(a_stepper()) if hasattr(w, "disabled")]
    assert len(controls) == 7
    assert all(control.description for control in controls)
    assert not {type(w).__name__ for w in inside(a_stepper())} & {"Output", "interactive"}
