"""The beam explorer without a browser: tree and pages at every step, the prediction, and what a notebook stores."""

import re

import numpy as np
import pytest
from needs import need_module

need_module("ipywidgets", "course")

from pagedkv.lm import Llama, beam_search  # noqa: E402
from pagedkv.teach import beam_explorer, story, widgets  # noqa: E402
from pagedkv.teach.beam_explorer import BeamExplorer, replay  # noqa: E402

STEPS = 10
SIZES = (1, 2, 4, 8, 16)
WIDTHS = (1, 2, 4)


@pytest.fixture(autouse=True)
def no_score():
    widgets.reset_score()


def steps_of(model, beams):
    return [([model.tokenizer.decode(text) for text in step.texts], step.parents.tolist()) for step in beams]


@pytest.fixture(scope="module")
def searches():
    model = Llama.load()
    night = model.tokenizer.encode(story.NIGHT)
    return {
        width: steps_of(model, beam_search(model, model.new_cache(100, 4), night, STEPS, width))
        for width in WIDTHS
    }


@pytest.fixture
def explorer(searches):
    return BeamExplorer(story.NIGHT, searches)


def guess(widget, text):
    widget.entry.value = text
    widget.predict_button.click()


# The pages


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_pages_are_those_that_the_real_search_leaves(searches, width, size):
    """The package's search, watched: after each step as many blocks in use, shared and owned as in the replay."""
    model, seen = Llama.load(), []
    cache = model.new_cache(100, size)

    def look(event):
        if event.kind == "extend":
            owners = cache.manager.allocator.ref_counts
            seen.append((int((owners > 0).sum()), int((owners > 1).sum()), int(owners.sum())))

    cache.manager.observers.append(look)
    list(beam_search(model, cache, model.tokenizer.encode(story.NIGHT), STEPS, width))
    pages = replay(story.NIGHT, searches[width], size)
    assert [(page.used, page.shared, page.unshared) for page in pages[:STEPS]] == seen


