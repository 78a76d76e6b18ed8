"""Write the site: a page per lesson, the course map, the glossary, the table of names, and what they need."""

import platform
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import notebooks
from ..student import write_copies
from . import BRANCH, REPOSITORY
from .lesson import Text, prepared
from .players import record, widgets_of
from .words import FirstUses, terms

HERE = Path(__file__).parent
PARTS = ("I Pages", "II Attention", "III Many users", "Shelf")


@dataclass(frozen=True)
class Lesson:
    """A lesson on the course map."""

    stem: str
    title: str
    part: str
    goals: tuple[str, ...]
    minutes: tuple[int, int]  # to read, with exercises
    needs: tuple[str, ...]

    @property
    def name(self) -> str:
        """Number and title."""
        number = notebooks.short_name(Path(self.stem))
        return f"{number} {self.title}" if number.isdigit() else self.title

    @property
    def part_place(self) -> int:
        return PARTS.index(self.part)

    @property
    def address(self) -> str:
        return f"{self.stem}.html"

    @property
    def copy(self) -> str:
        """Where the copy without solutions is on the site."""
        return f"copies/{self.stem}.ipynb"

    @property
    def binder(self) -> str:
        """The lesson in a JupyterLab that Binder starts."""
        return (
            f"https://mybinder.org/v2/gh/{REPOSITORY}/{BRANCH}?urlpath=lab/tree/notebooks/{self.stem}.ipynb"
        )


@dataclass
class Site:
    """What all pages say."""

    lessons: list[Lesson]
    version: str
    checked: str  # on which versions the outputs were compared
    pages: Sequence[tuple[str, str]] = (
        ("Lessons", "index.html"),
        ("Glossary", "GLOSSARY.html"),
        ("Names", "NAMES.html"),
    )


@dataclass
class Page:
    """One page: what the templates read."""

    site: Site
    address: str
    title: str
    description: str
    body: str = ""
    headings: list[tuple[int, str, str]] = field(default_factory=list)
    lesson: Lesson | None = None
    around: list[tuple[str, Lesson | None]] = field(default_factory=list)


def build(root: Path, out: Path, only: Sequence[str] = ()) -> list[Path]:
    """Write the site.

    Args:
        root: the checkout.
        out: the folder to write; what the last build left there is removed.
        only: stems of the lessons to write; all if empty.

    Returns: the files that were written, in order.

    Raises:
        ValueError: a lesson does not give what is stored, or `out` holds something that is no site.
    """
    folder, templates = root / "notebooks", _templates()
    paths = notebooks.lessons(folder)
    site = Site([_facts(path) for path in paths], metadata.version("pagedkv"), _checked(root))
    glossary = terms(folder / "GLOSSARY.md")
    _clear(out)
    for path in sorted((HERE / "static").iterdir()):
        shutil.copyfile(path, _ready(out / "static" / path.name))
    for path in paths:
        if not only or path.stem in only:
            _write_lesson(templates, site, path, glossary, out)
    write_copies(folder, out / "copies")
    index = Page(
        site,
        "index.html",
        "PagedAttention, page by page",
        "A course of notebooks that builds a paged KV cache.",
    )
    _write(out, index, templates.environment.get_template("index.html.j2").render(resources={"page": index}))
    for name in ("GLOSSARY", "NAMES"):
        _write_text(templates, site, folder / f"{name}.md", out)
    return sorted(path for path in out.rglob("*") if path.is_file())


def _templates() -> Any:
    """nbconvert with our templates."""
    from nbconvert import TemplateExporter

    return TemplateExporter(
        template_name="templates", template_file="lesson.html.j2", extra_template_basedirs=[str(HERE)]
    )


def _write_lesson(templates: Any, site: Site, path: Path, glossary: list, out: Path) -> None:
    nb = notebooks.read(path)
    players = {cell: record(widget) for cell, widget in widgets_of(nb, path.name).items()}
    nb, text, figures = prepared(nb, path.stem, players, FirstUses(glossary, "GLOSSARY.html"))
    place = next(i for i, lesson in enumerate(site.lessons) if lesson.stem == path.stem)
    before, lesson, after = [None, *site.lessons, None][place : place + 3]
    page = Page(
        site,
        lesson.address,
        f"{lesson.name} · pagedkv",
        f"You can then {'; '.join(lesson.goals)}.",
        headings=text.headings,
        lesson=lesson,
        around=[("Before", before), ("Next", after)],
    )
    made, _ = templates.from_notebook_node(nb, resources={"page": page})
    _write(out, page, made)
    for figure in figures:
        _ready(out / "figures" / figure.name).write_bytes(figure.png)


def _write_text(templates: Any, site: Site, path: Path, out: Path) -> None:
    """A page from a Markdown file beside the lessons."""
    text = Text()
    body = text.html(path.read_text("utf-8"))
    title = text.headings[0][2]
    page = Page(site, f"{path.stem}.html", f"{title} · pagedkv", title, f'<div class="text">{body}</div>')
    _write(out, page, templates.environment.get_template("page.html.j2").render(resources={"page": page}))


def _write(out: Path, page: Page, made: str) -> None:
    _ready(out / page.address).write_text(made.strip() + "\n", "utf-8", newline="\n")


def _ready(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _clear(out: Path) -> None:
    if out.exists() and any(out.iterdir()):
        if not (out / "static" / "site.css").exists():
            raise ValueError(f"{out} is not empty and holds no site: choose another folder")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)


# ---- facts -------------------------------------------------------------------------------------------------


def _facts(path: Path) -> Lesson:
    facts = notebooks.read(path).metadata["pagedkv"]
    needs = [*facts["needs"], *(f"pagedkv[{extra}]" for extra in facts.get("extras", []))]
    return Lesson(
        path.stem, facts["title"], facts["part"], tuple(facts["goals"]), tuple(facts["minutes"]), tuple(needs)
    )


def _checked(root: Path) -> str:
    """On which versions every output is compared: those of the public tests."""
    workflow = (root / ".github" / "workflows" / "ci.yml").read_text("utf-8")
    pairs = re.findall(r'python: "([\d.]+)", numpy: "numpy(==|>=)([\d.]+)', workflow)
    said = [
        f"Python {python} with NumPy {numpy.rstrip('.')}{' or newer' if sign == '>=' else ''}"
        for python, sign, numpy in pairs
    ]
    return (
        f"All outputs are compared, cell by cell, on {' and on '.join(said)}. "
        f"The moving frames were made with Python {platform.python_version()} and NumPy {metadata.version('numpy')}."
    )
