"""The chain of keys without a browser: every position, both ends, every prediction, and hits against the engine."""

import pytest
from needs import need_module

need_module("ipywidgets", "course")

from pagedkv.manager import BlockManager  # noqa: E402
from pagedkv.teach import story, widgets  # noqa: E402
from pagedkv.teach.key_chain import KeyChain, keys, look_up  # noqa: E402


@pytest.fixture(autouse=True)
def no_score():
    widgets.reset_score()


def a_chain(text=story.TWICE, **options):
    return KeyChain(text, **{"position": 5, "letter": "l", **options})


def guess(widget, text):
    widget.entry.value = text
    widget.predict_button.click()


def found(looked):
    return [i for i, block in enumerate(looked) if block.verdict == "found"]


# What is found


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 17, 22])
def test_the_engine_finds_the_same(block_size, length):
    text = story.TWICE[:length]
    for position in (None, *range(length)):
        prompt = text if position is None else text[:position] + "?" + text[position + 1 :]
        for salt in (None, "x"):
            manager = BlockManager(64, block_size, prefix_cache=True)
            manager.add("old", tokens=story.tokens(text))
            manager.extend("old", None)
            manager.commit("old")
            manager.add("new", tokens=story.tokens(prompt), cache_salt=salt)
            looked = look_up(prompt, text, block_size, salt)
            assert len(found(looked)) * block_size == manager.match("new")
            assert found(looked) == list(range(len(found(looked)))), "no hit behind a miss"


def test_keys_are_the_engines():
    manager = BlockManager(8, 4, prefix_cache=True)
    manager.add("a", tokens=story.tokens(story.TWICE), cache_salt="x")
    manager.extend("a", None)
    manager.commit("a")
    links = [manager.prefix_index.link(block) for block in range(5)]
    assert keys(story.TWICE, 4, "x")[1:] == [link.digest for link in links]


def test_equal_letters_elsewhere_are_told_and_are_no_hit():
    looked = look_up("Good light, good night", story.TWICE, 4)
    assert [block.elsewhere for block in looked] == [(0,), (), (2,), (3,), (1, 4), ()]
    assert [block.verdict for block in looked] == ["found", *["not found"] * 4, "not full"]


def test_the_last_token_of_a_full_prompt_must_run():
    assert [block.verdict for block in look_up(story.DAY, story.DAY, 4)] == ["found", "must run"]


# The frames


