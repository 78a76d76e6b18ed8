"""The teacher's guide: its commands are ones that exist, every lesson has its page, and its times fit an hour."""

import argparse
import re
import shlex

import pytest
from needs import ROOT

from pagedkv.cli import COMMANDS
from pagedkv.teach import story
from pagedkv.teach.notebooks import lessons, read, short_name

GUIDE = ROOT / "notebooks" / "TEACHING.md"
TEXT = GUIDE.read_text("utf-8")
COMMAND_LINES = [
    line for block in re.findall(r"^```sh\n(.*?)^```", TEXT, re.M | re.S) for line in block.splitlines()
]
PAGES = dict(re.findall(r"^### ([^\n]*)\n(.*?)(?=^##|\Z)", TEXT, re.M | re.S))
CLASSES = [f"{number:02}" for number in range(1, 14)]
PIP = {"wheel": {"-c", "-w"}, "install": {"--no-index", "--find-links"}}


def page(name):
    (found,) = [text for heading, text in PAGES.items() if heading.split(" · ")[0] == name]
    return found


def parse(line):
    """Raises unless it is a command of ours with options that it has, or a call of pip that the guide may use."""
    words = shlex.split(line)
    if words[:2] == ["docker", "run"]:
        words = words[words.index("pagedkv") :]
    program = words[0].rsplit("/", 1)[-1]
    if program == "pagedkv":
        parser = argparse.ArgumentParser(exit_on_error=False)
        commands = parser.add_subparsers(required=True)
        for command in COMMANDS:
            command.add(commands)
        parser.parse_args(words[1:])
    elif program in ("pip", "python3") and "pip" in [*words, program]:
        verb, *rest = words[words.index("pip") + 1 :] if program == "python3" else words[1:]
        assert {word for word in rest if word.startswith("-")} <= PIP[verb], line
        named = re.search(r"\[(\w+)\]", line)[1]
        assert re.search(rf"^{named} = \[", (ROOT / "pyproject.toml").read_text("utf-8"), re.M), line
        assert "-c" not in rest or (ROOT / rest[rest.index("-c") + 1]).exists()
    else:
        assert words[:3] == ["python3", "-m", "venv"], line


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_every_command_parses(line):
    parse(line)


@pytest.mark.parametrize(
    "line", ["pagedkv student", "pagedkv grade x --speed 3", "pip install -U x[course]", "rm x"]
)
def test_a_wrong_command_does_not(line):
    with pytest.raises((SystemExit, AssertionError, argparse.ArgumentError)):
        parse(line)


def test_there_are_commands():
    assert len(COMMAND_LINES) >= 8


def test_every_lesson_has_its_page():
    for path in lessons(ROOT / "notebooks"):
        name = short_name(path)
        if name.isdigit():
            assert page(name).strip(), name
        else:
            title = "Capstone" if name == "capstone" else read(path).metadata["pagedkv"]["title"]
            assert title in PAGES, title


@pytest.mark.parametrize("name", CLASSES)
def test_a_page_has_all_that_an_hour_needs(name):
    text = page(name)
    for word in ("Goal", "Say", "Board", "Minutes", "Wrong turns", "Skip", "Discuss", "Exit ticket"):
        assert f"- **{word}:**" in text, word
    rows = re.findall(r"^\| (?!predict|---)", text.replace("|---", "| ---"), re.M)
    assert len(rows) == 3
    assert text.split("Wrong turns")[1].split("\n")[0].count("(ask: ") == 2


@pytest.mark.parametrize("name", CLASSES)
def test_the_minutes_are_an_hour_and_a_half(name):
    (plan,) = re.findall(r"\*\*Minutes:\*\* (.*)", page(name))
    minutes = [int(step.split()[0]) for step in plan.rstrip(".").split(" · ") if step[0].isdigit()]
    assert len(minutes) >= 6
    assert 75 <= sum(minutes) <= 90


def test_the_formats_add_up():
    table = dict(re.findall(r"^\| (90 minutes|half a day)[^|]*\| (.*) \|$", TEXT, re.M))
    assert sum(map(int, re.findall(r"(?:^|· )(\d+) ", table["90 minutes"]))) == 90
    assert sum(map(int, re.findall(r"\((\d+)\)", table["half a day"]))) == 210


def test_the_questions_have_answers():
    questions = (ROOT / "notebooks" / "print" / "questions.md").read_text("utf-8")
    asked = [int(number) for number in re.findall(r"^(\d+)\. ", questions, re.M)]
    answered = re.findall(r"^\| (\d+) \| .+ \| (\d\d)", TEXT, re.M)
    assert asked == list(range(1, 16)) == [int(number) for number, _ in answered]


def test_numbers_that_are_said():
    """What the guide and its test claim about the story, from the engine."""
    wall = story.at_the_wall()
    assert (wall.manager.blocks_needed(list("abcd")), wall.num_free) == (4, 2)
    assert len(wall.free("d")) == 1  # question 7
    assert story.in_blocks().blocks == (3, 2, 3) and story.in_blocks().idle == 3
    assert story.ANSWER_BLOCKS[4][1] == 46 and story.ANSWER_BLOCKS[16][1] == 16
    assert story.answer_blocks(4, answers=3, length=6)[1] == 8
    assert set(story.tokens_left(story.at_the_wall(), 1).values()) == {4}


def test_what_is_linked_exists():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (GUIDE.parent / target).exists(), target


def test_the_strip_to_print_has_the_pools_size():
    sheet = (ROOT / "notebooks" / "print" / "strips.html").read_text("utf-8")
    assert f"block < {story.NUM_BLOCKS}" in sheet
    assert f"slot < {story.BLOCK_SIZE}" in sheet


def test_the_rubric_is_the_capstones():
    capstone = "\n".join(cell.source for cell in read(ROOT / "notebooks" / "capstone.ipynb").cells)
    rubric = re.findall(r"^\| (?:correct|choice|explanation|code), .*$", TEXT, re.M)
    assert len(rubric) == 4
    for row, own in zip(
        rubric, re.findall(r"^\| (?:correct|choice|explanation|code), .*$", capstone, re.M), strict=True
    ):
        assert row.split(" | ")[0] == own.split(" | ")[0]
