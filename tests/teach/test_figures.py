"""Figures that lessons share: what is drawn is what the table says."""

import pytest
from needs import need_module

from pagedkv.teach import story


@pytest.fixture
def drawn():
    need_module("matplotlib", "course").use("Agg")
    from matplotlib import pyplot as plt

    from pagedkv.teach import figures

    def draw(*args, **kwargs):
        return figures.through_the_table(*args, **kwargs).axes[0]

    yield draw
    plt.close("all")


def arrows(axes):
    """(start, end) of every arrow, left to right and top to bottom as drawn."""
    found = [t for t in axes.texts if getattr(t, "arrow_patch", None)]
    return [(t.get_position(), t.xy) for t in found]


def words(axes):
    return [t.get_text() for t in axes.texts if t.get_text()]


def test_an_arrow_goes_from_each_entry_to_the_block_it_names(drawn):
    table, text, _ = story.morrow_goes_on()
    axes = drawn(table, text, name="morrow", others={"day": ([3, 4], story.DAY)})
    to_memory = [end for _, end in arrows(axes)][1::2]
    middle = {t.get_text(): t.get_position()[0] for t in axes.texts if t.get_text().startswith("block ")}
    assert [end[0] for end in to_memory] == [middle[f"block {block}"] for block in table]


def test_each_letter_stands_above_in_order_and_below_in_its_block(drawn):
    table, text, letters = story.morrow_goes_on()
    shown = [w for w in words(drawn(table, text, name="morrow")) if len(w) == 1 and not w.isdigit()]
    below = "".join(letters.block(block) for block in range(8))
    assert "".join(shown) == (below + text + "···").replace(" ", "␣")


@pytest.mark.parametrize(("table", "text"), [([2], "a"), ([1, 0], "Good day"), ([], "")])
def test_positions_are_counted_from_0_to_the_last_token(drawn, table, text):
    axes = drawn(table, text)
    numbers = [t.get_text() for t in axes.texts if t.get_text().isdigit() and t.get_fontsize() == 9]
    assert numbers == [str(p) for p in range(len(text))]
    assert len(arrows(axes)) == 2 * len(table)
