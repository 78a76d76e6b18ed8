"""What a stored lesson must be like. Each rule takes a `Lesson` and yields the faults it finds as sentences.

A lesson's fixed phrases, which the rules look for:

- metadata.pagedkv: title, part, template (build or use), needs, minutes [reading, with exercises], goals, extras;
  `run` is written by `make notebooks`.
- before the first code: "You need", "You will be able to", "35 minutes to read, 80 with exercises".
- "**Predict" opens the last paragraph of a text, right above the cell that reveals.
- "**Step 1" (bold or heading) opens a step, "**Checkpoint" closes it; "Stuck?" and a heading "Recap" stand once.
- "Exercise 1" in a heading: a text with difficulty and minutes, a stub, directly below a cell that calls `checks.…`,
  two hints in <details>, and a link to the solution.
- the last section's heading holds "Solution"; its cells have ### BEGIN SOLUTION / ### END SOLUTION; the words
  "Stop here if you want to try" stand just before or in it.
"""

import ast
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from needs import ROOT

from pagedkv.teach.notebooks import IGNORE_OUTPUT, dumps, is_random_id, normalise, read, short_name

PARTS = ("I Pages", "II Attention", "III Many users", "Shelf")
LONG_RUNNING = {"12": 60, "13": 60, "capstone": 30}  # seconds; every other lesson has ten
MOST_CODE_LINES = 40
MOST_IGNORED = 0.05

# The lesson that builds a module; a lesson may import it when it comes after that one. `teach` is free.
BUILT_IN = {
    "allocator": "02",
    "block_table": "03",
    "storage": "03",
    "manager": "04",
    "attention": "05",
    "decode": "05",
    "cache": "06",
    "lm": "06",
    "prefix_cache": "07",
    "serving": "08",
    "store": "09",
    "metrics": "10",
    "coordinator": "11",
    "bench": "12",
    "integrations": "13",
}
ALWAYS_FREE = {"teach", "__version__"}


@dataclass
class Lesson:
    """One notebook with what the rules ask of it."""

    nb: Any
    path: Path

    @property
    def name(self) -> str:
        return short_name(self.path)

    @property
    def facts(self) -> dict:
        return self.nb.metadata.get("pagedkv", {})

    @cached_property
    def code(self) -> list:
        return [cell for cell in self.nb.cells if cell.cell_type == "code"]

    @cached_property
    def texts(self) -> list:
        return [cell for cell in self.nb.cells if cell.cell_type == "markdown"]

    @cached_property
    def headings(self) -> list[tuple[int, str, int]]:
        """(level, text, number of the cell) of every heading."""
        found = []
        for number, cell in enumerate(self.nb.cells):
            if cell.cell_type == "markdown":
                for line in prose(cell.source).splitlines():
                    if match := re.match(r"(#{1,6})\s+(.*\S)", line):
                        found.append((len(match[1]), match[2], number))
        return found

    @cached_property
    def text_before_code(self) -> str:
        above = []
        for cell in self.nb.cells:
            if cell.cell_type == "code":
                break
            above.append(cell.source)
        return "\n\n".join(above)

    def section(self, heading: tuple[int, str, int]) -> list:
        """The cells of a heading's section: from its cell up to the next heading of its level or above."""
        level, _, start = heading
        later = [cell for depth, _, cell in self.headings if cell > start and depth <= level]
        return self.nb.cells[start : min(later, default=len(self.nb.cells))]

    @property
    def exercises(self) -> list[tuple[int, str, int]]:
        return [h for h in self.headings if re.search(r"\bExercise \d", h[1])]


def load(path):
    return Lesson(read(path), path)


def prose(source):
    """Markdown without its fenced code, where # is no heading and [x](y) no link."""
    return re.sub(r"^(```|~~~).*?^\1\s*$", "", source, flags=re.M | re.S)


def name_of(cell):
    return f"cell {cell.get('id', '?')!r}"


def output_text(cell):
    """All text of a cell's outputs, HTML included."""
    pieces = []
    for output in cell.outputs:
        pieces += [output.get("text", ""), output.get("evalue", ""), *output.get("traceback", [])]
        pieces += [value for mime, value in output.get("data", {}).items() if mime.startswith("text/")]
    return "\n".join(pieces)


def has_picture(cell):
    return any("image/png" in output.get("data", {}) for output in cell.outputs)


# ---- how it is stored


def is_in_the_stored_form(lesson):
    """As `make notebooks` writes it: no time stamps, widget ids, Python version; nothing left of an editor."""
    again = read(lesson.path) if lesson.path.exists() else lesson.nb
    before = dumps(again)
    normalise(again)
    if dumps(again) != before or (lesson.path.exists() and lesson.path.read_text("utf-8") != before):
        yield "is not in the stored form: run `make notebooks`"


