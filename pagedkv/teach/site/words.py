"""The glossary: what its terms are, and a link from the first use of each in a text."""

import re
from dataclasses import dataclass
from pathlib import Path

NO_LINKS_IN = ("a", "code", "pre", "h1", "h2", "h3", "h4", "h5", "h6", "summary", "script", "style", "th")


@dataclass(frozen=True)
class Term:
    """A word of the glossary, other forms of it, and the anchor of its entry."""

    name: str
    forms: tuple[str, ...]

    @property
    def anchor(self) -> str:
        return self.name.replace(" ", "-")

    @property
    def pattern(self) -> re.Pattern:
        """Any of its forms, in the singular or the plural."""
        forms = "|".join(re.escape(form) for form in sorted(self.forms, key=len, reverse=True))
        return re.compile(rf"(?<![\w-])(?:{forms})(?:s|es)?(?![\w-])", re.I)


def terms(glossary: Path) -> list[Term]:
    """The terms of the glossary file: a second-level heading each, other forms in a line "*Also: a, b*"."""
    found = []
    for part in re.split(r"^## ", glossary.read_text("utf-8"), flags=re.M)[1:]:
        name = part.splitlines()[0].strip()
        also = re.search(r"^\*Also: (.+)\*$", part, re.M)
        found.append(Term(name, (name, *(also[1].split(", ") if also else ()))))
    return found


class FirstUses:
    """Links the first use of each term in a page's texts, one text after the other."""

    def __init__(self, terms: list[Term], target: str):
        self.target = target
        self.left = {
            term: term.pattern for term in sorted(terms, key=lambda t: -len(t.name))
        }  # longest first

    def link(self, html: str) -> str:
        """The same HTML with links; headings, code and links stay as they are."""
        inside: list[str] = []  # tags in which nothing is linked
        out = []
        for piece in re.split(r"(<[^>]+>)", html):
            tag = re.match(r"<(/?)(\w+)", piece)
            if tag and tag[2] in NO_LINKS_IN:
                if not tag[1]:
                    inside.append(tag[2])
                elif tag[2] in inside:
                    inside.remove(tag[2])
            out.append(piece if tag or inside else self._linked(piece))
        return "".join(out)

    def _linked(self, text: str) -> str:
        places = []
        for term, pattern in list(self.left.items()):
            match = pattern.search(text)
            if match and not any(match.start() < end and start < match.end() for start, end, _ in places):
                places.append((*match.span(), term))
                del self.left[term]
        for start, end, term in sorted(places, key=lambda place: place[0], reverse=True):
            link = f'<a class="term" href="{self.target}#{term.anchor}">{text[start:end]}</a>'
            text = text[:start] + link + text[end:]
        return text
