"""The pages say what the notebooks say, lead somewhere, and can be read by everybody."""

import filecmp
import itertools
import os
import re
import subprocess
import sys
from urllib.parse import unquote

import pytest
from needs import ROOT, STRESS
from site_pages import built, soup

from pagedkv.teach import notebooks

LESSONS = notebooks.lessons(ROOT / "notebooks")
NAMES = [path.stem for path in LESSONS]
OTHERS = ["index", "GLOSSARY", "NAMES"]


@pytest.fixture(scope="module")
def site():
    return built()


@pytest.fixture(scope="module")
def pages(site):
    return {path.stem: soup(path) for path in site.pages}


# ---- the same as the notebooks


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_the_code_and_the_outputs_of_its_notebook(pages, name):
    shown = pages[name].select("[data-cell]")
    stored = notebooks.read(ROOT / "notebooks" / f"{name}.ipynb").cells
    assert [part["data-cell"] for part in shown] == [cell.id for cell in stored]
    for part, cell in zip(shown, stored, strict=True):
        if cell.cell_type == "code":
            assert part.select_one(".highlight pre").get_text().rstrip("\n") == cell.source.strip("\n"), (
                cell.id
            )
            assert _shown_outputs(part) == [_stored_output(output) for output in cell.outputs], cell.id


def _shown_outputs(part):
    found = []
    for out in part.select(".out"):
        still = out.find_parent(class_="still")
        if out.find_parent(class_="out") or (still and out.find_parent("details", class_="whole")):
            continue
        if "drawing" in out["class"]:
            found.append(" ".join(out.get_text(" ").split()))
        elif out.name == "figure":
            found.append(out.img["src"].split("/")[0])
        else:
            found.append(out.pre.get_text())
    return found


def _stored_output(output):
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return "\n".join(output.traceback)
    if "text/html" in output.data:
        from bs4 import BeautifulSoup

        return " ".join(BeautifulSoup(output.data["text/html"], "html.parser").get_text(" ").split())
    return "figures" if "image/png" in output.data else output.data["text/plain"]


@pytest.mark.parametrize("name", NAMES)
def test_every_widget_is_a_player_with_its_story_in_words(site, pages, name):
    widgets = site.widgets[name]
    players = {
        player.find_parent(class_="cell")["data-cell"]: player for player in pages[name].select(".player")
    }
    assert list(players) == list(widgets)
    for cell, widget in widgets.items():
        still = players[cell].select_one(".still")
        assert repr(widget) in still.get_text()
        assert len(still.select("details.whole .drawing")) == 2  # the first frame and the last one


# ---- ask first


@pytest.mark.parametrize("name", NAMES)
def test_what_a_prediction_asks_for_is_covered(pages, name):
    page = pages[name]
    covered = {cell["data-cell"] for part in page.select(".covered") for cell in part.select(".cell")}
    asked = 0
    cells = notebooks.read(ROOT / "notebooks" / f"{name}.ipynb").cells
    for cell, below in itertools.pairwise(cells):
        asks = cell.cell_type == "markdown" and "**Predict" in cell.source.strip().split("\n\n")[-1]
        if asks and below.cell_type == "code" and below.outputs:
            place = page.select_one(f'[data-cell="{below.id}"]')
            assert below.id in covered or place.select_one(".player"), below.id
            asked += 1
    assert asked
    for part in page.select(".covered"):
        assert len(part.select("form.gate[hidden]")) == 1  # a script shows it, and covers the outputs
        told = part.find_next_sibling().select_one(".reveals")  # and the text that gives them away
        assert told is None or not told.select("h2, h3, h4, [id]")  # what a link may lead to stays


@pytest.mark.parametrize("name", NAMES)
def test_solutions_and_hints_are_folded(pages, name):
    page = pages[name]
    for cell in notebooks.read(ROOT / "notebooks" / f"{name}.ipynb").cells:
        if "### BEGIN SOLUTION" in cell.source:
            assert page.select_one(f'[data-cell="{cell.id}"]').find_parent("details", class_="solution")
    for heading in page.select("h3[id^=Solution]"):
        assert not heading.find_parent("details")  # what is in the fold stays visible
    for hint in page.find_all("summary", string=re.compile("^Hint")):
        assert not hint.parent.has_attr("open")


@pytest.mark.parametrize("name", NAMES)
def test_cells_stand_in_the_lesson_a_cover_or_a_solution(pages, name):
    """Folds and covers are closed where they should be; a browser would repair it in its own way."""
    for cell in pages[name].select("[data-cell]"):
        place = cell.parent
        assert place.name == "article" or {"covered", "solution"} & set(place["class"]), cell["data-cell"]
        if place.name != "article":
            assert place.parent.name in ("article", "details")


# ---- links, anchors, pictures


def _targets(page):
    for tag, attribute in (("a", "href"), ("link", "href"), ("script", "src"), ("img", "src")):
        yield from (node[attribute] for node in page.find_all(tag) if node.has_attr(attribute))


def test_internal_links_lead_somewhere(site, pages):
    anchors = {name: {node["id"] for node in page.find_all(id=True)} for name, page in pages.items()}
    for name, page in pages.items():
        for target in _targets(page):
            if re.match(r"https?:", target):
                continue
            file, _, anchor = target.partition("#")
            assert not file or (site.out / file).exists(), f"{name}: {target}"
            if anchor:
                there = file.removesuffix(".html") or name
                assert unquote(anchor) in anchors[there] | {"main"}, f"{name}: {target}"


