"""A wrong answer of the self-test in 00 leads, in a real JupyterLab, to the section that explains it."""


def test_a_folded_answer_leads_to_its_section_of_the_refresher(page, open_notebook, tmp_path):
    open_notebook("00_start_here.ipynb")
    answer = page.locator("details", has=page.get_by_text("Answer 5"))
    link = answer.get_by_role("link", name="Add a thousand")
    answer.scroll_into_view_if_needed()
    assert not link.is_visible()
    answer.locator("summary").click()
    page.screenshot(path=tmp_path / "answer.png")
    link.click()

    # JupyterLab 4.6 does not go to a heading that it has not rendered yet, so the refresher may open at its
    # top; the list of sections there goes on
    heading = page.get_by_role("heading", name="Add a thousand")
    heading.wait_for()
    opening = page.locator(".jp-Cell", has=page.get_by_role("heading", name="Attention refresher"))
    opening.get_by_role("link", name="Add a thousand").click()
    page.wait_for_function(
        "h => 0 <= h.getBoundingClientRect().top && h.getBoundingClientRect().top < innerHeight / 2",
        arg=heading.element_handle(),
    )
    page.screenshot(path=tmp_path / "section.png")
