"""One stored notebook as the inside of a page: texts, code and outputs as they are, answers folded or covered."""

import base64
import copy
import html
import re
import struct
from dataclasses import dataclass, field
from typing import Any

from nbconvert.filters import Highlight2HTML
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

from .. import student
from .players import Player, is_widget
from .words import FirstUses

STAYS = re.compile(r"<h[2-6]\b|<p><a id=|<p>(?:(?!</p>).)*<strong>Predict", re.S)  # below an answer
SOLUTION = re.compile(r'(?:<p><a id="[^"]*"></a></p>\s*)?<h3.*?</h3>', re.S)


@dataclass
class Figure:
    """A picture to be written beside the pages."""

    png: bytes
    alt: str
    name: str = ""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return struct.unpack(">II", self.png[16:24])


@dataclass
class Text:
    """Markdown as HTML, with an anchor for each heading; `headings` collects (level, anchor, text)."""

    headings: list[tuple[int, str, str]] = field(default_factory=list)

    def html(self, source: str) -> str:
        made = MarkdownWithMath(renderer=_Renderer(self)).render(source)
        made = re.sub(r'href="([\w-]+)\.ipynb(#[^"]*)?"', r'href="\1.html\2"', made)
        made = made.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
        return made.replace('<th style="text-align: left;"></th>', "<td></td>").replace(
            "<th></th>", "<td></td>"
        )

    def anchor(self, words: str) -> str:
        """An anchor as JupyterLab makes it, so that the notebooks' own links work here too."""
        plain = words.replace(" ", "-")
        taken = {anchor for _, anchor, _ in self.headings}
        return next(a for n in range(1, 100) if (a := plain if n == 1 else f"{plain}-{n}") not in taken)


class _Renderer(IPythonRenderer):
    def __init__(self, text: Text):
        super().__init__(escape=False)
        self.made_for = text

    def heading(self, text: str, level: int, **_: Any) -> str:
        words = html.unescape(re.sub(r"<[^>]+>", "", text)).strip()
        anchor = self.made_for.anchor(words)
        self.made_for.headings.append((level, anchor, words))
        target = html.escape(anchor, quote=True)
        name = html.escape(f"Link to: {words}", quote=True)
        link = f' <a class="anchor" href="#{target}" aria-label="{name}">#</a>' if level > 1 else ""
        return f'<h{level} id="{target}">{text}{link}</h{level}>\n'


def plain(source: str) -> str:
    """A piece of Markdown without its marks and tags."""
    shown = MarkdownWithMath(renderer=IPythonRenderer(escape=False, exclude_anchor_links=True)).render(source)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", shown)).split())


def prepared(
    lesson: Any, stem: str, players: dict[str, Player], uses: FirstUses
) -> tuple[Any, Text, list[Figure]]:
    """A lesson as the template wants it: each cell with its HTML in `metadata.site`.

    Args:
        lesson: the notebook; it stays as it is.
        stem: its file name without `.ipynb`.
        players: cell id -> the player that takes the place of the stored widget.
        uses: links the first uses of the glossary's terms.

    Returns: a new notebook; its texts with their headings; its pictures.
    """
    nb, text, figures = copy.deepcopy(lesson), Text(), []
    highlight = Highlight2HTML(pygments_lexer="python")
    in_solutions = is_open = False
    for number, cell in enumerate(nb.cells):
        cell.metadata["site"] = {"before": "", "after": "", "outputs": [], "covered": ""}
        made = cell.metadata["site"]  # nbformat keeps a node of its own
        if cell.cell_type == "code":
            made["html"] = highlight(cell.source, language="python")
            made["player"] = players.get(cell.id)
            for output in cell.outputs:
                made["outputs"].append(_output(output, cell, nb.cells[number + 1 :]))
                if figure := made["outputs"][-1].get("figure"):
                    figures.append(figure)
                    figure.name = f"{stem}-{len(figures)}.png"
            continue
        above, heading, below = re.split(r"(?m)(^## Solutions?\b.*$|\Z)", cell.source, maxsplit=1)
        made["html"] = text.html(above)
        if not in_solutions:
            made["html"] = uses.link(made["html"]) + text.html(heading)
            in_solutions, ahead = bool(heading), text.html(below)
        else:
            made["html"], ahead = "", made["html"]
        seen, folds = _folded(ahead)
        made["html"] += seen
        if folds:
            made["before"], made["after"], is_open = "</details>" * is_open, folds, True
    if is_open:
        nb.cells[-1].metadata["site"]["after"] += "</details>"
    _cover(nb.cells)
    return nb, text, figures


def _folded(made: str) -> tuple[str, str]:
    """A text of solutions up to its first third-level heading, and what follows: a fold, whose end is left open."""
    headings = list(SOLUTION.finditer(made))
    if not headings:
        return made, ""
    folds = []
    for heading, after in zip(headings, [*headings[1:], None], strict=True):
        inside = made[heading.end() : after.start() if after else None]
        folds.append('<details class="solution"><summary>Show the solution</summary>')
        folds.append(f'<div class="text">{inside}</div>')
        if after:
            folds.append(f'</details><div class="text">{after[0]}</div>')
    return made[: headings[0].end()], "".join(folds)


def _cover(cells: list[Any]) -> None:
    """Mark the code cells below a prediction, whose outputs are covered, and the text that gives the answer away."""
    for number, cell in enumerate(cells):
        last = cell.source.strip().split("\n\n")[-1]
        if cell.cell_type != "markdown" or "**Predict" not in last:
            continue
        group = []
        for below in cells[number + 1 :]:
            if below.cell_type != "code" or student.mark(below, "exercise"):
                break
            group.append(below)
        if not group or any(is_widget(c) for c in group) or not any(c.outputs for c in group):
            continue  # a widget asks by itself
        group[0].metadata["site"]["covered"] = "begins"
        group[-1].metadata["site"]["covered"] = "ends" if len(group) > 1 else "both"
        if below.cell_type == "markdown":  # it tells what has just been seen
            made = below.metadata["site"]
            stays = STAYS.search(made["html"])
            end = stays.start() if stays else len(made["html"])
            made["html"] = f'<div class="reveals">{made["html"][:end]}</div>{made["html"][end:]}'


def _output(output: Any, cell: Any, below: list[Any]) -> dict[str, Any]:
    """One stored output: its kind, and what the template prints."""
    if output.output_type == "stream":
        return {"kind": "text", "text": output.text}
    if output.output_type == "error":
        return {"kind": "error", "text": "\n".join(output.traceback)}
    if "text/html" in output.data:
        kind = "widget" if is_widget(cell) else "drawing"
        return {"kind": kind, "html": output.data["text/html"], "text": output.data["text/plain"]}
    if "image/png" in output.data:
        said = below[0].source if below and below[0].cell_type == "markdown" else ""  # what is seen, under it
        figure = Figure(base64.b64decode(output.data["image/png"]), plain(said.strip().split("\n\n")[0]))
        return {"kind": "figure", "figure": figure}
    return {"kind": "text", "text": output.data["text/plain"]}