def counts_are_complete(lesson):
    """nbval silently compares nothing where a cell has no count."""
    counts = [cell.execution_count for cell in lesson.code]
    if counts != list(range(1, len(counts) + 1)):
        yield f"execution counts are {counts}, not 1 to {len(counts)}: run `make notebooks`"


def ids_are_readable(lesson):
    ids = [cell.get("id", "") for cell in lesson.nb.cells]
    yield from (f"cell id {i!r} is random: run `make notebooks`" for i in ids if not i or is_random_id(i))
    yield from (f"cell id {i!r} stands twice" for i in sorted(set(ids)) if ids.count(i) > 1)


def ignored_outputs_are_rare_and_explained(lesson):
    ignored = [cell for cell in lesson.code if IGNORE_OUTPUT in cell.metadata.get("tags", [])]
    for cell in ignored:
        if not str(cell.metadata.get("reason", "")).strip():
            yield f"{name_of(cell)} ignores its output without metadata.reason"
    if len(ignored) > MOST_IGNORED * len(lesson.nb.cells):
        yield f"{len(ignored)} of {len(lesson.nb.cells)} cells ignore their output; at most 5 % may"
    for cell in lesson.code:
        if re.search(r"^\s*#\s*(NBVAL|PYTEST_VALIDATE)_", cell.source, re.M):
            yield f"{name_of(cell)} steers nbval by a comment; use a tag"
        if {"nbval-skip", "skip-execution"} & set(cell.metadata.get("tags", [])):
            yield f"{name_of(cell)} is skipped"


def raised_exceptions_are_shown(lesson):
    for cell in lesson.code:
        raised = any(output.output_type == "error" for output in cell.outputs)
        if raised != ("raises-exception" in cell.metadata.get("tags", [])):
            fault = "raises without" if raised else "does not raise, but has"
            yield f"{name_of(cell)} {fault} the tag raises-exception"


# ---- what outputs may hold


def outputs_name_no_machine(lesson):
    places = re.compile(
        r"(?<![\w.])/(?:home|root|Users|work|tmp|opt|usr|var|private)/\w|[A-Za-z]:\\\w|site-packages|ipykernel_\d"
    )
    for cell in lesson.code:
        for where, text in (("output", output_text(cell)), ("code", cell.source)):
            if match := places.search(text):
                yield f"{name_of(cell)}: {where} names a place of one machine ({match[0]!r})"
        if str(ROOT) in output_text(cell):
            yield f"{name_of(cell)}: output names the checkout's folder"


def outputs_hold_no_addresses(lesson):
    for cell in lesson.code:
        if match := re.search(r"\bat 0x[0-9a-fA-F]+|<[\w.]+ object\b", output_text(cell)):
            yield f"{name_of(cell)} shows a default repr ({match[0]!r})"


def outputs_have_no_warnings(lesson):
    for cell in lesson.code:
        if any(output.get("name") == "stderr" for output in cell.outputs):
            yield f"{name_of(cell)} writes to stderr"


def plots_print_their_numbers(lesson):
    """nbval never compares a PNG, so a line of text has to carry what it shows."""
    for cell in lesson.code:
        if has_picture(cell) and not any(output.output_type == "stream" for output in cell.outputs):
            yield f"{name_of(cell)} draws a figure and prints none of its numbers"


def code_suits_nbval(lesson):
    for cell in lesson.code:
        if not cell.source.strip():
            yield f"{name_of(cell)} is empty"
        if cell.source.rstrip().endswith(";"):
            yield f"{name_of(cell)} ends with ';', which hides nothing from nbval: use plt.show() or _ ="
        if re.search(r"\binteract(ive|ive_output)?\(|\bOutput\(", cell.source):
            yield f"{name_of(cell)} uses interact or Output, which nbval cannot compare"
        lines = len(cell.source.splitlines())
        if lines > MOST_CODE_LINES:
            yield f"{name_of(cell)} has {lines} lines; at most {MOST_CODE_LINES}"


# ---- reading without a mouse, or without eyes


def headings_are_in_order(lesson):
    levels = [level for level, _, _ in lesson.headings]
    if levels.count(1) != 1 or levels[0] != 1 or lesson.headings[0][2] != 0:
        yield "needs exactly one first-level heading, in its first cell"
    for (above, _, _), (level, text, _) in zip(lesson.headings, lesson.headings[1:], strict=False):
        if level > above + 1:
            yield f"heading {text!r} skips a level"


