"""The scheduler's timeline in a real JupyterLab, with keys and with the mouse, in both themes."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}

TIMELINE = """\
from pagedkv.teach import story
from pagedkv.teach.scheduler_timeline import SchedulerTimeline

evening = [(name, len(text), new, arrival) for name, text, new, arrival in story.EVENING]
"""


@pytest.fixture
def widgets(lab, page, open_notebook, run_all):
    """Both questions in an open notebook whose cells have run."""
    page.set_default_timeout(120_000)
    cells = [
        new_markdown_cell("# Timeline"),
        new_code_cell(TIMELINE + "SchedulerTimeline(evening, preemption=1)"),
        new_code_cell('SchedulerTimeline(evening, ask="watermark")'),
        new_code_cell("print('ready')"),
    ]
    nbformat.write(new_notebook(cells=cells, metadata=KERNEL), lab.root / "timeline.ipynb")
    open_notebook("timeline.ipynb")
    assert run_all() is True
    page.get_by_text("ready", exact=True).wait_for()
    return page.locator(".pagedkv-widget").nth(0), page.locator(".pagedkv-widget").nth(1)


def test_the_timeline_with_keys_and_mouse(page, widgets, expect, tmp_path, photograph):
    who, mark = widgets
    picture, verdict = who.locator(".pagedkv-picture"), who.locator(".pagedkv-verdict")
    expect(picture).to_contain_text("Watermark 0, step 8 of 26")
    expect(picture).not_to_contain_text("lord gives way")
    expect(who.get_by_role("button", name="Predict")).to_be_disabled()

    who.get_by_role("button", name="even").click()
    who.get_by_role("button", name="Predict").focus()
    page.keyboard.press("Enter")
    expect(verdict).to_contain_text("Not so: you said even. It is lord")
    expect(picture).to_contain_text("lord gives way, 4 blocks come free")
    photograph(tmp_path / "timeline_who.png")

    watermark, step = who.locator(".noUi-handle").nth(0), who.locator(".noUi-handle").nth(1)
    step.focus()
    page.keyboard.press("End")
    expect(picture).to_contain_text("269 ms on average")
    watermark.focus()
    page.keyboard.press("End")
    expect(picture).to_contain_text("Watermark 4, step 40 of 40")
    expect(picture).to_contain_text("297 ms on average")
    step.focus()
    page.keyboard.press("Home")
    expect(picture).to_contain_text("Watermark 4, step 0 of 40")

    expect(mark.locator(".pagedkv-picture")).to_contain_text("269 ms on average")
    mark.get_by_role("button", name="Show me").click()
    expect(mark.locator(".pagedkv-verdict")).to_contain_text("Not predicted. It is sooner: 214 ms")
    expect(mark.locator(".pagedkv-picture")).to_contain_text("Watermark 2, step 27 of 27")
    photograph(tmp_path / "timeline_mark.png")
