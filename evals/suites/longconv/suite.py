"""Suite longconv: questions on facts of conversations whose topics come and go.

Accuracy by method and budget, with the full cache as the upper bound: the form of EpiCache's Figure
5. Every configuration has the same conversations and the same questions, each asked from the state
after the whole history, at the same budget: active rows per head, averaged over layers. Repair is
off.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from evals import episodes, harness
from evals.codecs import RAW, storage_columns
from evals.configs import FULL, RunConfig, parse_config
from evals.harness import Session, Setup
from evals.languages.base import Language
from evals.languages.choice import get_language
from evals.suite import Record, Suite
from evals.suites.longconv.conversations import Question, generate_topics
from evals.suites.longconv.rows import result_rows
from kvrecall.domain.messages import Message
from kvrecall.domain.utterances import query_text
from kvstore.settings import CodecName

BUDGETS = ("1/16", "1/8", "1/6", "1/4")


@dataclass(frozen=True)
class LongConv:
    """One conversation under one configuration and budget, with all its questions.

    `data` are files and folders with recordings that the small talk is taken from; none: it is
    generated.
    """

    setup: Setup
    tokens: int
    topics: int
    questions: int
    data: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Short text for the progress bar."""
        setup = self.setup
        return f"{setup.config.name} {setup.budget} {setup.codec}, seed {setup.seed}"


def suite(
    first: LongConv,
    configs: Sequence[RunConfig],
    budgets: Sequence[str],
    conversations: int,
    codecs: Sequence[CodecName] = (RAW,),
) -> Suite[LongConv]:
    """All configurations at all budgets, and the full cache once, under each codec.

    Seeds of the `conversations` conversations begin at that of `first`.
    """
    setup = first.setup
    units = []
    for seed in range(setup.seed, setup.seed + conversations):
        setups = [replace(setup, seed=seed, config=parse_config(FULL), budget="1/1")]
        setups += [
            replace(setup, seed=seed, config=config, budget=budget)
            for budget in budgets
            for config in configs
            if config.evicts
        ]
        units += [
            replace(first, setup=replace(each, codec=codec)) for each in setups for codec in codecs
        ]
    return Suite(
        "longconv",
        setup.seed,
        setup.model,
        tuple(units),
        run,
        partial(result_rows, seed=setup.seed),
    )


def run(unit: LongConv) -> list[Record]:
    """Append the conversation, build its episodes if the configuration has any, ask all questions.

    Raises BadBudget, `workers.errors`.
    """
    language = get_language(unit.setup.model, unit.data)
    sizes = (unit.tokens, unit.topics, unit.questions)
    conversation = generate_topics(unit.setup.seed, *sizes, language)
    with harness.open_session(unit.setup, conversation.messages()) as session:
        built = episodes.build_for(unit.setup, session)
        history = _history_record(unit, session, built)
        questions = enumerate(conversation.questions)
        return [
            history,
            *(
                _ask(unit, session, language, number, question, built)
                for number, question in questions
            ),
        ]


def _history_record(
    unit: LongConv, session: Session, built: episodes.BuiltEpisodes | None
) -> Record:
    seconds = {"prefill": session.seconds}
    episodic = {}
    if built is not None:
        seconds |= {"clustering": built.cluster_seconds, "build": built.build_seconds}
        episodic = {
            "episodes": len(built.episodes),
            "index_bytes": built.index_bytes,
            "copy_bytes": built.copy_bytes,
        }
    return {
        "kind": "history",
        **_identity(unit),
        "build": unit.setup.config.build,
        "rows": session.spec.budget,
        "length": session.memory.length,
        "active_rows": round(harness.active_rows(session), 2),
        "peak_rows": max(session.memory.peak_rows),
        **storage_columns(session.scheduler.engine.store, session.memory.length),
        **episodic,
        "seconds": seconds,
    }


def _ask(
    unit: LongConv,
    session: Session,
    language: Language,
    number: int,
    question: Question,
    built: episodes.BuiltEpisodes | None,
) -> Record:
    session.restore()
    started = time.perf_counter()
    # The whole turn is matched, as in the authors' code: the lead of a question names its topic.
    matched = episodes.match_text(built, _query_text(question))
    done = session.ask(
        question.messages(), harness.MAX_REPLY_TOKENS, matched.episode if matched else None
    )
    seconds = time.perf_counter() - started
    record = {
        "kind": "question",
        **_identity(unit),
        "question": number,
        "place": question.place,
        "expected": question.answer,
        "reply": done.message.content,
        "right": float(language.is_answer(done.message.content, question.answer)),
        "seconds": seconds,
    }
    if matched is None:
        return record
    return {
        **record,
        "episode": matched.number,
        "held": float(_states_answer(matched.members, session, question)),
        "rows_moved": done.switched.rows_moved,
        "rows_kept": done.switched.rows_kept,
    }


def _query_text(question: Question) -> str:
    return query_text(
        [Message(message["role"], message["content"]) for message in question.messages()]
    )


def _states_answer(
    members: Sequence[tuple[int, int]], session: Session, question: Question
) -> bool:
    """True if an episode's own segments state the fact that a question asks for."""
    value = re.compile(rf"\b{re.escape(question.answer)}\b")
    fact = next(
        utterance
        for utterance in session.utterances
        if utterance.side == "user" and value.search(utterance.text)
    )
    return any(start <= fact.start and fact.stop <= stop for start, stop in members)


def _identity(unit: LongConv) -> dict[str, Any]:
    setup = unit.setup
    return {
        "arm": setup.config.name,
        "budget": setup.budget,
        "seed": setup.seed,
        "codec": setup.codec,
    }