def test_nothing_is_loaded_from_elsewhere(site, pages):
    for name, page in pages.items():
        loaded = [
            node.get("src") or node.get("href")
            for node in page.select("script[src], link, img, iframe, source")
        ]
        assert not [address for address in loaded if re.match(r"[a-z]+:|//", address)], name
    for path in (site.out / "static").iterdir():
        without_names = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|@import|url\(", without_names), path.name


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_headings_have_anchors_of_their_own(pages, name):
    headings = pages[name].select("main :is(h1, h2, h3, h4)")
    ids = [heading.get("id") for heading in headings if heading.name != "h1"]
    assert all(ids)
    everything = [node["id"] for node in pages[name].find_all(id=True)]
    assert len(everything) == len(set(everything))
    assert len(pages[name].find_all("h1")) == 1


@pytest.mark.parametrize("name", NAMES)
def test_pictures_have_a_text_alternative(site, pages, name):
    for picture in pages[name].find_all("img"):
        assert len(picture["alt"].split()) >= 5, picture["src"]
        assert (site.out / picture["src"]).stat().st_size > 1000


# ---- what stands around the lessons


def test_the_course_map_leads_to_every_lesson_its_copy_and_its_binder(pages):
    links = {link["href"] for link in pages["index"].find_all("a")}
    for name in NAMES:
        assert {f"{name}.html", f"copies/{name}.ipynb"} <= links
        assert any(
            link.startswith("https://mybinder.org/v2/gh/") and link.endswith(f"{name}.ipynb")
            for link in links
        )


def test_lessons_lead_to_the_next_one(pages):
    for name, after in itertools.pairwise(NAMES):
        assert f"{after}.html" in [link["href"] for link in pages[name].select(".onward a")]


def test_the_copies_are_those_of_the_exercises_folder(site):
    for path in (ROOT / "notebooks" / "exercises").glob("*.ipynb"):
        assert (site.out / "copies" / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_footer_says_on_which_versions_the_outputs_were_checked(pages):
    for page in pages.values():
        assert re.search(r"Python 3\.\d+ with NumPy \d", page.footer.get_text())


def test_terms_of_the_glossary_are_linked_where_a_lesson_first_uses_them(pages):
    entries = {heading["id"] for heading in pages["GLOSSARY"].find_all("h2")}
    linked = set()
    for name in NAMES:
        here = [link["href"].partition("#")[2] for link in pages[name].select("a.term")]
        assert len(here) == len(set(here)), name
        linked |= set(here)
    assert linked <= entries
    assert entries - linked <= {"Adapter", "Fencing-token", "Lease"}  # lessons that may not be there yet


def test_the_glossary_is_in_order(pages):
    words = [heading["id"].casefold() for heading in pages["GLOSSARY"].find_all("h2")]
    assert words == sorted(words)


# ---- size, and the same every time


def test_the_site_is_small(site):
    files = [path for path in site.out.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 15e6
    for page in site.pages:
        assert page.stat().st_size < 2e6, page.name


def test_a_second_build_gives_the_same_bytes(site, tmp_path):
    """In another process, whose hashes differ: some lessons, in a stress run all."""
    again = NAMES if STRESS else ["04_copy_on_write"]
    out = tmp_path / "again"
    command = [sys.executable, "-m", "pagedkv.teach.site", "--out", str(out), "--only", *again]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    written = [path.relative_to(out) for path in out.rglob("*") if path.is_file()]
    assert {f"{name}.html" for name in again} <= {str(path) for path in written}
    for path in written:
        assert filecmp.cmp(site.out / path, out / path, shallow=False), path


def test_a_folder_that_is_no_site_is_left_alone(tmp_path):
    from pagedkv.teach.site.build import build

    (tmp_path / "thesis.txt").write_text("three years of work")
    with pytest.raises(ValueError, match="holds no site"):
        build(ROOT, tmp_path)
    assert (tmp_path / "thesis.txt").exists()


# ---- the README's picture


def test_the_readmes_picture_is_small_and_moves():
    image = pytest.importorskip("PIL.Image", reason="Pillow comes with the course")
    path = ROOT / ".github" / "page_player.gif"
    assert path.stat().st_size < 200e3
    with image.open(path) as picture:
        assert picture.n_frames > 3


def test_frames_of_different_heights_make_one_picture():
    image = pytest.importorskip("PIL.Image", reason="Pillow comes with the course")
    import io

    from pagedkv.teach.site.picture import joined

    pictures = []
    for height, colour in ((40, "red"), (60, "blue")):
        out = io.BytesIO()
        image.new("RGB", (80, height), colour).save(out, "PNG")
        pictures.append(out.getvalue())
    with image.open(io.BytesIO(joined(pictures))) as picture:
        assert (picture.size, picture.n_frames) == ((80, 60), 2)


def test_the_workflow_publishes_what_make_site_writes():
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the test extra")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "site.yml").read_text("utf-8"))
    steps = workflow["jobs"]["build"]["steps"]
    assert {"run": "make site"} in steps
    assert [step["with"]["path"] for step in steps if "upload-pages" in step.get("uses", "")] == ["site"]
    assert workflow[True]["push"]["branches"] == ["main"]  # YAML reads "on" as true
    assert "site:" in (ROOT / "Makefile").read_text("utf-8")
    assert "/site/" in (ROOT / ".gitignore").read_text("utf-8").splitlines()
