"""Every lesson keeps the rules of hygiene.py, and every rule can fail: a good lesson is broken for each."""

import copy

import hygiene
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from needs import ROOT

from pagedkv.teach.notebooks import MAP_BEGIN, course_map, dumps, lessons, normalise, with_course_map

NOTEBOOKS = lessons(ROOT / "notebooks")


@pytest.mark.parametrize("rule", hygiene.RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_lesson_keeps(path, rule):
    assert list(rule(hygiene.load(path))) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_number_of_code_cells_is_reported(path, record_property):
    """25 to 40 code cells are the aim of a lesson, not its law: printed with `pytest -rA`."""
    code = len(hygiene.load(path).code)
    record_property("code_cells", code)
    print(f"{path.stem}: {code} code cells" + ("" if 25 <= code <= 40 else " (aim: 25 to 40)"))


@pytest.mark.parametrize(("file", "prefix"), [("README.md", "notebooks/")])
def test_course_map_in_the_readme_is_current(file, prefix):
    text = (ROOT / file).read_text("utf-8")
    assert MAP_BEGIN in text
    assert with_course_map(text, course_map(ROOT / "notebooks", prefix)) == text, "run `make notebooks`"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_course_map_in_lessons_is_current(path):
    table = course_map(ROOT / "notebooks")
    for cell in hygiene.load(path).texts:
        assert with_course_map(cell.source, table) == cell.source, "run `make notebooks`"


# ---- the rules themselves


def code(source, *outputs, tags=(), **metadata):
    if tags:
        metadata["tags"] = list(tags)
    return new_code_cell(source, outputs=list(outputs), metadata=metadata)


def text(source):
    return new_markdown_cell(source)


def printed(words):
    return new_output("stream", name="stdout", text=words)


def shown(**data):
    return new_output("display_data", data={mime.replace("_", "/"): value for mime, value in data.items()})


EXERCISE = """\
### Exercise {n} · Give one back

*Easy, 5 minutes.* Write `release`.

<details><summary>Hint 1</summary>Look at the list.</details>
<details><summary>Hint 2</summary>Append to it.</details>

[Solution of exercise {n}](#Solution-{n})"""


def good_cells():
    exercises = []
    for n in (1, 2):
        exercises += [
            text(EXERCISE.format(n=n)),
            code('def release(pool, ids):\n    """ids: int32 [n]."""\n    ...', id=f"stub-{n}"),
            code("checks.release(release)", printed("not yet")),
        ]
    return [
        text(
            "# 02 · Hand out blocks\n\nYou will write an allocator.\n\n*You need* nothing. "
            "*You will be able to* write one. *10 minutes to read, 20 with exercises.*\n\n"
            "    0 Good a | 1 ␣nig a\n\n## The pool now"
        ),
        code("import pagedkv.teach.story as story\nprint(story)", printed("8 free")),
        text("**Step 1 · A list.** Eight ids.\n\n**Predict** what is left."),
        code("free = list(range(8))\nfree.pop()", printed("7")),
        text("**Checkpoint.** Seven left.\n\n## Step 2 · A refusal"),
        code(
            "[].pop()",
            new_output(
                "error", ename="IndexError", evalue="pop from empty list", traceback=["IndexError: pop"]
            ),
            tags=["raises-exception"],
        ),
        text("**Checkpoint.** Nothing changed. See [the second step](#Step-2-·-A-refusal)."),
        code("plt.plot(free)\nprint(free)", printed("[0, 1]\n"), shown(image_png="aGk=")),
        text("The line rises from zero to one, a step for each block."),
        code("%timeit free.copy()", printed("3 ns"), tags=["nbval-ignore-output"], reason="timing"),
        text("## Read the real one"),
        code("from pagedkv.allocator import BlockAllocator", printed("def")),
        text("## Exercises\n\n**Stuck?** Ten minutes, hint 1, hint 2, then go on."),
        *exercises,
        text("## Recap\n\nOne. Two. Three.\n\nStop here if you want to try."),
        text("## Solutions"),
        *(
            cell
            for n in (1, 2)
            for cell in (
                text(f"### Solution {n}"),
                code("### BEGIN SOLUTION\npool.extend(ids)\n### END SOLUTION", printed("ok")),
            )
        ),
    ]


@pytest.fixture
def lesson(tmp_path):
    """A small lesson 02 that breaks no rule, not yet stored."""
    nb = new_notebook(cells=good_cells())
    for number, cell in enumerate((c for c in nb.cells if c.cell_type == "code"), start=1):
        cell.execution_count = number
    nb.metadata["pagedkv"] = {
        "title": "Hand out blocks",
        "part": "I Pages",
        "template": "build",
        "needs": [],
        "minutes": [10, 20],
        "goals": ["write an allocator"],
        "extras": [],
        "run": "under 10 s",
    }
    normalise(nb)
    return hygiene.Lesson(nb, tmp_path / "02_blocks.ipynb")


@pytest.mark.parametrize("rule", hygiene.RULES, ids=lambda rule: rule.__name__)
def test_the_good_lesson_breaks_no_rule(lesson, rule):
    if rule is hygiene.ignored_outputs_are_rare_and_explained:
        lesson.nb.cells += [
            text(f"Word {n}.") for n in range(20)
        ]  # 5 % of a real lesson's cells is more than none
    assert list(rule(lesson)) == []


def at(words):
    """Finds the cell whose source holds `words`."""
    return lambda lesson: next(cell for cell in lesson.nb.cells if words in cell.source)


def edit(words, old, new):
    def breaks(lesson):
        cell = at(words)(lesson)
        assert old in cell.source
        cell.source = cell.source.replace(old, new)

    return breaks


def output(words, made):
    return lambda lesson: at(words)(lesson).outputs.append(made)


def facts(**changes):
    return lambda lesson: lesson.nb.metadata["pagedkv"].update(changes)


def remove(words):
    return lambda lesson: lesson.nb.cells.remove(at(words)(lesson))


def put(words, **fields):
    """Sets fields of the cell that holds `words`."""
    return lambda lesson: at(words)(lesson).update(copy.deepcopy(fields))


BROKEN = [
    (hygiene.is_in_the_stored_form, put("free.pop()", metadata={"execution": {"iopub.status.busy": "now"}})),
    (
        hygiene.is_in_the_stored_form,
        lambda lesson: lesson.nb.metadata["language_info"].update(version="3.11.2"),
    ),
    (hygiene.is_in_the_stored_form, lambda lesson: lesson.nb.metadata.update(widgets={"state": {}})),
    (
        hygiene.is_in_the_stored_form,
        output("free.pop()", shown(**{"application/vnd.jupyter.widget-view+json": {"model_id": "5ac"}})),
    ),
    (hygiene.counts_are_complete, put("free.pop()", execution_count=None)),
    (hygiene.counts_are_complete, put("free.pop()", execution_count=7)),
    (hygiene.ids_are_readable, put("free.pop()", id="0c3af11b")),
    (hygiene.ids_are_readable, put("free.pop()", id="read-the-real-one")),
    (
        hygiene.ignored_outputs_are_rare_and_explained,
        put("%timeit", metadata={"tags": ["nbval-ignore-output"]}),
    ),
    (
        hygiene.ignored_outputs_are_rare_and_explained,
        put("free.pop()", metadata={"tags": ["nbval-ignore-output"], "reason": "timing"}),
    ),
    (
        hygiene.ignored_outputs_are_rare_and_explained,
        edit("free.pop()", "free.pop()", "# NBVAL_IGNORE_OUTPUT\n1"),
    ),
    (hygiene.ignored_outputs_are_rare_and_explained, put("free.pop()", metadata={"tags": ["nbval-skip"]})),
    (hygiene.raised_exceptions_are_shown, put("[].pop()", outputs=[])),
    (hygiene.raised_exceptions_are_shown, put("[].pop()", metadata={})),
    (hygiene.outputs_name_no_machine, output("free.pop()", printed("saved /home/me/pages.bin"))),
    (hygiene.outputs_name_no_machine, output("free.pop()", printed("C:\\Users\\me"))),
    (hygiene.outputs_name_no_machine, edit("free.pop()", "free.pop()", "open('/tmp/x')")),
    (hygiene.outputs_hold_no_addresses, output("free.pop()", printed("<Pool object at 0x7f00aa12>"))),
    (hygiene.outputs_hold_no_addresses, output("free.pop()", shown(text_plain="<function f at 0x7f00aa12>"))),
    (
        hygiene.outputs_have_no_warnings,
        output("free.pop()", new_output("stream", name="stderr", text="Warning")),
    ),
    (hygiene.plots_print_their_numbers, put("plt.plot", outputs=[shown(image_png="aGk=")])),
    (hygiene.code_suits_nbval, edit("free.pop()", "free.pop()", "free.pop();")),
    (hygiene.code_suits_nbval, edit("free.pop()", "free.pop()", "interact(draw)")),
    (hygiene.code_suits_nbval, edit("free.pop()", "free.pop()", "out = ipywidgets.Output()")),
    (hygiene.code_suits_nbval, put("free.pop()", source="x = 1\n" * 41)),
    (hygiene.code_suits_nbval, put("free.pop()", source=" ")),
    (hygiene.headings_are_in_order, edit("## Recap", "## Recap", "# Recap")),
    (hygiene.headings_are_in_order, edit("## Read the real one", "## Read", "#### Read")),
    (hygiene.headings_are_in_order, edit("# 02", "# 02", "02")),
    (hygiene.links_are_descriptive_and_lead_somewhere, edit("second step", "the second step", "here")),
    (hygiene.links_are_descriptive_and_lead_somewhere, edit("second step", "#Step-2-·-A-refusal", "#Step-3")),
    (
        hygiene.links_are_descriptive_and_lead_somewhere,
        edit("second step", "#Step-2-·-A-refusal", "gone.ipynb"),
    ),
    (
        hygiene.links_are_descriptive_and_lead_somewhere,
        edit("## Recap", "One.", '<a href="gone.md">One thing</a>'),
    ),
    (hygiene.images_are_described, remove("The line rises")),
    (hygiene.images_are_described, edit("The line rises", "The line rises", "## Next\n\nThe line rises")),
    (hygiene.images_are_described, edit("## Recap", "One.", "![](attachment:a.png)")),
    (hygiene.images_are_described, edit("## Recap", "One.", "![a pool of blocks](gone.png)")),
    (hygiene.images_are_described, edit("## Recap", "One.", '<img src="attachment:a.png">')),
    (hygiene.metadata_is_complete, lambda lesson: lesson.nb.metadata.pop("pagedkv")),
    (hygiene.metadata_is_complete, facts(part="IV")),
    (hygiene.metadata_is_complete, facts(template="story")),
    (hygiene.metadata_is_complete, facts(goals=[])),
    (hygiene.metadata_is_complete, facts(minutes=[20, 10])),
    (hygiene.metadata_is_complete, facts(needs=["77"])),
    (hygiene.opening_tells_needs_goals_and_minutes, edit("# 02", "You need", "Take")),
    (hygiene.opening_tells_needs_goals_and_minutes, edit("# 02", "You will be able to", "Learn to")),
    (hygiene.opening_tells_needs_goals_and_minutes, edit("# 02", "10 minutes to read", "Soon read")),
    (hygiene.opening_tells_needs_goals_and_minutes, facts(minutes=[11, 20])),
    (
        hygiene.a_picture_comes_before_any_definition,
        lambda lesson: (
            edit("# 02", "    0 Good a | 1 ␣nig a", "Blocks.")(lesson),
            put("story", source="def pool():\n    return 8")(lesson),
        ),
    ),
    (hygiene.predictions_stand_right_above_what_they_ask, edit("**Predict", "**Predict**", "Look")),
    (
        hygiene.predictions_stand_right_above_what_they_ask,
        edit("**Predict", "is left.", "is left.\n\nSeven."),
    ),
    (hygiene.predictions_stand_right_above_what_they_ask, remove("free.pop()")),
    (hygiene.steps_end_in_checkpoints, edit("Nothing changed", "**Checkpoint.**", "So:")),
    (hygiene.steps_end_in_checkpoints, edit("Seven left", "## Step 2 · A refusal", "## A refusal")),
    (hygiene.exercises_are_complete, edit("Exercise 2", "Exercise 2", "One more")),
    (hygiene.exercises_are_complete, edit("Stuck?", "Stuck?", "Help.")),
    (hygiene.exercises_are_complete, edit("Exercise 1", "5 minutes", "soon")),
    (hygiene.exercises_are_complete, edit("Exercise 1", "Easy, ", "")),
    (hygiene.exercises_are_complete, edit("Exercise 1", "<details><summary>Hint 2</summary>", "")),
    (hygiene.exercises_are_complete, edit("Exercise 1", "](#Solution-1)", "](#Recap)")),
    (hygiene.exercises_are_complete, remove("def release")),
    (hygiene.exercises_are_complete, remove("checks.release")),
    (
        hygiene.exercises_are_complete,
        edit("def release", '    """ids: int32 [n]."""\n    ...', "    pool.extend(ids)"),
    ),
    (hygiene.solutions_stand_last_and_are_marked, edit("BEGIN SOLUTION", "### END SOLUTION", "")),
    (hygiene.solutions_stand_last_and_are_marked, edit("BEGIN SOLUTION", "### BEGIN SOLUTION\n", "")),
    (hygiene.solutions_stand_last_and_are_marked, remove("BEGIN SOLUTION")),
    (hygiene.solutions_stand_last_and_are_marked, edit("## Solutions", "## Solutions", "## Answers")),
    (
        hygiene.solutions_stand_last_and_are_marked,
        edit("Stop here", "Stop here if you want to try", "Well done"),
    ),
    (
        hygiene.solutions_stand_last_and_are_marked,
        edit("free.pop()", "free.pop()", "### BEGIN SOLUTION\n1\n### END SOLUTION"),
    ),
    (hygiene.a_recap_and_the_real_one_stand_near_the_end, edit("## Recap", "## Recap", "## Last")),
    (hygiene.a_recap_and_the_real_one_stand_near_the_end, edit("## Read the real one", "## Read", "## See")),
    (hygiene.tone_is_plain, edit("## Recap", "One.", "An amazing one.")),
    (hygiene.tone_is_plain, edit("## Recap", "One.", "One \U0001f680.")),
    (hygiene.it_runs_in_time, facts(run="under 60 s")),
    (hygiene.it_runs_in_time, facts(run=None)),
    (
        hygiene.imports_only_what_is_built,
        edit("story", "import pagedkv.teach.story", "import pagedkv.manager"),
    ),
    (
        hygiene.imports_only_what_is_built,
        edit("free.pop()", "free.pop()", "from pagedkv import PagedKVCache"),
    ),
    (
        hygiene.imports_only_what_is_built,
        edit("free.pop()", "free.pop()", "import pagedkv as p\np.BlockManager(1, 2)"),
    ),
    (
        hygiene.imports_only_what_is_built,
        edit("free.pop()", "free.pop()", "from pagedkv.allocator import Event"),
    ),
]


@pytest.mark.parametrize(
    ("rule", "breaks"), BROKEN, ids=[f"{rule.__name__}-{number}" for number, (rule, _) in enumerate(BROKEN)]
)
def test_each_rule_sees_a_broken_lesson(lesson, rule, breaks):
    if rule is hygiene.ignored_outputs_are_rare_and_explained:
        lesson.nb.cells += [text(f"Word {n}.") for n in range(13)]  # room for one such cell, not for two
        assert list(rule(lesson)) == []
    breaks(lesson)
    assert list(rule(hygiene.Lesson(lesson.nb, lesson.path)))


def test_every_rule_has_a_broken_lesson():
    assert {rule for rule, _ in BROKEN} == set(hygiene.RULES)


def test_a_lesson_may_import_what_the_needs_of_its_needs_built(lesson, tmp_path):
    """04 needs 03, which needs 02: the allocator is free there, the manager only from the real one on."""
    (tmp_path / "02_blocks.ipynb").write_text(dumps(lesson.nb), "utf-8")
    lesson.nb.metadata["pagedkv"]["needs"] = ["02"]
    (tmp_path / "03_tables.ipynb").write_text(dumps(lesson.nb), "utf-8")
    lesson.nb.metadata["pagedkv"]["needs"] = ["03"]
    fourth = hygiene.Lesson(lesson.nb, tmp_path / "04_copy.ipynb")
    at("free.pop()")(
        fourth
    ).source = "from pagedkv import BlockAllocator\nfrom pagedkv.storage import KVStorage"
    assert list(hygiene.imports_only_what_is_built(fourth)) == []
    at("from pagedkv.allocator")(fourth).source = "from pagedkv.manager import BlockManager"
    assert list(hygiene.imports_only_what_is_built(fourth)) == []
    at("KVStorage")(fourth).source = "from pagedkv.manager import BlockManager"
    assert len(list(hygiene.imports_only_what_is_built(fourth))) == 1
