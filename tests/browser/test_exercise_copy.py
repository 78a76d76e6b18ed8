"""A copy worked through as a learner would, in a real JupyterLab: stub, wrong, hint, right."""

CLAMPS = """\
def release(pool, ids):
    for block in ids:
        if pool.in_use[block]:
            pool.in_use[block] = False
            pool.free.insert(0, block)
"""

RIGHT = """\
def release(pool, ids):
    for place, block in enumerate(ids):
        if block not in range(len(pool.in_use)) or not pool.in_use[block] or block in ids[:place]:
            raise ValueError(f"block {block} cannot be given back")
    for block in ids:
        pool.in_use[block] = False
    pool.free = list(ids) + pool.free
"""


def test_stub_wrong_hint_right(page, open_notebook, run_all, tmp_path):
    open_notebook("exercises/02_block_allocator.ipynb")
    run_all()  # False, since the lesson shows refusals on purpose; tests/teach runs copies to the end

    text = page.locator(".jp-Cell", has=page.get_by_role("heading", name="Exercise 2"))
    text.scroll_into_view_if_needed()
    stub = text.locator("xpath=following-sibling::*[1]")
    check = text.locator("xpath=following-sibling::*[2]")
    check.get_by_text("release: not solved yet").wait_for()
    page.screenshot(path=tmp_path / "1-stub.png")

    def write(code):
        stub.locator(".cm-content").click()
        page.keyboard.press("Control+A")
        page.keyboard.insert_text(code)
        page.keyboard.press("Shift+Enter")
        page.keyboard.press("Shift+Enter")

    write(CLAMPS)
    check.get_by_text("release: not right yet").wait_for()
    assert check.get_by_text("Ask yourself").is_visible()
    page.screenshot(path=tmp_path / "2-wrong.png")

    hint = text.locator("details").first
    assert not hint.get_attribute("open")
    hint.locator("summary").click()
    assert hint.get_attribute("open") is not None
    page.screenshot(path=tmp_path / "3-hint.png")

    write(RIGHT)
    check.get_by_text("release: accepted").wait_for()
    page.screenshot(path=tmp_path / "4-right.png")
    assert page.get_by_text("BEGIN SOLUTION").count() == 0
