"""The chain of keys in a real JupyterLab: with keys and with the mouse, in both themes."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

CHAIN = """\
from pagedkv.teach.key_chain import KeyChain

KeyChain("Good night, good night", position=5, letter="l", because="Keys hang together.")"""


@pytest.fixture
def chain(page, lab, open_notebook, run_all):
    """The widget in an open notebook, after its cell has run."""
    page.set_default_timeout(120_000)
    cells = [new_markdown_cell("# Chain"), new_code_cell(CHAIN), new_code_cell("print('ready')")]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(cells=cells, metadata=kernel), lab.root / "chain.ipynb")
    open_notebook("chain.ipynb")
    assert run_all() is True
    page.get_by_text("ready", exact=True).wait_for()
    return page.locator(".pagedkv-widget").last


def test_predict_then_change_letters_and_salt(page, chain, tmp_path, expect, photograph):
    picture, verdict = chain.locator(".pagedkv-picture"), chain.locator(".pagedkv-verdict")
    letter, salt = chain.get_by_label("Letter"), chain.get_by_role("checkbox")

    expect(picture).to_contain_text("the same text comes again")
    expect(letter).to_be_disabled()
    expect(salt).to_be_disabled()
    photograph(tmp_path / "chain_covered.png")
    chain.get_by_role("button", name="0, 2, 3, 4", exact=True).click()
    chain.get_by_role("button", name="Predict").click()
    expect(picture).to_contain_text("position 5 is 'l' instead of 'n'")
    expect(verdict).to_contain_text("Not so: you said 0, 2, 3, 4. It is 0. Keys hang together.")
    photograph(tmp_path / "chain_open.png")

    chain.locator(".noUi-handle").focus()
    page.keyboard.press("End")
    expect(picture).to_contain_text("position 21 is 'l' instead of 't'")
    expect(verdict).to_contain_text("Found: 0, 1, 2, 3, 4; 20 tokens need not be computed.")
    page.keyboard.press("Home")
    expect(verdict).to_contain_text("Found: none; 0 tokens")
    letter.fill("G")  # the letter that stands there
    expect(picture).to_contain_text("the same text comes again")
    expect(verdict).to_contain_text("20 tokens")
    salt.focus()
    page.keyboard.press("Space")
    expect(picture).to_contain_text("with another salt")
    expect(verdict).to_contain_text("Found: none")
