"""Suite longconv: questions on early, middle and late facts of conversations whose topics come and go.

Accuracy by method and budget, with the full cache as the ceiling: the shape of EpiCache's Figure 5. Every arm hears the
same conversations and the same questions, each asked from the state after the whole history, at the same budget:
active rows per head, averaged over layers. Repair is off.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from evals import episodes, harness
from evals.codecs import RAW, stored_of
from evals.configs import FULL, Arm, arm_of
from evals.harness import Session, Setup
from evals.suite import Record, Suite
from evals.suites.longconv.conversations import Question, generate_topics
from evals.suites.longconv.rows import result_rows
from kvrecall.domain.messages import Message
from kvrecall.domain.utterances import query_text
from kvstore.settings import CodecName

BUDGETS = ("1/16", "1/8", "1/6", "1/4")


@dataclass(frozen=True)
class LongConv:
    """One conversation under one arm and budget, with all its questions."""

    setup: Setup
    tokens: int
    topics: int
    questions: int

    @property
    def label(self) -> str:
        """For the progress bar."""
        return (
            f"{self.setup.arm.name} {self.setup.budget} {self.setup.codec}, seed {self.setup.seed}"
        )


def suite(
    first: LongConv,
    arms: Sequence[Arm],
    budgets: Sequence[str],
    conversations: int,
    codecs: Sequence[CodecName] = (RAW,),
) -> Suite[LongConv]:
    """All arms at all budgets, and the full cache once, on so many conversations from the first unit's seed on.

    With several codecs all of it under each of them.
    """
    setup = first.setup
    units = []
    for seed in range(setup.seed, setup.seed + conversations):
        kept = [replace(setup, seed=seed, arm=arm_of(FULL), budget="1/1")]
        kept += [
            replace(setup, seed=seed, arm=arm, budget=budget)
            for budget in budgets
            for arm in arms
            if arm.evicts
        ]
        units += [
            replace(first, setup=replace(each, codec=codec)) for each in kept for codec in codecs
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
    """Say the conversation, build its episodes where the arm has any, ask everything. Raises `workers.errors`."""
    said = generate_topics(unit.setup.seed, unit.tokens, unit.topics, unit.questions)
    with harness.remembered(unit.setup, said.messages()) as session:
        built = episodes.built_for(unit.setup, session)
        history = _history(unit, session, built)
        return [
            history,
            *(
                _asked(unit, session, number, question, built)
                for number, question in enumerate(said.questions)
            ),
        ]


def _history(unit: LongConv, session: Session, built: episodes.Built | None) -> Record:
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
        "build": unit.setup.arm.build,
        "rows": session.spec.budget,
        "length": session.memory.length,
        "active_rows": round(harness.active_rows(session), 2),
        "peak_rows": max(session.memory.peak_rows),
        **stored_of(session.scheduler.engine.store, session.memory.length),
        **episodic,
        "seconds": seconds,
    }


def _asked(
    unit: LongConv, session: Session, number: int, question: Question, built: episodes.Built | None
) -> Record:
    session.restore()
    started = time.perf_counter()
    # The whole turn is matched, as in the authors' code: what leads to a question tells its topic.
    chosen = episodes.matched(built, _said_in(question))
    done = session.ask(
        question.messages(), harness.MOST_REPLY_TOKENS, chosen.episode if chosen else None
    )
    seconds = time.perf_counter() - started
    record = {
        "kind": "question",
        **_identity(unit),
        "question": number,
        "place": question.place,
        "expected": question.answer,
        "reply": done.message.content,
        "right": float(question.is_answered_by(done.message.content)),
        "seconds": seconds,
    }
    if chosen is None:
        return record
    return {
        **record,
        "episode": chosen.number,
        "held": float(_holds(chosen.members, session, question)),
        "rows_moved": done.switched.rows_moved,
        "rows_kept": done.switched.rows_kept,
    }


def _said_in(question: Question) -> str:
    return query_text(
        [Message(message["role"], message["content"]) for message in question.messages()]
    )


def _holds(members: Sequence[tuple[int, int]], session: Session, question: Question) -> bool:
    """Whether an episode's own segments hold the fact that a question asks for."""
    value = re.compile(rf"\b{re.escape(question.answer)}\b")
    fact = next(
        said for said in session.utterances if said.side == "user" and value.search(said.text)
    )
    return any(start <= fact.start and fact.stop <= stop for start, stop in members)


def _identity(unit: LongConv) -> dict[str, Any]:
    setup = unit.setup
    return {"arm": setup.arm.name, "budget": setup.budget, "seed": setup.seed, "codec": setup.codec}
