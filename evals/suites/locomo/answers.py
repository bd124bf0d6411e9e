"""Answers to LoCoMo's questions by any model, under a method and a budget: F1 over words, by category.

F1 as in LoCoMo's own evaluation, without its stemming: lower case, no punctuation and no articles; the parts of a
multi-hop answer count each with the best part of the reply; of an open-domain answer what stands before a semicolon.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals import episodes, harness
from evals.configs import FULL
from evals.harness import Message, Session, Setup
from evals.suite import Record
from evals.suites.locomo.data import CATEGORIES, Asked, Conversation, read
from evals.summary import grouped, mean, mean_row, of_kind
from kvrecall.reporting.results import Row, speed_row
from workers.model.tokenizer import ChatTokenizer

BUDGETS = ("1/16", "1/8", "1/4")
ALL = "all questions"
_TOKENS_AROUND = 24
_ASK = "Answer in a few words, as they were said: {question}"
_NOT_A_WORD = re.compile(r"[^\w\s]")
_ARTICLES = {"a", "an", "the", "and"}


@dataclass(frozen=True)
class Answering:
    """At most `questions` questions of one file, after at most its first `tokens` tokens, under one arm and budget."""

    setup: Setup
    path: str
    questions: int
    tokens: int

    @property
    def label(self) -> str:
        """For the progress bar."""
        return f"{self.setup.arm.name} {self.setup.budget}, {Path(self.path).stem}"


def run(unit: Answering) -> list[Record]:
    """Say the history, as far as the context holds it, and ask what it answers. Raises `workers.errors`."""
    setup = unit.setup
    told = read(Path(unit.path))
    found = harness.loaded(setup.model)
    most = min(unit.tokens, found.model.max_context - harness.ROOM_FOR_A_TURN)
    messages, heard = history_within(told, found.tokenizer, most)
    with harness.remembered(setup, messages) as session:
        built = episodes.built_for(setup, session)
        asked = spread(
            [question for question in told.questions if question.evidence <= heard], unit.questions
        )
        return [_answered(unit, session, question, built) for question in asked]


def _answered(
    unit: Answering, session: Session, question: Asked, built: episodes.Built | None
) -> Record:
    chosen = episodes.matched(built, question.text)
    said = [{"role": "user", "content": _ASK.format(question=question.text)}]
    done = session.ask(said, harness.MOST_REPLY_TOKENS, chosen.episode if chosen else None)
    return {
        "kind": "answer",
        "conversation": Path(unit.path).stem,
        "asked": question.text,
        "category": question.category,
        "arm": unit.setup.arm.name,
        "budget": unit.setup.budget,
        "rows": session.spec.budget,
        "length": session.memory.length,
        "active_rows": round(harness.active_rows(session), 2),
        "expected": question.answer,
        "reply": done.message.content,
        "f1": f1(done.message.content, question),
        "seconds": {"prefill": session.seconds},
    }


def history_within(
    told: Conversation, tokenizer: ChatTokenizer, tokens: int
) -> tuple[list[Message], frozenset[str]]:
    """The first messages that surely fit into `tokens` tokens, and the ids of the lines that they hold."""
    first, second = told.speakers
    messages: list[Message] = [
        {"role": "system", "content": f"A conversation of {first} and {second}."}
    ]
    size = _TOKENS_AROUND + len(tokenizer.encode(messages[0]["content"]))
    lines = set[str]()
    for spoken in told.spoken:
        size += len(tokenizer.encode(spoken.content)) + _TOKENS_AROUND
        if size > tokens:
            break
        messages.append({"role": spoken.role, "content": spoken.content})
        lines |= set(spoken.lines)
    return messages, frozenset(lines)


def spread(questions: Sequence[Asked], most: int) -> list[Asked]:
    """At most so many of the questions, evenly over the file."""
    step = max(1.0, len(questions) / most)
    return [questions[int(step * index)] for index in range(min(most, len(questions)))]


def f1(reply: str, question: Asked) -> float:
    """The words that reply and answer share, 0 to 1."""
    answer = question.answer
    if question.category == CATEGORIES[1]:
        parts = reply.split(",")
        return mean(max(_f1(part, wanted) for part in parts) for wanted in answer.split(","))
    if question.category == CATEGORIES[3]:
        answer = answer.split(";")[0]
    return _f1(reply, answer)


def _f1(reply: str, answer: str) -> float:
    ours = _words(reply)
    theirs = _words(answer)
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * shared / (len(ours) + len(theirs)) if shared else 0.0


def _words(text: str) -> list[str]:
    return [word for word in _NOT_A_WORD.sub(" ", text.lower()).split() if word not in _ARTICLES]


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """F1 over all questions and by category, for every method and budget; then seconds."""
    rows: list[Row] = []
    answers = of_kind(records, "answer")
    for (arm, budget), found in grouped(answers, "arm", "budget").items():
        common: dict[str, Any] = {"method": arm, "k": 0, "share": budget}
        common["active_rows"] = round(mean(each["active_rows"] for each in found), 1)
        if arm != FULL:
            common["budget"] = round(mean(each["rows"] for each in found))
        rows += mean_row(f"F1, {ALL}", [each["f1"] for each in found], seed, **common)
        for category in CATEGORIES.values():
            values = [each["f1"] for each in found if each["category"] == category]
            rows += mean_row(f"F1, {category}", values, seed, **common)
    for (arm, budget), found in grouped(answers, "arm", "budget").items():
        spent = {each["conversation"]: each["seconds"]["prefill"] for each in found}
        rows.append(speed_row(f"{arm}, {budget}", "prefill", "seconds", list(spent.values())))
    return rows
