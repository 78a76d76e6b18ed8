"""The decode stepper in a real JupyterLab: with keys and with the mouse, in both themes."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

STEPPER = """\
from pagedkv.teach.decode_stepper import DecodeStepper

DecodeStepper(
    [6, 1, 3], range(1, 11), text="Good night", choices=[5.5, 6.17, 7],
    question="What is the result after block 3?", because="Ten keys weigh a tenth each.",
)"""


@pytest.fixture
def stepper(page, lab, open_notebook, run_all):
    """The widget in an open notebook, after its cell has run."""
    page.set_default_timeout(120_000)
    cells = [new_markdown_cell("# Stepper"), new_code_cell(STEPPER), new_code_cell("print('ready')")]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(cells=cells, metadata=kernel), lab.root / "stepper.ipynb")
    open_notebook("stepper.ipynb")
    assert run_all() is True
    page.get_by_text("ready", exact=True).wait_for()
    return page.locator(".pagedkv-widget").last


def test_predict_then_make_the_last_token_loud(page, stepper, tmp_path, expect, photograph):
    picture, verdict = stepper.locator(".pagedkv-picture"), stepper.locator(".pagedkv-verdict")
    back, forward = (stepper.get_by_role("button", name=name) for name in ("Back", "Forward"))
    handles = stepper.locator(".noUi-handle")

    expect(picture).to_contain_text("step 2 of 3")
    expect(forward).to_be_disabled()
    handles.first.focus()
    page.keyboard.press("End")  # does not pass the cover
    expect(picture).to_contain_text("step 2 of 3")
    back.click()
    expect(picture).to_contain_text("step 1 of 3")
    page.keyboard.press("Space")  # the button has the focus
    expect(picture).to_contain_text("nothing is read yet")
    photograph(tmp_path / "stepper_covered.png")

    stepper.get_by_role("button", name="7", exact=True).click()
    stepper.get_by_role("button", name="Predict").click()
    expect(picture).to_contain_text("step 3 of 3")
    expect(verdict).to_contain_text("Not so: you said 7. It is 5.5. Ten keys weigh a tenth each.")

    handles.last.focus()
    page.keyboard.press("End")
    expect(picture).to_contain_text("the last token has score 12")
    expect(verdict).to_contain_text("100.0 % of the weight, and the result is 10.00")
    photograph(tmp_path / "stepper_open.png")
    page.keyboard.press("Home")
    expect(verdict).to_contain_text("With score -6")
    handles.first.focus()
    page.keyboard.press("ArrowLeft")
    expect(picture).to_contain_text("step 2 of 3")
    expect(forward).to_be_enabled()
