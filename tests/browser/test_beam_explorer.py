"""The beam explorer in a real JupyterLab, with keys and with the mouse, in both themes."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}

EXPLORER = """\
from pagedkv.teach.beam_explorer import BeamExplorer

four = [([",", " ", ".", ";"], [0, 0, 0, 0]), ([",\\n", ", ", ".\\n", ";\\n"], [0, 0, 2, 3])]
one = [([","], [0]), ([",\\n"], [0])]
BeamExplorer("Good night", {1: one, 4: four})"""


@pytest.fixture
def explorer(lab, page, open_notebook, run_all):
    """The widget in an open notebook whose cells have run."""
    page.set_default_timeout(120_000)
    cells = [new_markdown_cell("# Beams"), new_code_cell(EXPLORER), new_code_cell("print('ready')")]
    nbformat.write(new_notebook(cells=cells, metadata=KERNEL), lab.root / "beams.ipynb")
    open_notebook("beams.ipynb")
    assert run_all() is True
    page.get_by_text("ready", exact=True).wait_for()
    return page.locator(".pagedkv-widget").last


def test_the_explorer_with_keys_and_mouse(page, explorer, expect, tmp_path, photograph):
    picture, verdict = explorer.locator(".pagedkv-picture"), explorer.locator(".pagedkv-verdict")
    boxes, beams = picture.locator("td[rowspan]"), explorer.get_by_label("Beams")
    expect(picture).to_contain_text("4 beams about to go on")
    expect(boxes).to_have_count(0)
    expect(beams).to_be_disabled()
    photograph(tmp_path / "beams_covered.png")

    entry = explorer.get_by_label("Your guess")
    entry.fill("6")
    explorer.get_by_role("button", name="Predict").click()
    expect(verdict).to_contain_text("must be 3 numbers")
    entry.fill("44 12 4")
    entry.focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(verdict).to_contain_text("Not so: you said 44 12 4. It is 14, 6 and 4")
    expect(picture).to_contain_text("step 1 of 2")
    expect(picture).to_contain_text("blocks of 4: 6 in use, 2 shared")
    expect(picture.locator('td[rowspan="4"][colspan="4"]')).to_have_count(2)
    photograph(tmp_path / "beams_open.png")

    step, size = explorer.locator(".noUi-handle").nth(0), explorer.locator(".noUi-handle").nth(1)
    step.focus()
    page.keyboard.press("End")
    expect(picture).to_contain_text("step 2 of 2")
    size.focus()
    page.keyboard.press("End")
    expect(picture).to_contain_text("blocks of 16: 4 in use, 0 shared")
    page.keyboard.press("Home")
    expect(picture).to_contain_text("blocks of 1: 17 in use, 11 shared")
    beams.select_option("1")
    expect(picture).to_contain_text("1 beam, step 2 of 2")
    step.focus()
    page.keyboard.press("Home")
    expect(picture).to_contain_text("step 0 of 2")