@pytest.mark.parametrize(("size", "used", "shared", "copied"), [(1, 14, 10, 0), (4, 6, 2, 6), (16, 4, 0, 30)])
def test_the_first_letters_of_four_beams(searches, size, used, shared, copied):
    page = replay(story.NIGHT, searches[4], size)[1]
    assert (page.used, page.shared, page.copied_slots) == (used, shared, copied)
    assert page.unshared == 4 * -(-11 // size)


def test_a_block_is_shared_only_where_the_texts_are_one(searches):
    for page in replay(story.NIGHT, searches[4], 4):
        for one, table in enumerate(page.tables):
            for other, theirs in enumerate(page.tables):
                common = next(
                    (i for i, (a, b) in enumerate(zip(table, theirs, strict=True)) if a != b), len(table)
                )
                assert page.texts[one][: 4 * common] == page.texts[other][: 4 * common]


def test_beams_that_begin_alike_stand_side_by_side():
    steps = [(["x", "y"], [0, 0]), (["xa", "ya"], [0, 1]), (["xab", "yac"], [0, 1])]
    assert replay("p", steps, 4)[-1].order == [0, 1]
    mixed = beam_explorer.BeamPages(("pxa", "pya", "pxb", "pyb"), ((),) * 4, 0, 0, 0, 0, 0)
    assert mixed.order == [0, 2, 1, 3]


# The frames


@pytest.mark.parametrize("size", SIZES)
def test_every_frame(explorer, searches, size):
    guess(explorer, "14 6 4")
    for width in WIDTHS:
        for step in range(STEPS + 1):
            explorer.width.value, explorer.step.value, explorer.size.value = width, step, size
            drawn = explorer.frame(width, step, size)
            assert explorer.picture.value == drawn
            assert f"step {step} of {STEPS}" in drawn
            beams = width if step else 1
            assert covered(drawn) == 2 * beams * (10 + step)


def covered(drawn):
    """Positions times beams that the drawing's boxes cover: each beam's letters once, and its blocks once."""
    boxes = re.findall(r'<td style="[^"]*background-color[^"]*" rowspan="(\d+)" colspan="(\d+)">', drawn)
    return sum(int(rows) * int(columns) for rows, columns in boxes)


def test_shared_letters_are_one_cell_and_shared_blocks_too(explorer):
    drawn = explorer.frame(4, 1, 4)
    assert drawn.count('rowspan="4" colspan="1"') == 10
    assert drawn.count('rowspan="4" colspan="4"') == 2
    assert "0&nbsp;×4" in drawn
    assert 'rowspan="4" colspan="1"' in explorer.frame(4, 1, 16)
    assert 'rowspan="4" colspan="11"' not in explorer.frame(4, 1, 16)


def test_the_text_form_leaves_out_what_stands_above(explorer):
    first, *rows = explorer.text(4, 1, 4).splitlines()
    assert first.startswith(
        "4 beams, step 1 of 10, blocks of 4: 6 in use, 2 shared; 12 if nothing were shared"
    )
    assert rows[0].startswith("a  Good␣night")
    assert all(row[3:13] == " " * 10 for row in rows[1:])


# The prediction


def test_before_the_prediction_nothing_is_shown(explorer):
    for control in (explorer.width, explorer.step, explorer.size, explorer.predict_button):
        assert control.disabled
    explorer.step.value = 5
    assert "<table" not in explorer.picture.value


@pytest.mark.parametrize(
    ("said", "right"),
    [("14 6 4", True), ("14, 6 and 4", True), ("44 12 4", False), ("6 14 4", False), ("14 6 1", False)],
)
def test_predictions(explorer, said, right):
    guess(explorer, said)
    assert explorer.right is right
    assert explorer.step.value == 1
    assert "It is 14, 6 and 4" in explorer.verdict.value
    assert "0 of 4 shared in blocks of 16" in explorer.verdict.value


@pytest.mark.parametrize("said", ["6", "14 6", "1 2 3 4", "few"])
def test_what_is_not_a_number_for_each_opens_nothing(explorer, said):
    guess(explorer, said)
    assert not explorer.is_open
    assert "must be 3 numbers" in explorer.verdict.value


def test_show_me_counts_as_not_predicted(explorer):
    explorer.show_button.click()
    assert "Not predicted. It is 14, 6 and 4" in explorer.verdict.value
    assert repr(widgets.score()) == "0 of 1 predicted"


# Stored, and refused


def test_a_notebook_stores_the_storyboard_beside_the_live_view(explorer):
    bundle, board = explorer._repr_mimebundle_(), explorer.storyboard()
    assert bundle["text/plain"] == repr(explorer) == repr(board)
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert len(board.frames) == 4
    shown, folded = board._repr_html_().split("<details>")
    assert "How many blocks" in shown and "in use, " not in shown and "It is" not in shown
    assert "step 1 of 10" in folded and "step 10 of 10" in folded and "It is 14, 6 and 4" in folded


def test_every_control_has_a_description(explorer):
    controls = (explorer.width, explorer.step, explorer.size, explorer.entry)
    assert all(control.description for control in controls)


def test_what_the_model_wrote_is_escaped():
    drawn = BeamExplorer("<b>", {1: [(["<"], [0])]}).frame(1, 1, 4)
    assert "&lt;" in drawn and "<b>" not in drawn


GOOD = [(["x", "y"], [0, 0]), (["xa", "xb"], [0, 0])]


@pytest.mark.parametrize(
    "searches",
    [
        {},
        {2: []},
        {2: GOOD, 1: [(["x"], [0])]},  # of different lengths
        {3: GOOD},
        {2: [(["x", "y"], [0, 1])]},  # there is one parent only
        {2: [*GOOD[:1], (["xa", "ya"], [0, 0])]},  # y's child is called x's
        {2: [*GOOD[:1], (["xab", "xb"], [0, 0])]},
        {2: [*GOOD[:1], (["xa"], [0])]},
        {9: [(list("abcdefghi"), [0] * 9)]},
    ],
)
def test_searches_that_do_not_hang_together_are_refused(searches):
    with pytest.raises(ValueError):
        BeamExplorer("p", searches)
    assert widgets.score().asked == 0


@pytest.mark.parametrize(
    "options",
    [{"width": 3}, {"ask": ()}, {"ask": (3,)}, {"block_sizes": (4,)}, {"block_sizes": (0, 1, 4, 16)}],
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ValueError):
        BeamExplorer("p", {2: GOOD}, **options)


@pytest.mark.parametrize("place", [(3, 1, 4), (4, 11, 4), (4, -1, 4), (4, 1, 3)])
def test_frames_that_do_not_exist(explorer, place):
    with pytest.raises(ValueError):
        explorer.frame(*place)


# The lesson's texts are the same on every machine: no race is close.


def test_the_beams_of_the_lesson_win_by_far_more_than_float_noise():
    model = Llama.load()
    night = model.tokenizer.encode(story.NIGHT)
    for width in (1, 2, 4, 6):
        texts, scores = [[]], np.zeros(1)
        for beams in beam_search(model, model.new_cache(200, 4), night, 20, width):
            logits = np.array([model.forward_full([*night, *text])[-1] for text in texts], float)
            logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            best = np.sort((scores[:, None] + logs).ravel())[::-1][: width + 1]
            assert -np.diff(best).max() > 1e-3
            texts, scores = beams.texts.tolist(), beams.scores


@pytest.mark.parametrize(("seed", "temperature"), [(18, 0.8)])
def test_the_samples_of_the_lesson_are_drawn_far_from_the_edges(seed, temperature):
    model = Llama.load()
    night = model.tokenizer.encode(story.NIGHT).tolist()
    for random in np.random.default_rng(seed).spawn(4):
        tokens = list(night)
        for _ in range(40):
            logits = model.forward_full(tokens)[-1].astype(float) / temperature
            ends = np.cumsum(np.exp(logits - logits.max()))
            number = random.random()
            assert np.abs(ends / ends[-1] - number).min() > 1e-4
            tokens.append(int(np.searchsorted(ends / ends[-1], number, side="right")))
