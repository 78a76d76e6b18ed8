"""The site, built once for all tests that look at it, and the widgets that its players were made of."""

import atexit
import functools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from needs import ROOT, need_module


@dataclass(frozen=True)
class Built:
    """Where the pages are, and per lesson its widgets by cell id, as the players left them."""

    out: Path
    widgets: dict[str, dict]

    @property
    def pages(self):
        return sorted(self.out.glob("*.html"))


@functools.cache
def built():
    """Build the whole site into a folder that goes away with the tests."""
    need_module("nbconvert", "course")
    need_module("ipywidgets", "course")
    from pagedkv.teach.site import build

    out = Path(tempfile.mkdtemp(prefix="pagedkv-site-"))
    atexit.register(shutil.rmtree, out, ignore_errors=True)
    widgets = {}

    def keep(lesson, name):
        widgets[Path(name).stem] = made = make(lesson, name)
        return made

    make = build.widgets_of
    with mock.patch.object(build, "widgets_of", keep):
        build.build(ROOT, out)
    return Built(out, widgets)


def soup(path):
    """A page, parsed; "html5lib" would be more exact and is not installed with the course."""
    bs4 = need_module("bs4", "course")
    return bs4.BeautifulSoup(path.read_text("utf-8"), "html.parser")


# Values of a widget's controls -> the arguments of its frame function.
FRAME = {
    "PagePlayer": lambda w, step: w.frame(step),
    "FragmentationExplorer": lambda w, size, mix: w.frame(size, mix),
    "DecodeStepper": lambda w, i, score: w.frame(i, None if score == w.scores[-1] else score),
    "BeamExplorer": lambda w, width, step, size: w.frame(width, step, size),
    "KeyChain": lambda w, place, letter, salt: (
        w.frame(other_salt=salt) if letter == w.text[place] else w.frame(place, letter, other_salt=salt)
    ),
    "SchedulerTimeline": lambda w, watermark, step: w.frame(watermark, step),
    "DamageBoard": lambda w, block, byte, bit: w.frame(block, byte, bit),
    "LeaseTimeline": lambda w, worker, tokens, pause, second: w.frame(worker, pause, tokens, second),
}


def frame_of(widget, values):
    """What a widget's frame function gives for some values of its controls."""
    return FRAME[type(widget).__name__](widget, *values)
