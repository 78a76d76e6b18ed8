"""The board of damages in a real JupyterLab, with keys and with the mouse, in both themes."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}

BOARD = """\
from pagedkv.teach import story
from pagedkv.teach.damage_board import DamageBoard

DamageBoard(story.at_the_wall())
"""


@pytest.fixture
def board(lab, page, open_notebook, run_all):
    """The board in an open notebook whose cells have run."""
    page.set_default_timeout(120_000)
    cells = [new_markdown_cell("# Damage"), new_code_cell(BOARD), new_code_cell("print('ready')")]
    nbformat.write(new_notebook(cells=cells, metadata=KERNEL), lab.root / "damage.ipynb")
    open_notebook("damage.ipynb")
    assert run_all() is True
    page.get_by_text("ready", exact=True).wait_for()
    return page.locator(".pagedkv-widget")


def test_the_board_with_keys_and_mouse(page, board, expect, tmp_path, photograph):
    picture, verdict = board.locator(".pagedkv-picture"), board.locator(".pagedkv-verdict")
    expect(picture).to_contain_text("What is saved")
    expect(picture).not_to_contain_text("light")
    expect(board.get_by_role("button", name="Predict")).to_be_disabled()
    expect(board.get_by_role("button", name="3 ht,")).to_be_disabled()

    board.get_by_role("button", name="all 8").click()
    predict = board.get_by_role("button", name="Predict")
    expect(predict).to_be_enabled()  # only what is enabled takes the focus
    predict.focus()
    page.keyboard.press("Enter")
    expect(verdict).to_contain_text("Not so: you said all 8. It is all 4.")
    expect(picture).to_contain_text("Good␣light;␣")
    expect(picture.get_by_text("4 of 12")).to_have_count(4)
    photograph(tmp_path / "damage.png")

    board.get_by_role("button", name="3 ht,").click()
    expect(picture).to_contain_text("8 of 12")
    expect(picture.get_by_text("12 of 12")).to_have_count(3)
    expect(verdict).to_contain_text("a 8, b 12, c 12, d 12; 4 tokens are lost")

    byte, bit = board.locator(".noUi-handle").nth(0), board.locator(".noUi-handle").nth(1)
    board.get_by_role("button", name="0 Good").click()
    byte.focus()
    page.keyboard.press("Home")
    bit.focus()
    page.keyboard.press("Home")
    expect(picture).to_contain_text("Food␣night,␣")
    expect(picture.get_by_text("0 of 12", exact=True)).to_have_count(4)
    bit.focus()
    page.keyboard.press("End")
    expect(picture).to_contain_text("Bit 7 of byte 0 in block 0")
