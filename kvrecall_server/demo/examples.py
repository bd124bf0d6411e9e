"""Questions and replies in the demo's report, with the text that repairs brought back."""

from collections.abc import Sequence
from itertools import chain

from kvrecall.client import Passage
from kvrecall_server.demo.run import AFTER_TOOL, DemoRun, Question
from kvrecall_server.reporting.html import Html, Page, joined, marked

MAX_SAVED = 6
MAX_LOST = 3
MAX_REPLIES = 32
# Passages shown of a repair, the longest ones, and characters around each.
MAX_PASSAGES = 3
CONTEXT_CHARACTERS = 40

# A question's replies with the full cache, under the budget alone, and with repair.
Triple = tuple[Question, Question, Question]


def add_examples(
    page: Page, full: Sequence[DemoRun], alone: Sequence[DemoRun], repaired: Sequence[DemoRun]
) -> None:
    """Add what repair brought back: answers that it saved, and those that it did not."""
    asked = list(zip(*(map(_questions, (full, alone, repaired))), strict=True))
    saved = [each for each in asked if each[2].correct and not each[1].correct]
    lost = [each for each in asked if each[0].correct and not each[2].correct]
    if saved:
        page.subheading("Forgotten, and brought back")
        page.paragraph(
            f"{len(saved)} of {len(asked)} questions were answered right with repair and wrong "
            "without it. Those with the oldest facts, and the longest passages whose rows the last "
            "repair before the answer promoted: what is marked had been evicted, in some heads or in "
            "all. ⏎ is a line end.",
        )
        _add_table(page, saved, MAX_SAVED)
    if lost:
        page.subheading("Forgotten, and not answered with repair either")
        page.paragraph(
            f"{len(lost)} of {len(asked)} questions were answered right with the full cache and "
            "wrong with repair.",
        )
        _add_table(page, lost, MAX_LOST)


def add_replies(page: Page, runs: Sequence[Sequence[DemoRun]]) -> None:
    """Add the replies of every configuration side by side."""
    asked = list(zip(*map(_questions, runs), strict=True))
    shown = asked[:MAX_REPLIES]
    if not shown:
        return
    page.subheading("Every answer" if shown == asked else f"The first {len(shown)} answers")
    page.table(
        ["question", "age, tokens", *(each[0].config.name for each in runs)],
        [
            [_question(replies[0]), f"{replies[0].age:,}", *map(_reply, replies)]
            for replies in shown
        ],
        words=True,
    )


def _add_table(page: Page, triples: Sequence[Triple], limit: int) -> None:
    oldest = sorted(triples, key=lambda each: -each[2].age)[:limit]
    page.table(
        ["stated, and asked", "without repair", "brought back", "with repair"],
        [
            [
                f"{after.statement}\n\n{_question(after)}\n({after.age:,} tokens later)",
                _reply(before),
                passages_text(after.passages),
                _reply(after),
            ]
            for _, before, after in oldest
        ],
        words=True,
    )


def _questions(runs: Sequence[DemoRun]) -> list[Question]:
    return list(chain.from_iterable(run.questions for run in runs))


def _question(question: Question) -> str:
    return f"{question.text} (after a tool)" if question.kind == AFTER_TOOL else question.text


def _reply(question: Question) -> Html:
    return marked(question.reply or "(nothing)", "right" if question.correct else "wrong")


def passages_text(passages: Sequence[Passage]) -> Html:
    """The longest passages in their order, marked, each with a little of the text around it."""
    longest = sorted(passages, key=lambda each: each.start - each.stop)[:MAX_PASSAGES]
    lines: list[str] = []
    for each in sorted(longest, key=lambda each: each.start):
        lines += [
            "\n\n" if lines else "",
            f"… {_one_line(each.before)[-CONTEXT_CHARACTERS:]}",
            marked(_one_line(each.promoted), "back"),
            f"{_one_line(each.after)[:CONTEXT_CHARACTERS]} …",
        ]
    tokens = sum(each.stop - each.start for each in passages)
    rest = tokens - sum(each.stop - each.start for each in longest)
    lines.append(f"\n\nand {rest} of {tokens} tokens elsewhere" if rest else "")
    return joined(*lines)


def _one_line(text: str) -> str:
    return text.replace("\n", "⏎")
