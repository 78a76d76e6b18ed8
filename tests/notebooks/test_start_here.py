"""00 and the refresher fit together, and what the model says in 00 is the same on every machine."""

import re

import hygiene
import numpy as np
import pytest
from needs import ROOT

START = ROOT / "notebooks" / "00_start_here.ipynb"
REFRESHER = ROOT / "notebooks" / "appendix_attention_refresher.ipynb"


def sections(lesson):
    return [heading for heading in lesson.headings if heading[0] == 2]


def self_test():
    lesson = hygiene.load(START)
    heading = next(h for h in sections(lesson) if h[1] == "Self-test")
    return "\n".join(cell.source for cell in lesson.section(heading))


def test_the_self_test_has_eight_questions_with_folded_answers():
    text = self_test()
    assert re.findall(r"^\*\*(\d+)\.\*\*", text, re.M) == [str(n) for n in range(1, 9)]
    assert text.count("<details>") == text.count("</details>") == 8


def test_each_question_leads_to_a_section_of_its_own():
    anchors = re.findall(r"\(appendix_attention_refresher\.ipynb#([^)]+)\)", self_test())
    titles = [text for _, text, _ in sections(hygiene.load(REFRESHER)) if text != "Recap"]
    assert anchors == [title.replace(" ", "-") for title in titles]


def test_each_section_computes_something_and_leads_back():
    lesson = hygiene.load(REFRESHER)
    for section in sections(lesson)[:-1]:
        cells = lesson.section(section)
        assert any(cell.cell_type == "code" for cell in cells), section
        assert "(00_start_here.ipynb#Self-test)" in cells[-1].source, section


def test_the_model_says_the_same_everywhere():
    """Greedy picks the largest logit; rounding, which differs between machines, must not reach the second."""
    from pagedkv.lm import Llama

    model, text, margins = Llama.load(), "Good night", []
    for _ in range(16):
        logits = model.forward_full(model.tokenizer.encode(text))[-1]  # [vocabulary]
        second, first = np.sort(logits)[-2:]
        margins.append(first - second)
        text += model.tokenizer.decode([int(np.argmax(logits))])
    assert min(margins) > 0.1, dict(zip(text[10:], margins, strict=True))
    shown = "\n".join(hygiene.output_text(cell) for cell in hygiene.load(START).code)
    assert text.replace("\n", "↵") in shown.replace("\n", "↵")


@pytest.mark.parametrize("path", [START, REFRESHER], ids=lambda path: path.stem)
def test_the_first_pages_work_without_a_prerequisite(path):
    assert hygiene.load(path).facts["needs"] == []
