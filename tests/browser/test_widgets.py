"""The widgets in a real JupyterLab, with keys and with the mouse, in both themes."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

CHROME = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}

PLAYER = """\
from pagedkv.teach import story, widgets

pool = story.four_answers()
for name, letter in story.POSITION_10.items():
    pool.append({name: letter})
widgets.PagePlayer(
    pool.history,
    question="a, b, c and d write position 10, one after the other. How many blocks are copied?",
    choices=[0, 1, 3, 4],
    answer=3,
    ask_at=3,
    reveal_at=7,
    because="d is the last owner of block 2 and writes in place.",
)"""
EXPLORER = """\
import numpy as np

from pagedkv.teach import widgets

widgets.FragmentationExplorer(np.random.default_rng(0).integers(1, 1400, 1000))"""
READY = "print('ready')"


@pytest.fixture(autouse=True)
def patience(page):
    page.set_default_timeout(120_000)


@pytest.fixture
def notebook(lab):
    """Call with cells' code and a file name; writes a notebook into the served folder."""

    def write(name, *cells):
        cells = [new_markdown_cell("# Widgets"), *(new_code_cell(cell) for cell in (*cells, READY))]
        nbformat.write(new_notebook(cells=cells, metadata=CHROME), lab.root / name)
        return name

    return write


@pytest.fixture
def expect():
    from playwright.sync_api import expect

    expect.set_options(timeout=60_000)  # a machine that does much else at once
    return expect


@pytest.fixture
def run(page, notebook, open_notebook, run_all, expect):
    """Call with a file name and cells: opens and runs them, waits for the last."""

    def run(name, *cells):
        open_notebook(notebook(name, *cells))
        assert run_all() is True
        expect(page.get_by_text("ready", exact=True)).to_be_visible()
        return page.locator(".pagedkv-widget").last

    return run


def set_theme(page, name):
    page.evaluate("name => window.jupyterapp.commands.execute('apputils:change-theme', {theme: name})", name)
    page.wait_for_function("name => document.body.dataset.jpThemeName === name", arg=name)


def photograph(page, path):
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        set_theme(page, theme)
        page.locator("#jupyterlab-splash").wait_for(state="detached")
        page.screenshot(path=path.with_stem(f"{path.stem}_{theme.split()[1].lower()}"))


def test_the_player_with_the_mouse(page, run, expect, tmp_path):
    player = run("player.ipynb", PLAYER)
    picture, verdict = player.locator(".pagedkv-picture"), player.locator(".pagedkv-verdict")
    forward, back = player.get_by_role("button", name="Forward"), player.get_by_role("button", name="Back")
    predict = player.get_by_role("button", name="Predict")

    expect(picture).to_contain_text("Step 3 of 7: fork a to b, c, d")
    expect(forward).to_be_disabled()
    expect(predict).to_be_disabled()
    back.click()
    expect(picture).to_contain_text("Step 2 of 7")
    forward.click()
    expect(picture).to_contain_text("Step 3 of 7")
    photograph(page, tmp_path / "player_covered.png")

    player.get_by_role("button", name="4", exact=True).click()
    predict.click()
    expect(player.get_by_role("button", name="Show me")).to_be_disabled()
    for step in (4, 5, 6):
        forward.click()
        expect(picture).to_contain_text(f"Step {step} of 7")
        expect(verdict).to_contain_text("step forward")
    forward.click()
    expect(verdict).to_contain_text("Not so: you said 4. It is 3. d is the last owner")
    expect(picture.locator("td", has_text="copy of 2")).to_have_count(0)
    expect(forward).to_be_disabled()
    photograph(page, tmp_path / "player_open.png")

    for _ in range(7):
        back.click()
    expect(picture).to_contain_text("Step 0 of 7: start")
    player.locator(".widget-play button").first.click()
    expect(picture).to_contain_text("Step 7 of 7")


