"""The site in a real Chromium, served from this machine: it opens quietly, its players play, everybody can use it."""

import functools
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from needs import ROOT, STRESS, need_module
from site_pages import built, frame_of

from pagedkv.teach import notebooks

LESSONS = [path.stem for path in notebooks.lessons(ROOT / "notebooks")]
PAGES = [*LESSONS, "index", "GLOSSARY", "NAMES"]
PLAYERS = ["00", "01", "02", "03", "04", "05", "06", "07", "08", "09", "11"]
EACH_KIND = ["01", "04", "05", "06", "07", "08", "09", "11"]  # of widget; a stress run plays them all


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="session")
def address():
    """Where the site is served."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=built().out))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def visit(page, address):
    """Call with a page's name; what its console complains of fails the test, as what leaves the machine does."""
    page.on("console", lambda said: said.type == "error" and page.problems.append(said.text))
    page.set_default_timeout(120_000)
    return lambda name: page.goto(f"{address}/{name}.html")


# What is wider than its box scrolls inside it, and then the keyboard must reach it.
OUT_OF_REACH = """() => [...document.querySelectorAll("main *")]
    .filter((node) => node.scrollWidth > node.clientWidth + 2 && node.tabIndex < 0)
    .filter((node) => ["auto", "scroll"].includes(getComputedStyle(node).overflowX))
    .map((node) => node.outerHTML.slice(0, 80))"""


def test_pages_open_quietly_and_fit_a_phone(page, visit):
    page.set_viewport_size({"width": 360, "height": 740})
    for name in PAGES:
        visit(name)
        assert page.problems == [], name
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, name
        assert page.evaluate(OUT_OF_REACH) == [], name


# ---- players


def test_all_lessons_with_players_are_tested():
    assert sorted(name[:2] for name, widgets in built().widgets.items() if widgets) == PLAYERS


@pytest.mark.parametrize("number", PLAYERS if STRESS else EACH_KIND)
def test_players_reach_both_ends_and_show_the_frame_functions_html(page, visit, number):
    from pagedkv.teach.site import players

    [name] = [lesson for lesson in LESSONS if lesson.startswith(number)]
    visit(name)
    for cell, widget in built().widgets[name].items():
        moved = list(players._controls(widget.children[2:-1]))
        if hasattr(widget, "typed"):
            widget.typed.value = (
                widget.letter
            )  # the letters to choose from begin with the one of the question
        play = Play(page, cell, widget, players._ranges(moved))
        play.live.get_by_role("button", name="Show me").click()
        play.compare()
        for slider in play.live.locator("input[type=range]").all():
            play.by_mouse(slider)
            play.by_keyboard(slider)
        for choice in play.live.locator("select").all():
            for n in (choice.locator("option").count() - 1, 0):
                choice.select_option(index=n)
                play.compare()
        for check in play.live.locator("input[type=checkbox]").all():
            check.press("Space")
            play.compare()


class Play:
    """One player in the page, beside the widget that it stands for."""

    def __init__(self, page, cell, widget, values):
        self.page, self.widget, self.values = page, widget, values
        self.live = page.locator(f'[data-cell="{cell}"] .live')
        self.controls = self.live.locator(".controls :is(input, select)")

    def positions(self):
        """The position of each control, in the order in which they stand."""
        return self.controls.evaluate_all(
            "all => all.map((one) => one.type === 'checkbox' ? Number(one.checked) : Number(one.value))"
        )

    def compare(self):
        """The picture is the frame function's HTML, as this browser writes HTML."""
        chosen = [options[n] for options, n in zip(self.values, self.positions(), strict=True)]
        same = self.live.locator(".picture").evaluate(
            """(picture, html) => {
                const made = document.createElement("div");
                made.innerHTML = html;
                return made.innerHTML === picture.innerHTML;
            }""",
            frame_of(self.widget, chosen),
        )
        assert same, f"{type(self.widget).__name__} at {chosen}"

    def by_mouse(self, slider):
        box, end = slider.bounding_box(), slider.get_attribute("max")
        for x, wanted in ((box["width"] - 2, end), (2, "0")):
            slider.click(position={"x": x, "y": box["height"] / 2})
            assert slider.input_value() == wanted
            self.compare()

    def by_keyboard(self, slider):
        for key, wanted in (("End", slider.get_attribute("max")), ("Home", "0"), ("ArrowRight", "1")):
            slider.press(key)
            assert slider.input_value() == wanted
            self.compare()


def test_buttons_and_arrows_step_and_stop_at_the_ends(page, visit, expect):
    visit("02_block_allocator")
    live = page.locator(".live").first
    back, forward = (live.get_by_role("button", name=name) for name in ("Back", "Forward"))
    slider, picture = live.locator("input[type=range]"), live.locator(".picture")
    expect(forward).to_be_disabled()  # up to the question's frame one may look around, not further
    back.click()
    expect(slider).to_have_value("3")
    live.get_by_label("5").check()
    live.get_by_role("button", name="Predict").click()
    expect(slider).to_have_value("4")
    forward.click()
    expect(live.locator(".verdict")).to_contain_text("Right: you said 5.")
    while forward.is_enabled():
        forward.click()
    expect(slider).to_have_value("6")
    back.focus()
    for _ in range(7):
        page.keyboard.press("ArrowLeft")
    expect(slider).to_have_value("0")
    expect(back).to_be_disabled()
    expect(picture.locator("caption")).to_contain_text("night moves in")


