"""The glossary's terms are linked once, and only in running text."""

from needs import need_module

need_module("ipywidgets", "course")

from pagedkv.teach.site.words import FirstUses, Term, terms  # noqa: E402

BLOCK, TABLE = Term("Block", ("Block", "KV block")), Term("Block table", ("Block table",))


def uses(*wanted):
    return FirstUses(list(wanted), "GLOSSARY.html")


def link(term, words):
    return f'<a class="term" href="GLOSSARY.html#{term.anchor}">{words}</a>'


def test_the_first_use_is_linked_and_no_other():
    page = uses(BLOCK)
    assert page.link("<p>Two blocks, a block.</p>") == f"<p>Two {link(BLOCK, 'blocks')}, a block.</p>"
    assert page.link("<p>A block.</p>") == "<p>A block.</p>"


def test_the_longer_term_goes_first():
    assert uses(BLOCK, TABLE).link("a block table") == f"a {link(TABLE, 'block table')}"


def test_other_forms_are_linked_too():
    assert uses(BLOCK).link("one KV block") == f"one {link(BLOCK, 'KV block')}"


def test_headings_code_and_links_stay_as_they_are():
    for html in (
        "<h2>A block</h2>",
        "<code>block</code>",
        '<a href="x">block</a>',
        "<pre><b>block</b></pre>",
    ):
        assert uses(BLOCK).link(html) == html


def test_parts_of_words_are_no_uses():
    assert uses(BLOCK).link("blocked, block-size, sub-block") == "blocked, block-size, sub-block"


def test_the_file_names_terms_and_their_other_forms(tmp_path):
    file = tmp_path / "GLOSSARY.md"
    file.write_text(
        "# Glossary\n\n## Block\n\n*Also: KV block, page*\n\nA piece.\n\n## Block table\n\nIds.\n"
    )
    assert terms(file) == [Term("Block", ("Block", "KV block", "page")), TABLE]
