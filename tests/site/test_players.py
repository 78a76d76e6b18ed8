"""A player holds every frame that a widget's controls can reach, and no other."""

import json

import pytest
from needs import need_module
from site_pages import frame_of

need_module("ipywidgets", "course")

from pagedkv.teach import story, widgets  # noqa: E402
from pagedkv.teach.decode_stepper import DecodeStepper  # noqa: E402
from pagedkv.teach.key_chain import KeyChain  # noqa: E402
from pagedkv.teach.scheduler_timeline import SchedulerTimeline  # noqa: E402
from pagedkv.teach.site import players  # noqa: E402


def fork_player():
    pool = story.one_question()
    pool.fork("a", ["b"])
    pool.append({"a": ","})
    pool.append({"b": "!"})
    question = {
        "question": "Who copies?",
        "choices": ["a", "b"],
        "answer": "a",
        "because": "b is alone then.",
    }
    return widgets.PagePlayer(pool.history, ask_at=1, reveal_at=2, **question)


def decode_stepper():
    return DecodeStepper([6, 1, 3], range(1, 11), question="The result?", answer=5.5)


def key_chain():
    return KeyChain(story.TWICE, position=5, letter="l")


def server():
    requests = [(name, len(text), new, arrival) for name, text, new, arrival in story.EVENING]
    return SchedulerTimeline(requests, ask="watermark", most=2)


def positions(player):
    """The positions of the controls, in the order of `opened`."""
    found = [()]
    for control in player.controls:
        found = [(*before, label) for before in found for label in control.labels]
    return found


def value(label):
    """A label as the frame functions want it."""
    if label in ("True", "False"):
        return label == "True"
    return int(label) if label.lstrip("-").isdigit() else label


@pytest.mark.parametrize("make", [fork_player, decode_stepper, key_chain, server])
def test_every_position_has_the_html_of_the_frame_function(make):
    player = players.record(make())
    fresh, reached = make(), 0
    for labels, number in zip(positions(player), player.opened, strict=True):
        values = list(map(value, labels))
        if number < 0:
            with pytest.raises(ValueError):
                frame_of(fresh, values)
            continue
        assert player.frame(number) == frame_of(fresh, values), labels
        reached += 1
    assert reached > 2


def test_before_the_answer_only_what_may_be_seen_is_there():
    player = players.record(fork_player())
    assert [number >= 0 for number in player.covered] == [True, True, False, False, False, False]
    assert all(number >= 0 for number in player.opened)


def test_a_slider_whose_end_depends_on_another_control_has_all_its_ends():
    widget = server()
    player = players.record(widget)
    steps = len(player.controls[1].labels)
    ends = [sum(n >= 0 for n in player.opened[w * steps : (w + 1) * steps]) for w in range(3)]
    assert ends == [served.timeline.steps for served in server().served]
    assert len(set(ends)) > 1


def test_it_knows_which_choice_is_right_and_what_to_say():
    player = players.record(fork_player())
    assert dict(zip(player.choices, player.right, strict=True)) == {"a": True, "b": False}
    said = player.sentences[player.opened_says[-1]]
    assert said == "It is a. b is alone then." and player.judged[player.opened_says[-1]]
    assert not player.judged[player.covered_says[0]]


def test_forward_moves_the_steps():
    assert players.record(server()).main == 1
    assert players.record(decode_stepper()).main == 0
    assert players.record(key_chain()).main == 0


def test_frames_share_their_pieces():
    player = players.record(server())
    apart = sum(len(player.frame(number)) for number in player.opened if number >= 0)
    assert len(player.dumps()) < apart / 10


def test_the_json_cannot_end_the_script_it_stands_in():
    player = players.record(fork_player())
    assert "</" not in player.dumps()
    assert json.loads(player.dumps())["pieces"] == player.pieces


def test_too_many_frames_are_refused(monkeypatch):
    monkeypatch.setattr(players, "MOST_FRAMES", 3)
    with pytest.raises(ValueError, match="6 positions, more than 3"):
        players.record(fork_player())


# ---- the lesson's own cells make the widget


def lesson(*sources, story_text=""):
    nbformat = need_module("nbformat", "test")
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    html = "<p>(In JupyterLab, run this cell to play.)</p>"
    data = {"text/plain": story_text or repr(fork_player()), "text/html": html}
    cells[-1].outputs = [nbformat.v4.new_output("execute_result", data)]
    return nbformat.v4.new_notebook(cells=cells)


MAKE = """
pool.append({"b": "!"})
PagePlayer(pool.history, question="Who copies?", choices=["a", "b"], answer="a", ask_at=1, reveal_at=2,
           because="b is alone then.")"""
BEFORE = """%matplotlib inline
from pagedkv.teach import story
from pagedkv.teach.widgets import PagePlayer
print("not seen")
pool = story.one_question()
pool.fork("a", ["b"])
pool.append({"a": ","})"""


def test_a_lesson_makes_its_widget(capsys):
    nb = lesson(BEFORE, MAKE)
    found = players.widgets_of(nb, "a lesson")
    assert list(found) == [nb.cells[-1].id]
    assert repr(found[nb.cells[-1].id]) == repr(fork_player())
    assert capsys.readouterr().out == ""


def test_a_lesson_that_gives_something_else_than_is_stored_is_refused():
    with pytest.raises(ValueError, match="run `make notebooks`"):
        players.widgets_of(lesson(BEFORE, MAKE, story_text="Predict: old"), "a lesson")


def test_a_cell_that_fails_is_named():
    nb = lesson(BEFORE, "1 / 0", MAKE)
    with pytest.raises(ValueError, match=r"a lesson, cell .*ZeroDivisionError"):
        players.widgets_of(nb, "a lesson")
    nb.cells[1].metadata["tags"] = ["raises-exception"]
    assert players.widgets_of(nb, "a lesson")