@pytest.mark.parametrize("position", range(22))
def test_every_position(position):
    chain = a_chain()
    chain.show_button.click()
    chain.typed.value = "?"
    chain.place.value = position
    assert chain.picture.value == chain.frame(position, "?")
    first = min(position // 4, 5)
    assert chain.frame(position, "?").count(">found<") == first
    assert f"position {position} is &#x27;?&#x27;" in chain.frame(position, "?")
    names = ", ".join(map(str, range(first))) or "none"
    assert f"Found: {names}; {4 * first} tokens" in chain.verdict.value


@pytest.mark.parametrize(
    ("position", "letter"), [(-1, "x"), (22, "x"), (1.5, "x"), (0, ""), (0, "xy"), (0, None)]
)
def test_frames_that_do_not_exist(position, letter):
    for draw in (a_chain().frame, a_chain().text_frame):
        with pytest.raises(ValueError):
            draw(position, letter)


def test_the_changed_letter_is_marked():
    assert "␣<u><b>l</b></u>ig" in a_chain().frame(5, "l")
    assert "␣lig *" in a_chain().text_frame(5, "l")
    assert "<u>" not in a_chain().frame()
    assert "ht<u><b>&lt;</b></u>␣" in a_chain().frame(10, "<")


def test_letters_are_escaped():
    assert "<b>" not in a_chain("<b>ood night").frame()
    assert "&lt;b&gt;" in a_chain("<b>ood night").frame()


# Predictions


def test_before_the_prediction_nothing_is_changed():
    chain = a_chain()
    assert all(control.disabled for control in (chain.place, chain.typed, chain.salt))
    assert chain.picture.value == chain.frame()
    assert "covered until you predict" in chain.verdict.value
    assert chain.choices == ("0, 2, 3, 4", "0", "none", "0, 1, 2, 3, 4")


@pytest.mark.parametrize(("said", "right"), [("0", True), ("0, 2, 3, 4", False), ("none", False)])
def test_a_prediction_opens_it(said, right):
    chain = a_chain(because="Keys hang together.")
    guess(chain, said)
    assert chain.right is right
    assert chain.picture.value == chain.frame(5, "l")
    assert f"you said {said}. It is 0. Keys hang together." in chain.verdict.value
    for control in (chain.entry, chain.predict_button, chain.show_button):
        assert control.disabled
    assert widgets.score().right == right


def test_show_me_counts_as_not_predicted():
    chain = a_chain()
    chain.show_button.click()
    assert "Not predicted. It is 0." in chain.verdict.value
    assert repr(widgets.score()) == "0 of 1 predicted"


def test_salt_and_letter_may_be_changed_afterwards():
    chain = a_chain()
    chain.show_button.click()
    assert not any(control.disabled for control in (chain.place, chain.typed, chain.salt))
    chain.salt.value = True
    assert chain.picture.value == chain.frame(5, "l", other_salt=True)
    assert "Found: none; 0 tokens" in chain.verdict.value
    chain.salt.value = False
    for nothing in ("", "n"):  # no letter, or the one that stands there
        chain.typed.value = nothing
        assert chain.picture.value == chain.frame()
        assert "Found: 0, 1, 2, 3, 4; 20 tokens" in chain.verdict.value
    chain.typed.value = "nx"  # the letter typed last counts
    assert chain.picture.value == chain.frame(5, "x")


def test_a_change_in_the_first_block_leaves_nothing():
    chain = a_chain(position=0, letter="g")
    assert (chain.answer, chain.choices) == ("none", ("1, 2, 3, 4", "none", "0, 1, 2, 3, 4"))
    tail = a_chain(position=21, letter="s")
    assert tail.answer == "0, 1, 2, 3, 4"


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("Good", {}),
        ("x" * 49, {}),
        (story.TWICE, {"position": 22}),
        (story.TWICE, {"position": -1}),
        (story.TWICE, {"letter": "n"}),
        (story.TWICE, {"letter": "no"}),
        (story.TWICE, {"letter": ""}),
        (story.TWICE, {"block_size": 0}),
    ],
)
def test_a_chain_that_cannot_work_is_refused(text, options):
    with pytest.raises(ValueError):
        a_chain(text, **options)
    assert widgets.score().asked == 0


# What a notebook stores


def test_the_storyboard():
    chain = a_chain(because="Keys hang together.")
    text = repr(chain)
    order = [
        "the same text comes again",
        "Predict: Position 5 becomes 'l'",
        "(0, 2, 3, 4 / 0 / none / 0, 1, 2, 3, 4)",
        "position 5 is 'l' instead of 'n'",
        "position 19 is '?' instead of 'g'",
        "with another salt",
        "Keys hang together.",
    ]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)
    shown, folded = chain.storyboard()._repr_html_().split("<details>")
    assert "not found" not in shown and folded.count("not found") == 4 + 1 + 5
    bundle = chain._repr_mimebundle_()
    assert (bundle["text/plain"], bundle["text/html"]) == (text, chain.storyboard()._repr_html_())
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_every_control_has_a_description():
    def inside(widget):
        for child in getattr(widget, "children", ()):
            yield child
            yield from inside(child)

    controls = [w for w in inside(a_chain()) if hasattr(w, "disabled")]
    assert len(controls) == 6
    assert all(control.description for control in controls)
    assert not {type(w).__name__ for w in inside(a_chain())} & {"Output", "interactive"}
