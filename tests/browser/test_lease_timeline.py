"""The board of the sleeping worker in a real JupyterLab, with keys and with the mouse, in both themes."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}

BOARD = """\
from pagedkv.teach.lease_timeline import LeaseTimeline

LeaseTimeline(worker=1, pause=7)
"""


@pytest.fixture
def board(lab, page, open_notebook, run_all):
    """The board in an open notebook whose cells have run."""
    page.set_default_timeout(120_000)
    page.set_viewport_size({"width": 1200, "height": 1000})
    cells = [new_markdown_cell("# Leases"), new_code_cell(BOARD), new_code_cell("print('ready')")]
    nbformat.write(new_notebook(cells=cells, metadata=KERNEL), lab.root / "leases.ipynb")
    open_notebook("leases.ipynb")
    assert run_all() is True
    page.get_by_text("ready", exact=True).wait_for()
    return page.locator(".pagedkv-widget")


def test_the_board_with_keys_and_mouse(page, board, expect, tmp_path, photograph):
    picture, verdict = board.locator(".pagedkv-picture"), board.locator(".pagedkv-verdict")
    expect(picture).to_contain_text("second 11")
    expect(picture).not_to_contain_text("how")
    expect(board.get_by_role("button", name="Predict")).to_be_disabled()
    expect(board.get_by_role("button", name="Worker 2")).to_be_disabled()

    board.get_by_role("button", name="they are refused").click()
    predict = board.get_by_role("button", name="Predict")
    expect(predict).to_be_enabled()  # only what is enabled takes the focus
    predict.focus()
    page.keyboard.press("Enter")
    expect(verdict).to_contain_text(
        "Not so: you said they are refused. The pages land in other people's blocks"
    )
    expect(picture).to_contain_text("Good␣night.␣how␣")
    photograph(tmp_path / "leases.png")

    board.get_by_role("button", name="compared", exact=True).focus()
    page.keyboard.press("Enter")
    expect(picture).to_contain_text("Good␣night.␣now␣")
    expect(verdict).to_contain_text("are refused: the number that they carry is old")

    sleep, second = board.locator(".noUi-handle").nth(0), board.locator(".noUi-handle").nth(1)
    sleep.focus()
    page.keyboard.press("Home")
    expect(verdict).to_contain_text("The pages land where they belong: the lease held.")
    sleep.focus()
    page.keyboard.press("End")
    expect(picture).to_contain_text("sleeps 10 s")
    second.focus()
    page.keyboard.press("Home")
    expect(picture).to_contain_text("second 0")
    expect(picture).to_contain_text("Good␣nig····")

    board.get_by_role("button", name="not compared").click()
    board.get_by_role("button", name="Worker 2").click()
    second.focus()
    page.keyboard.press("End")
    expect(picture).to_contain_text("Good␣night,␣ht.␣")
