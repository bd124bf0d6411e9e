"""Suite methods: recall of planted facts and fidelity of every method at every budget.

A case is a recording with planted facts. Under each configuration and budget its context is
appended turn by turn, each fact is asked for from the same state, and the recording goes on: the
measure is the distance from the full cache's next-token distributions over the next recorded
replies. The full cache is computed once a case and configuration, for all budgets.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from evals import episodes, harness
from evals.configs import FULL, RunConfig, budget_rows, parse_config
from evals.harness import Session, Setup
from evals.languages.choice import get_language
from evals.recordings import RecordingPlace
from evals.suite import Record, Suite
from evals.suites.fidelity import list_places, read_messages, user_text
from evals.suites.methods.cases import Case, CaseSize, build_case
from evals.summary import group_by, mean, mean_row, select_kind, split_cells
from kvrecall_server.reporting.results import Row
from workers.scheduler.scheduler import Scheduler

BUDGETS = ("1/16", "1/8", "1/4", "1/2")
SIZE = CaseSize(context=1024, continuation=256, facts=4)
RECALL = "recall of planted facts"
# Tokens of an answer: a sentence with its value.
ANSWER_TOKENS = 20
# Recordings are cut from a generated conversation of so many contexts.
_GENERATED_CONTEXTS = 2


@dataclass(frozen=True)
class MethodCase:
    """One recording with planted facts under one configuration, at all budgets."""

    setup: Setup
    budgets: tuple[str, ...]
    place: RecordingPlace
    size: CaseSize

    @property
    def label(self) -> str:
        """Short text for the progress bar."""
        return f"{self.setup.config.name}, {self.place.source} {self.place.number + 1}"


def suite(
    setup: Setup,
    configs: Sequence[RunConfig],
    budgets: Sequence[str],
    sources: Sequence[Path],
    limit: int | None,
    size: CaseSize,
) -> Suite[MethodCase]:
    """The full cache and every configuration on the first `limit` recordings of each source.

    Case by case, so that a run that was stopped has whole cases. Raises BadDataFile.
    """
    arms = dict.fromkeys((parse_config(FULL), *configs))
    units = [
        MethodCase(
            replace(setup, config=config, seed=setup.seed + number),
            tuple(budgets) if config.evicts else ("1/1",),
            place,
            size,
        )
        for number, place in enumerate(list_places(sources, limit, setup.seed))
        for config in arms
    ]
    return Suite(
        "methods", setup.seed, setup.model, tuple(units), run, partial(result_rows, seed=setup.seed)
    )


def run(unit: MethodCase) -> list[Record]:
    """Ask and compare at every budget. Raises BadExample, BadBudget, `workers.errors`."""
    setup = unit.setup
    case = load_case(unit)
    tokenizer = harness.load(setup.model).tokenizer
    tokens = harness.count_tokens(tokenizer, [*case.context, *case.continuation])
    full_rows = tokens + harness.TURN_TOKENS
    largest = max(budget_rows(budget, tokens) for budget in unit.budgets)
    with harness.open_worker(setup, max(full_rows, largest), slots=2) as worker:
        full_setup = replace(setup, config=parse_config(FULL))
        full = Session(worker, harness.build_spec(full_setup, full_rows, FULL))
        _append_context(setup, full, case)
        if not setup.config.evicts:
            return list(_ask_all(unit, full, case, "1/1", None))
        length = full.memory.length
        full.append(case.continuation, keep_distribution=True)
        return [
            record
            for budget in unit.budgets
            for record in _measure(unit, worker, case, budget, budget_rows(budget, length))
        ]


def load_case(unit: MethodCase) -> Case:
    """The case of a unit. Raises BadExample, BadReplayFile."""
    setup, size = unit.setup, unit.size
    _, messages = read_messages(unit.place, setup.model, _GENERATED_CONTEXTS * size.context)
    tokenizer = harness.load(setup.model).tokenizer
    return build_case(messages, setup.seed, size, get_language(setup.model), tokenizer)


def _append_context(setup: Setup, session: Session, case: Case) -> None:
    tokenizer = harness.load(setup.model).tokenizer
    for turn in harness.split_turns(case.context, tokenizer, setup.block_tokens):
        session.append(turn)


def _measure(
    unit: MethodCase, worker: Scheduler, case: Case, budget: str, rows: int
) -> Iterator[Record]:
    """Answers and distance from the full cache at one budget."""
    setup = unit.setup
    session = Session(worker, harness.build_spec(setup, rows, f"at {budget}"))
    _append_context(setup, session, case)
    built = episodes.build_for(setup, session)
    yield from _ask_all(unit, session, case, budget, built)
    matched = episodes.match_text(built, user_text(case.continuation))
    done = session.append(
        case.continuation, compare_with=FULL, episode=matched.episode if matched else None
    )
    yield {
        "kind": "fidelity",
        **_identity(unit, session, budget),
        "heard": done.fidelity.tokens,
        "kl": done.fidelity.kl_mean,
        "top1": done.fidelity.top1_agreement,
    }


def _ask_all(
    unit: MethodCase,
    session: Session,
    case: Case,
    budget: str,
    built: episodes.BuiltEpisodes | None,
) -> Iterator[Record]:
    language = get_language(unit.setup.model)
    for number, question in enumerate(case.questions):
        matched = episodes.match_text(built, question.text)
        done = session.ask(
            [{"role": "user", "content": question.text}],
            ANSWER_TOKENS,
            matched.episode if matched else None,
        )
        reply = done.message.content
        yield {
            "kind": "question",
            **_identity(unit, session, budget),
            "question": number,
            "depth": question.depth,
            "facts": len(case.questions),
            "expected": question.answer,
            "reply": reply,
            "right": float(language.is_answer(reply, question.answer)),
        }


def _identity(unit: MethodCase, session: Session, budget: str) -> dict[str, Any]:
    return {
        "data": unit.place.source,
        "case": f"{Path(unit.place.path).name} {unit.place.number}",
        "arm": unit.setup.config.name,
        "budget": budget,
        "rows": session.spec.budget,
        "length": session.memory.length,
        "active_rows": round(harness.active_rows(session), 2),
        "peak_rows": max(session.memory.peak_rows),
    }


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Recall, mean KL and top-1 agreement by source, configuration and budget, then at all sources.

    Recall of a source at which the full cache is not above chance is listed, not reported.
    """
    questions, unreported = split_cells(
        select_kind(records, "question"),
        lambda each: each["arm"] == FULL,
        ("data",),
        lambda each: 1 / each["facts"],
        seed,
    )
    distances = select_kind(records, "fidelity")
    rows: list[Row] = []
    sources = list(dict.fromkeys(each["data"] for each in records))
    for source in (sources if len(sources) > 1 else []) + [""]:
        prefix = f"{source}: " if source else ""
        for condition, key, kept in (
            (RECALL, "right", questions),
            ("mean KL, nats", "kl", distances),
            ("top-1 agreement", "top1", distances),
        ):
            own = [each for each in kept if source in ("", each["data"])]
            for (config, budget), group in group_by(own, "arm", "budget").items():
                columns = _columns(config, budget, group)
                values = [each[key] for each in group]
                rows += mean_row(f"{prefix}{condition}", values, seed, **columns)
    return [*rows, *unreported]


def _columns(config: str, budget: str, group: Sequence[Record]) -> dict[str, Any]:
    return {
        "method": config,
        "k": 0,
        "budget": round(mean(each["rows"] for each in group)),
        "share": budget,
        "active_rows": round(mean(each["active_rows"] for each in group), 1),
        "peak_rows": max(each["peak_rows"] for each in group),
    }
