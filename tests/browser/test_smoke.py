"""The browser fixtures work: a slider moved by keys and by mouse changes HTML that the kernel makes."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

WIDGET = """\
import ipywidgets

slider = ipywidgets.IntSlider(value=3, min=1, max=8, description="blocks")
pages = ipywidgets.HTML()
pages.add_class("smoke-pages")


def draw(_=None):
    pages.value = "".join(f'<i class="smoke-page">{block}</i>' for block in range(slider.value))


slider.observe(draw, names="value")
draw()
ipywidgets.VBox([slider, pages])
"""


@pytest.fixture
def smoke_notebook(lab):
    cells = [
        new_markdown_cell("# A slider"),
        new_code_cell(WIDGET),
        new_code_cell("print('ready', slider.value)"),
    ]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(cells=cells, metadata=metadata), lab.root / "smoke.ipynb")
    return "smoke.ipynb"


def test_a_widget_answers_keys_and_mouse(page, smoke_notebook, open_notebook, run_all, tmp_path):
    from playwright.sync_api import expect

    open_notebook(smoke_notebook)
    assert run_all() is True
    expect(page.get_by_text("ready 3")).to_be_visible(timeout=15_000)
    blocks = page.locator(".smoke-page")
    expect(blocks).to_have_count(3)

    handle = page.locator(".noUi-handle")
    handle.focus()
    page.keyboard.press("ArrowRight")
    expect(blocks).to_have_count(4)
    page.keyboard.press("Home")
    expect(blocks).to_have_count(1)

    start = handle.bounding_box()
    track = page.locator(".noUi-target").bounding_box()
    page.mouse.move(start["x"] + start["width"] / 2, start["y"] + start["height"] / 2)
    page.mouse.down()
    page.mouse.move(track["x"] + track["width"] * 0.6, start["y"] + 3, steps=6)
    page.mouse.move(track["x"] + track["width"] + 5, start["y"] + 3, steps=4)
    page.mouse.up()
    expect(page.locator(".widget-readout")).to_have_text("8")
    expect(blocks).to_have_count(8)
    page.screenshot(path=tmp_path / "smoke.png")


def test_a_request_to_another_machine_is_recorded(page):
    """The watch itself: without it the assertion after each test could not fail."""
    page.route("http://elsewhere.invalid/**", lambda route: route.abort())
    page.set_content('<img src="http://elsewhere.invalid/a.png">')
    assert page.offsite == ["http://elsewhere.invalid/a.png"]
    page.offsite.clear()
