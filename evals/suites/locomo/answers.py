"""Answers of any model to LoCoMo's questions, under a method and a budget: F1 by category.

F1 is `text_scores.word_f1`. Each part of a multi-hop answer counts with the best part of the reply; an
open-domain answer counts up to its first semicolon.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals import episodes, harness
from evals.configs import FULL
from evals.harness import Message, Session, Setup
from evals.suite import Record
from evals.suites.locomo.data import CATEGORIES, Conversation, Question, read_conversation
from evals.summary import group_by, mean, mean_row, select_kind
from evals.text_scores import word_f1
from kvrecall_server.reporting.results import Row, speed_row
from workers.model.tokenizer import ChatTokenizer

BUDGETS = ("1/16", "1/8", "1/4")
ALL = "all questions"
# An upper bound on the template's tokens around a message's own.
_TEMPLATE_TOKENS = 24
_PROMPT = "Answer in a few words, as they were said: {question}"


@dataclass(frozen=True)
class Answering:
    """At most `questions` questions about at most the first `tokens` tokens of one file."""

    setup: Setup
    path: str
    questions: int
    tokens: int

    @property
    def label(self) -> str:
        """Short text for the progress bar."""
        return f"{self.setup.config.name} {self.setup.budget}, {Path(self.path).stem}"


def run(unit: Answering) -> list[Record]:
    """Append the history, as far as the context holds it, and ask the questions that it answers.

    Raises `workers.errors`.
    """
    setup = unit.setup
    conversation = read_conversation(Path(unit.path))
    loaded = harness.load(setup.model)
    limit = min(unit.tokens, loaded.model.max_context - harness.TURN_TOKENS)
    messages, lines = fit_history(conversation, loaded.tokenizer, limit)
    with harness.open_session(setup, messages) as session:
        built = episodes.build_for(setup, session)
        answerable = [each for each in conversation.questions if each.evidence <= lines]
        questions = sample_evenly(answerable, unit.questions)
        return [_ask(unit, session, question, built) for question in questions]


def _ask(
    unit: Answering, session: Session, question: Question, built: episodes.BuiltEpisodes | None
) -> Record:
    matched = episodes.match_text(built, question.text)
    messages = [{"role": "user", "content": ask_briefly(question)}]
    done = session.ask(messages, harness.MAX_REPLY_TOKENS, matched.episode if matched else None)
    return {
        "kind": "answer",
        "conversation": Path(unit.path).stem,
        "asked": question.text,
        "category": question.category,
        "arm": unit.setup.config.name,
        "budget": unit.setup.budget,
        "rows": session.spec.budget,
        "length": session.memory.length,
        "active_rows": round(harness.active_rows(session), 2),
        "expected": question.answer,
        "reply": done.message.content,
        "f1": f1(done.message.content, question),
        "seconds": {"prefill": session.seconds},
    }


def ask_briefly(question: Question) -> str:
    """Word a question so that its answer is short."""
    return _PROMPT.format(question=question.text)


def describe(conversation: Conversation) -> Message:
    """Say in a system message whose conversation it is."""
    first, second = conversation.speakers
    return {"role": "system", "content": f"A conversation of {first} and {second}."}


def fit_history(
    conversation: Conversation, tokenizer: ChatTokenizer, tokens: int
) -> tuple[list[Message], frozenset[str]]:
    """The first messages that surely fit into `tokens` tokens, and the ids of their lines."""
    messages = [describe(conversation)]
    size = _TEMPLATE_TOKENS + len(tokenizer.encode(messages[0]["content"]))
    lines = set[str]()
    for spoken in conversation.spoken:
        size += len(tokenizer.encode(spoken.content)) + _TEMPLATE_TOKENS
        if size > tokens:
            break
        messages.append({"role": spoken.role, "content": spoken.content})
        lines |= set(spoken.lines)
    return messages, frozenset(lines)


def sample_evenly(questions: Sequence[Question], limit: int) -> list[Question]:
    """At most `limit` of the questions, evenly over the file."""
    step = max(1.0, len(questions) / limit)
    return [questions[int(step * index)] for index in range(min(limit, len(questions)))]


def f1(reply: str, question: Question) -> float:
    """F1 of a reply's words against the answer's, 0 to 1."""
    answer = question.answer
    if question.category == CATEGORIES[1]:
        parts = reply.split(",")
        return mean(max(word_f1(part, wanted) for part in parts) for wanted in answer.split(","))
    if question.category == CATEGORIES[3]:
        answer = answer.split(";")[0]
    return word_f1(reply, answer)


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """F1 over all questions and by category, for every method and budget; then seconds."""
    rows: list[Row] = []
    groups = group_by(select_kind(records, "answer"), "arm", "budget")
    for (config, budget), group in groups.items():
        common: dict[str, Any] = {"method": config, "k": 0, "share": budget}
        common["active_rows"] = round(mean(each["active_rows"] for each in group), 1)
        if config != FULL:
            common["budget"] = round(mean(each["rows"] for each in group))
        rows += mean_row(f"F1, {ALL}", [each["f1"] for each in group], seed, **common)
        for category in CATEGORIES.values():
            values = [each["f1"] for each in group if each["category"] == category]
            rows += mean_row(f"F1, {category}", values, seed, **common)
    for (config, budget), group in groups.items():
        spent = {each["conversation"]: each["seconds"]["prefill"] for each in group}
        rows.append(speed_row(f"{config}, {budget}", "prefill", "seconds", list(spent.values())))
    return rows