def links_are_descriptive_and_lead_somewhere(lesson):
    for cell in lesson.texts:
        text = prose(cell.source)
        links = re.findall(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)[^)]*\)", text)
        links += [
            (inner, target)
            for target, inner in re.findall(r'<a\s[^>]*href="([^"]+)"[^>]*>(.*?)</a>', text, re.S)
        ]
        for words, target in links:
            plain = re.sub(r"[`*_<>]", "", words).strip().lower()
            if plain in {"here", "link", "this", "click here", "click", "this page", ""} or plain.startswith(
                "http"
            ):
                yield f"{name_of(cell)}: link text {words!r} does not say where it leads"
            yield from _dead_end(lesson, cell, target)


def _dead_end(lesson, cell, target):
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return  # another site: not asked here, tests stay on this machine
    file, _, anchor = target.partition("#")
    path = lesson.path.parent / file if file else lesson.path
    if file and not path.exists():
        yield f"{name_of(cell)}: link to {target!r}, which does not exist"
        return
    if anchor and path.suffix == ".ipynb":
        there = lesson if not file or path == lesson.path else load(path)
        anchors = {re.sub(r"[`*_]", "", text).replace(" ", "-") for _, text, _ in there.headings}
        anchors |= {i for c in there.texts for i in re.findall(r'\b(?:id|name)="([^"]+)"', c.source)}
        if anchor not in anchors:
            yield f"{name_of(cell)}: no heading for the link {target!r}"


def images_are_described(lesson):
    cells = lesson.nb.cells
    for cell in lesson.texts:
        text = prose(cell.source)
        for alt, target in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)[^)]*\)", text):
            if len(alt.split()) < 3:
                yield f"{name_of(cell)}: image {target!r} has no description"
            if not target.startswith("attachment:") and not (lesson.path.parent / target).exists():
                yield f"{name_of(cell)}: image {target!r} does not exist"
        for tag in re.findall(r"<img\b[^>]*>", text):
            if not re.search(r'\balt="[^"]+"', tag):
                yield f"{name_of(cell)}: {tag[:40]!r} has no alt text"
    for cell, below in zip(cells, [*cells[1:], None], strict=True):
        if cell.cell_type == "code" and has_picture(cell):
            words = (
                []
                if below is None or below.cell_type != "markdown"
                else below.source.lstrip().split("\n\n")[0]
            )
            if not words or words.startswith("#") or len(words.split()) < 5:
                yield f"{name_of(cell)} draws a figure, but no sentence below says what is seen"


# ---- a lesson's anatomy


def metadata_is_complete(lesson):
    facts = lesson.facts
    kinds = {
        "title": str,
        "part": str,
        "template": str,
        "needs": list,
        "minutes": list,
        "goals": list,
        "extras": list,
    }
    for key, kind in kinds.items():
        if not isinstance(facts.get(key), kind):
            yield f"metadata.pagedkv.{key} is missing or no {kind.__name__}"
            return
    if facts["part"] not in PARTS:
        yield f"part {facts['part']!r} is none of {PARTS}"
    if facts["template"] not in ("build", "use"):
        yield f"template {facts['template']!r} is neither build nor use"
    if not facts["goals"]:
        yield "has no goals"
    if len(facts["minutes"]) != 2 or not 0 < facts["minutes"][0] <= facts["minutes"][1]:
        yield f"minutes {facts['minutes']} are not [reading, with exercises]"
    known = {short_name(path) for path in lesson.path.parent.glob("*.ipynb")} | {lesson.name}
    for need in facts["needs"]:
        if need not in known:
            yield f"needs {need!r}, which is no lesson"


def opening_tells_needs_goals_and_minutes(lesson):
    above = re.sub(r"[*_`]", "", lesson.text_before_code)
    for phrase in ("You need", "You will be able to"):
        if phrase.lower() not in above.lower():
            yield f"does not say {phrase!r} before its first code"
    declared = lesson.facts.get("minutes", [0, 0])
    said = re.search(r"(\d+) minutes to read(?:,? (?:and )?(\d+) with exercises)?", above)
    if not said:
        yield "does not say how many minutes it takes to read"
    elif [int(said[1]), int(said[2] or said[1])] != declared:
        yield f"says {said[0]!r}, but its metadata has {declared}"


def a_picture_comes_before_any_definition(lesson):
    for cell in lesson.nb.cells:
        if cell.cell_type == "markdown":
            if re.search(r"!\[|<img|<table|^\|.*\|$|^```|^    \S", cell.source, re.M):
                return
        elif has_picture(cell) or any("text/html" in output.get("data", {}) for output in cell.outputs):
            return
        elif re.search(r"^(def|class|@)", cell.source, re.M):
            yield "defines something before the reader has seen a picture"
            return