def test_it_plays_pauses_and_stands_still_for_those_who_want_that(page, visit, expect):
    visit("02_block_allocator")
    live = page.locator(".live").first
    live.get_by_role("button", name="Show me").click()
    live.locator("input[type=range]").press("Home")
    live.get_by_role("button", name="Play").click()
    expect(live.locator("input[type=range]")).to_have_value("1")
    live.get_by_role("button", name="Pause").click()
    expect(live.get_by_role("button", name="Play")).to_be_visible()
    page.emulate_media(reduced_motion="reduce")
    page.reload()
    expect(page.locator(".live").first.get_by_role("button", name="Forward")).to_be_visible()
    expect(page.locator(".live .play").first).to_be_hidden()


# ---- ask first


def test_an_output_is_covered_until_a_guess_is_made(page, visit, expect):
    visit("04_copy_on_write")
    covered = page.locator(".covered")
    first, second = covered.nth(0), covered.nth(1)
    expect(first.locator(".out").first).to_be_hidden()
    told = page.get_by_text("Two of four. All would need 12 blocks")  # the text below would give it away
    expect(told).to_be_hidden()
    expect(first.get_by_role("button", name="Predict")).to_be_disabled()
    first.get_by_label("Your guess").fill("two")
    first.get_by_label("Your guess").press("Enter")
    expect(first.locator(".out").first).to_be_visible()
    expect(first.locator(".guess")).to_have_text("You said: two")
    expect(told).to_be_visible()
    second.get_by_role("button", name="Show me").click()
    expect(second.locator(".out").first).to_be_visible()
    expect(page.locator(".score")).to_contain_text("Predicted: 1 of ")


def test_all_answers_can_be_shown_at_once(page, visit, expect):
    visit("04_copy_on_write")
    page.get_by_role("button", name="Show all answers").click()
    assert page.locator(".gate:visible").count() == 0
    expect(page.locator(".covered .out").last).to_be_visible()
    expect(page.locator(".live .verdict")).to_contain_text("Now step forward")


def test_paper_shows_everything(page, visit, expect):
    visit("04_copy_on_write")
    page.emulate_media(media="print")
    expect(page.locator(".covered .out").first).to_be_visible()
    expect(page.locator(".player .still .drawing").first).to_be_visible()
    expect(page.locator(".live").first).to_be_hidden()
    assert page.locator("form.gate:visible, header:visible").count() == 0


def test_without_javascript_everything_can_be_read(browser, address, expect):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{address}/04_copy_on_write.html")
    expect(page.locator(".covered .out").first).to_be_visible()
    still = page.locator(".player .still").first
    expect(still.locator("table").first).to_be_visible()
    still.locator("details.whole > summary").click()
    expect(still.locator("details.whole .drawing").last).to_be_visible()
    expect(still.locator("pre")).to_contain_text("Predict: a has left.")
    context.close()


def test_a_link_to_a_solution_opens_it_and_no_other(page, visit, expect):
    visit("04_copy_on_write")
    first, second = (page.locator("details.solution").nth(n).locator(".cell").first for n in (0, 1))
    expect(second).to_be_hidden()
    page.locator('a[href="#solution-2"]').first.click()
    expect(second).to_be_visible()
    expect(first).to_be_hidden()


def test_a_chosen_theme_stays(page, visit, expect):
    visit("index")
    dark = "rgb(21, 23, 26)"
    expect(page.locator("body")).not_to_have_css("background-color", dark)
    page.get_by_role("button", name="Theme: auto").click()
    page.get_by_role("button", name="Theme: light").click()
    expect(page.locator("body")).to_have_css("background-color", dark)
    page.get_by_role("link", name="Glossary").first.click()
    expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
    expect(page.locator("body")).to_have_css("background-color", dark)


# ---- for everybody

SEEN = PAGES if STRESS else ["index", "04_copy_on_write"]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", SEEN)
def test_axe_finds_nothing_serious(page, visit, name, theme):
    """Two pages, in a stress run all, with every fold open and every answer shown."""
    axe = need_module("axe_playwright_python.sync_playwright", "test").Axe()
    page.emulate_media(color_scheme=theme)
    visit(name)
    page.evaluate(
        """() => {
            for (const fold of document.querySelectorAll("details")) fold.open = true;
            for (const button of document.querySelectorAll(".gate button[type=button]")) button.click();
        }"""
    )
    found = axe.run(page, options={"resultTypes": ["violations"]}).response["violations"]
    bad = [(v["id"], v["nodes"][0]["html"][:200]) for v in found if v["impact"] in ("serious", "critical")]
    assert bad == []
