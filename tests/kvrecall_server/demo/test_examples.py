"""Questions, replies and brought back text in the report."""

from dataclasses import replace

from kvrecall.client import Passage
from kvrecall_server.demo.configs import DemoConfig
from kvrecall_server.demo.examples import add_examples, add_replies, passages_text
from kvrecall_server.demo.run import DemoRun, Question
from kvrecall_server.reporting.html import Page

RIGHT = Question("plain", 900, True, "What is it?", "It is 7.", "It is 7.", "It is 7, remember.")
WRONG = replace(RIGHT, correct=False, reply="It is <b>8</b>.")


def run(name: str, *questions: Question) -> list[DemoRun]:
    return [DemoRun(DemoConfig(name, "snapkv", 64), 1, questions=list(questions))]


def passage(start: int, promoted: str, stop: int) -> Passage:
    return Passage(start, stop, "before ", promoted, " after")


def html(page: Page) -> str:
    return "".join(page.parts)


def test_a_saved_answer_is_shown_with_what_was_brought_back() -> None:
    page = Page("t")
    saved = replace(RIGHT, passages=(passage(10, "the number is 7", 14),))
    add_examples(page, run("full", RIGHT), run("alone", WRONG), run("repaired", saved))
    text = html(page)
    assert "1 of 1 questions were answered right with repair and wrong without it" in text
    assert '<mark class="back">the number is 7</mark>' in text
    assert "It is 7, remember." in text
    assert "not answered" not in text


def test_an_answer_that_repair_did_not_save_is_shown_too() -> None:
    page = Page("t")
    add_examples(page, run("full", RIGHT), run("alone", WRONG), run("repaired", WRONG))
    text = html(page)
    assert "brought back</h3>" not in text
    assert "answered right with the full cache and wrong with repair" in text


def test_replies_stand_side_by_side_coloured_and_escaped() -> None:
    page = Page("t")
    add_replies(page, [run("full", RIGHT), run("alone", WRONG)])
    text = html(page)
    assert '<mark class="right">It is 7.</mark>' in text
    assert '<mark class="wrong">It is &lt;b&gt;8&lt;/b&gt;.</mark>' in text
    assert "Every answer" in text


def test_the_longest_passages_are_shown_in_their_order_and_the_rest_is_counted() -> None:
    passages = [
        passage(1, "a", 3),
        passage(10, "second", 15),
        passage(30, "b", 31),
        passage(40, "third", 50),
        passage(60, "fourth\n", 66),
    ]
    text = passages_text(passages)
    assert text.index("second") < text.index("third") < text.index("fourth⏎")
    assert ">a<" not in text
    assert "and 3 of 24 tokens elsewhere" in text


def test_nothing_brought_back_is_no_text() -> None:
    assert passages_text(()) == ""