def predictions_stand_right_above_what_they_ask(lesson):
    cells = lesson.nb.cells
    found = False
    for cell, below in zip(cells, [*cells[1:], None], strict=True):
        if cell.cell_type != "markdown" or "**Predict" not in cell.source:
            continue
        found = True
        if "**Predict" not in cell.source.strip().split("\n\n")[-1]:
            yield f"{name_of(cell)}: the Predict line does not end the text"
        if below is None or below.cell_type != "code":
            yield f"{name_of(cell)}: no cell follows the Predict line"
    if not found:
        yield "asks for no prediction (**Predict …)"


STEP = re.compile(r"^(?:#{2,6}\s+|\*\*)Step \d+", re.M)


def steps_end_in_checkpoints(lesson):
    text = "\n\n".join(prose(cell.source) for cell in lesson.texts)
    steps = [match.start() for match in STEP.finditer(text)]
    if lesson.facts.get("template") == "build" and len(steps) < 2:
        yield "builds something in fewer than two steps (**Step 1 … or ## Step 1 …)"
    for start, end in zip(steps, [*steps, len(text)][1:], strict=True):
        if "**Checkpoint" not in text[start:end]:
            yield f"{text[start : start + 40].splitlines()[0]!r} ends without a **Checkpoint"
    if not steps and "**Checkpoint" not in text:
        yield "has no **Checkpoint"


def exercises_are_complete(lesson):
    if lesson.name == "00" or lesson.name.startswith("appendix_"):
        return
    if not 2 <= len(lesson.exercises) <= 4:
        yield f"has {len(lesson.exercises)} exercises (headings with 'Exercise 1' …), not two to four"
    if "Stuck?" not in "\n".join(cell.source for cell in lesson.texts):
        yield "has no 'Stuck?' box"
    for exercise in lesson.exercises:
        yield from (f"{exercise[1]!r}: {fault}" for fault in _exercise_faults(lesson.section(exercise)))


def _exercise_faults(section):
    text = "\n\n".join(cell.source for cell in section if cell.cell_type == "markdown")
    code = [cell for cell in section if cell.cell_type == "code"]
    if not re.search(r"\d+ minutes", text):
        yield "does not say how many minutes"
    if not re.search(
        r"\b(warm-up|easy|gentle|medium|moderate|hard|challenging|harder|stretch)\b", text, re.I
    ):
        yield "does not say how difficult it is (warm-up, easy, medium, hard)"
    if text.count("<details") < 2:
        yield "has fewer than two folded hints"
    if not re.search(r"\]\(#[^)]*[Ss]olution", text):
        yield "has no link to its solution"
    stubs = [cell for cell in code if "checks." not in cell.source]
    if not stubs:
        yield "has no stub"
    elif not re.search(r'"""|\.\.\.|= None|NotImplementedError', stubs[0].source):
        yield "its stub says neither shapes nor what is left to fill in"
    after = dict(zip(map(id, section), section[1:], strict=False))
    below = after.get(id(stubs[-1])) if stubs else None
    if stubs and (below is None or below.cell_type != "code" or "checks." not in below.source):
        yield "has no check cell (checks.…) directly below its stub"