def test_the_player_with_keys(page, run, expect):
    run("player_keys.ipynb", PLAYER, PLAYER)
    player = page.locator(".pagedkv-widget").first
    picture, verdict = player.locator(".pagedkv-picture"), player.locator(".pagedkv-verdict")
    handle = player.locator(".noUi-handle")

    expect(picture).to_contain_text("Step 3 of 7")
    handle.focus()
    page.keyboard.press("End")  # does not pass the cover
    expect(player.locator(".widget-readout")).to_have_text("3")
    expect(picture).to_contain_text("Step 3 of 7")
    page.keyboard.press("Home")
    expect(picture).to_contain_text("Step 0 of 7")
    expect(verdict).to_contain_text("covered until you predict")

    player.get_by_role("button", name="3", exact=True).focus()
    page.keyboard.press("Space")
    expect(player.get_by_role("button", name="Predict")).to_be_enabled()
    page.keyboard.press("Tab")  # to 4
    page.keyboard.press("Tab")  # to Predict
    page.keyboard.press("Enter")
    expect(verdict).to_contain_text("step forward")
    handle.focus()
    for step in (4, 5):
        page.keyboard.press("ArrowRight")
        expect(picture).to_contain_text(f"Step {step} of 7")
    page.keyboard.press("End")
    expect(picture).to_contain_text("Step 7 of 7")
    expect(verdict).to_contain_text("Right: you said 3.")

    again = page.locator(".pagedkv-widget").last
    again.get_by_role("button", name="Show me").focus()
    page.keyboard.press("Space")
    expect(again.get_by_role("button", name="Show me")).to_be_disabled()
    again.locator(".noUi-handle").focus()
    page.keyboard.press("End")
    expect(again.locator(".pagedkv-verdict")).to_contain_text("Not predicted. It is 3.")


def test_the_explorer(page, run, expect, tmp_path):
    explorer = run("explorer.ipynb", EXPLORER)
    picture, verdict = explorer.locator(".pagedkv-picture"), explorer.locator(".pagedkv-verdict")
    rows, handle = picture.locator("tr"), explorer.locator(".noUi-handle")
    expect(picture).to_contain_text("1,000 requests")
    expect(rows).to_have_count(0)
    photograph(page, tmp_path / "explorer_covered.png")

    entry = explorer.get_by_label("Your guess")
    entry.fill("a lot")
    explorer.get_by_role("button", name="Predict").click()
    expect(verdict).to_contain_text("must be a number")
    entry.focus()
    entry.fill("50")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(rows).to_have_count(10)
    expect(verdict).to_contain_text("Not so: you said 50. 1.")

    handle.focus()
    page.keyboard.press("Home")
    expect(rows.nth(1)).to_contain_text("▶")
    page.keyboard.press("End")
    expect(rows.nth(9)).to_contain_text("▶")
    explorer.get_by_label("Lengths").select_option("all 11 times as long")
    expect(picture).to_contain_text("all 11 times as long")
    photograph(page, tmp_path / "explorer_open.png")


def test_without_a_kernel_the_storyboard_stands_there(page, lab, notebook, expect, tmp_path):
    """A clone that nobody trusts yet: JupyterLab cleans its HTML, and tables with inline colours stay."""
    from pagedkv.teach import story, widgets

    pool = story.at_the_wall()
    pool.free("d")
    board = widgets.PagePlayer(pool.history, question="What becomes free?", answer=2, ask_at=5).storyboard()
    name = notebook("stored.ipynb", "player", "pool", "tables")
    stored = nbformat.read(lab.root / name, as_version=4)
    drawings = (board, pool, pool.tables())
    for cell, drawing in zip((c for c in stored.cells if c.cell_type == "code"), drawings, strict=False):
        data = {"text/plain": repr(drawing), "text/html": drawing._repr_html_()}
        cell.outputs = [new_output("execute_result", data, execution_count=1)]
        cell.execution_count = 1
    nbformat.write(stored, lab.root / name)

    page.goto(f"{lab.url}/doc/tree/{name}?token={lab.token}&reset")
    cells = page.locator(".jp-OutputArea-output")
    expect(cells).to_have_count(3)
    expect(cells.nth(0)).to_contain_text("What becomes free?")
    expect(cells.nth(0).locator("table").nth(1)).not_to_be_visible()
    cells.nth(0).locator("summary").click()
    expect(cells.nth(0).locator("table").nth(1)).to_be_visible()
    expect(cells.nth(1).locator("s")).to_have_text("ht;␣")
    orange = (
        cells.nth(1).locator("td", has_text="ht,␣").evaluate("td => getComputedStyle(td).backgroundColor")
    )
    assert orange == "rgb(230, 159, 0)"
    assert cells.nth(1).locator("th[scope=col]").count() == 8
    photograph(page, tmp_path / "stored.png")