def solutions_stand_last_and_are_marked(lesson):
    sections = [h for h in lesson.headings if h[0] == 2]
    last = sections[-1][2] if sections and "solution" in sections[-1][1].lower() else len(lesson.nb.cells)
    if lesson.exercises and last == len(lesson.nb.cells):
        yield "its last section is not 'Solutions'"
    if lesson.exercises:
        around = "\n".join(
            cell.source for cell in lesson.nb.cells[max(0, last - 1) :] if cell.cell_type == "markdown"
        )
        if "Stop here if you want to try" not in around:
            yield "does not say 'Stop here if you want to try' before its solutions"
    solved = 0
    for number, cell in enumerate(lesson.nb.cells):
        marks = re.findall(r"^\s*### (BEGIN|END) SOLUTION\s*$", cell.source, re.M)
        if marks != ["BEGIN", "END"] * (len(marks) // 2):
            yield f"{name_of(cell)}: its ### BEGIN SOLUTION / ### END SOLUTION do not pair"
        if marks and number < last:
            yield f"{name_of(cell)} shows a solution before the last section"
        solved += len(marks) // 2
    if solved < len(lesson.exercises):
        yield f"{len(lesson.exercises)} exercises, but {solved} marked solutions"


def a_recap_and_the_real_one_stand_near_the_end(lesson):
    titles = [text.lower() for _, text, _ in lesson.headings]
    if lesson.name != "00" and not any("recap" in title for title in titles):
        yield "has no heading 'Recap'"
    if lesson.facts.get("template") == "build" and not any("read the real one" in title for title in titles):
        yield "has no heading 'Read the real one'"


def tone_is_plain(lesson):
    hype = r"\b(amazing|awesome|powerful|revolutionary|game-chang\w+|blazing\w*|state-of-the-art|simply|obviously)\b"
    for cell in lesson.texts:
        if match := re.search(hype, cell.source, re.I):
            yield f"{name_of(cell)}: {match[0]!r} says nothing"
    for cell in lesson.nb.cells:
        if match := re.search("[\U0001f300-\U0001faff\u2728\u2705\u274c\u2b50]", cell.source):
            yield f"{name_of(cell)} has an emoji ({match[0]!r})"


def it_runs_in_time(lesson):
    bound = LONG_RUNNING.get(lesson.name, 10)
    measured = re.fullmatch(r"under (\d+) s", str(lesson.facts.get("run")))
    if not measured:
        yield "metadata.pagedkv.run is missing: run `make notebooks`"
    elif int(measured[1]) > bound:
        yield f"runs {measured[0]}; this lesson has {bound} s"


# ---- what it imports


def imports_only_what_is_built(lesson):
    """Modules of earlier lessons; a build lesson's own from its heading about the real one (or a comparison) on."""
    if lesson.name == "00":
        return
    before = _prerequisites(lesson)
    own = {room for room, built in BUILT_IN.items() if built == lesson.name}
    may = {room for room, built in BUILT_IN.items() if built in before} | ALWAYS_FREE
    own_from = 0
    if lesson.facts.get("template") == "build":
        shown = [
            cell
            for _, text, cell in lesson.headings
            if re.search(r"\b(real|compar\w+|package)\b", text, re.I)
        ]
        own_from = min(shown, default=len(lesson.nb.cells))
    for number, cell in enumerate(lesson.nb.cells):
        if cell.cell_type == "code":
            for room in sorted(rooms_used(cell.source) - may - (own if number >= own_from else set())):
                yield f"{name_of(cell)} imports pagedkv.{room}, which no prerequisite built"


def _prerequisites(lesson):
    """All lessons that come before this one, through the needs of its needs."""
    by_name = {short_name(path): path for path in lesson.path.parent.glob("*.ipynb")}
    found, ahead = set(), list(lesson.facts.get("needs", []))
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            if name in by_name:
                ahead += read(by_name[name]).metadata.get("pagedkv", {}).get("needs", [])
    return found


def rooms_used(source):
    """The modules of pagedkv that a cell's imports, and names taken from `pagedkv` itself, come from."""
    tree = ast.parse(re.sub(r"^\s*[%!].*$", "", source, flags=re.M))
    used, aliases = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first, *rest = alias.name.split(".")
                if first == "pagedkv":
                    used |= set(rest[:1])
                    aliases |= {alias.asname or "pagedkv"} if not (rest and alias.asname) else set()
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "pagedkv":
            rest = node.module.split(".")[1:]
            used |= set(rest[:1]) or {room_of_name(alias.name) for alias in node.names}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in aliases | {"pagedkv"}
        ):
            used.add(room_of_name(node.attr))
    return used


def room_of_name(name):
    """Where pagedkv's public `name` is defined: the module from which __init__ takes it, or itself if it is one."""
    for node in ast.parse((ROOT / "pagedkv" / "__init__.py").read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            names = {alias.asname or alias.name for alias in node.names}
            if name in names:
                return node.module.split(".")[0]
    return name


RULES = [
    is_in_the_stored_form,
    counts_are_complete,
    ids_are_readable,
    ignored_outputs_are_rare_and_explained,
    raised_exceptions_are_shown,
    outputs_name_no_machine,
    outputs_hold_no_addresses,
    outputs_have_no_warnings,
    plots_print_their_numbers,
    code_suits_nbval,
    headings_are_in_order,
    links_are_descriptive_and_lead_somewhere,
    images_are_described,
    metadata_is_complete,
    opening_tells_needs_goals_and_minutes,
    a_picture_comes_before_any_definition,
    predictions_stand_right_above_what_they_ask,
    steps_end_in_checkpoints,
    exercises_are_complete,
    solutions_stand_last_and_are_marked,
    a_recap_and_the_real_one_stand_near_the_end,
    tone_is_plain,
    it_runs_in_time,
    imports_only_what_is_built,
]
