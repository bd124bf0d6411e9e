"""MQ-NIAH on one small example: questions, spans, and the rows of every condition."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evals import harness
from evals.conditions import (
    BASE,
    CONDITIONS,
    FULL,
    MATCHED,
    REFRESH,
    SPREAD,
    SPREAD_REPAIR,
    SWAP,
)
from evals.errors import BadExample, BadSuite
from evals.journal import Journal, unit_key
from evals.replay_session import active_tokens
from evals.runner import run
from evals.suites.mq_niah import suite as mq_niah
from evals.suites.mq_niah import variants as mq_niah_suites
from evals.suites.mq_niah.case import Case, Protocol, open_case
from evals.suites.mq_niah.examples import (
    PARTITIONS,
    Example,
    build_donor_question,
    build_example,
    build_question,
    parse_partition,
)
from evals.suites.mq_niah.suite import Frontier
from reference import MODEL_PATH

TOKENS = 700
DISTRACTORS = 2
K = 24
PROTOCOL = Protocol(str(MODEL_PATH), 4, "1/6", TOKENS, DISTRACTORS)


def count_tokens(messages: Any) -> int:
    return harness.count_tokens(harness.load(str(MODEL_PATH)).tokenizer, messages)


@pytest.fixture(scope="module")
def example() -> Example:
    return build_example(5, 4, DISTRACTORS, TOKENS, count_tokens)


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    with open_case(PROTOCOL, 5, "14→23") as opened:
        yield opened


@pytest.mark.parametrize("needles", sorted(PARTITIONS))
def test_every_needle_is_asked_for_and_the_latest_never_in_the_second_turn(needles: int) -> None:
    latest = {needles, needles - 1} if needles > 4 else {needles}
    for partition in PARTITIONS[needles]:
        first, second = parse_partition(partition)
        assert len(first) == len(second)
        assert not set(second) & set(first)
        assert latest <= set(first)


def test_a_context_states_its_needles_once_in_order_and_has_its_length(example: Example) -> None:
    text = " ".join(str(message["content"]) for message in example.context)
    offsets = [text.index(needle.span) for needle in example.needles]
    assert offsets == sorted(offsets)
    assert all(text.count(needle.span) == 1 for needle in example.needles)
    assert count_tokens(example.context) == pytest.approx(TOKENS, abs=90)
    assert len(example.people) == 4 + DISTRACTORS


def test_an_example_is_a_function_of_its_seed(example: Example) -> None:
    assert build_example(5, 4, DISTRACTORS, TOKENS, count_tokens) == example
    assert build_example(6, 4, DISTRACTORS, TOKENS, count_tokens) != example


def test_a_donor_asks_about_other_people_than_the_example(example: Example) -> None:
    donor = build_donor_question(5, example, (2, 3), DISTRACTORS, TOKENS)
    assert not any(person in str(donor["content"]) for person in example.people)


def test_too_many_facts_for_the_context_are_refused() -> None:
    with pytest.raises(BadExample, match="no room for 12 facts"):
        build_example(1, 4, 8, 300, count_tokens)
    with pytest.raises(BadExample, match="the language has 42 people"):
        build_example(1, 8, 35, 8000, count_tokens)


def test_spans_are_the_tokens_of_key_and_value(case: Case) -> None:
    tokenizer = harness.load(str(MODEL_PATH)).tokenizer
    token_ids = [
        token
        for segment in tokenizer.prompt(
            [], [dict(message) for message in case.example.context], [], False
        )
        for token in segment.token_ids
    ]
    for needle in case.example.needles:
        text = tokenizer.decode([token_ids[index] for index in case.spans[needle.name]])
        assert needle.span in text
        assert len(text) <= len(needle.span) + 8


def test_the_full_cache_answers_everything_and_the_base_fills_its_budget(case: Case) -> None:
    baseline = case.build_baseline()
    assert case.share_right(CONDITIONS[FULL](baseline, 0).state, case.second) == 1.0
    assert len(baseline.base) == case.cache.base_rows == case.cache.context // 6
    assert len(baseline.base) + len(baseline.candidates) == case.cache.context
    assert active_tokens(baseline.state).tolist() == [
        *baseline.base.tolist(),
        *case.cache.turn_tokens.tolist(),
    ]


def test_sinks_the_newest_tokens_and_the_first_turn_stay_in_every_condition_but_a_swap(
    case: Case,
) -> None:
    baseline = case.build_baseline()
    kept = {*case.cache.protected.nonzero().flatten().tolist(), *case.cache.turn_tokens.tolist()}
    recent = case.cache.session.engine.settings.recent
    newest = {*range(case.cache.sinks), *case.cache.turn_tokens.tolist()[-recent:]}
    assert case.cache.sinks == 4
    for name, make in CONDITIONS.items():
        active = set(active_tokens(make(baseline, K).state).tolist())
        assert (newest if name == SWAP else kept) <= active, name


@pytest.mark.parametrize("name", list(CONDITIONS))
def test_a_condition_has_the_rows_that_it_reports(case: Case, name: str) -> None:
    baseline = case.build_baseline()
    result = CONDITIONS[name](baseline, K)
    more = {FULL: len(baseline.candidates), BASE: 0, SWAP: 0}.get(name, K)
    assert result.budget == len(baseline.base) + more
    rows = case.cache.count_rows(result.state, result.budget)
    assert rows == result.budget + len(case.cache.turn_tokens)
    if name not in (FULL, MATCHED, REFRESH, SWAP):
        before = set(active_tokens(baseline.state).tolist())
        added = set(active_tokens(result.state).tolist()) - before
        assert len(added) == more
        assert added <= set(baseline.candidates.tolist())


def test_a_question_is_asked_from_the_given_state_and_not_committed(case: Case) -> None:
    state = case.build_baseline().state
    question = [{"role": "user", "content": case.second[0].question}]
    length = case.cache.session.state.length
    replies = [case.cache.session.ask(state, question, 24) for _ in range(2)]
    assert replies[0] == replies[1]
    assert case.cache.session.state.length == length


def test_ours_brings_back_the_needles_that_are_asked_for(case: Case) -> None:
    baseline = case.build_baseline()
    result = CONDITIONS[SPREAD](baseline, K)
    assert case.overlap(case.cache.active_context(result.state), case.second) > 0.9
    stopped = case.cache.session.repair(
        baseline.state, K, SPREAD_REPAIR, [build_question(case.second)], lambda: True
    )
    assert stopped.report.truncated
    assert active_tokens(stopped.state).tolist() == active_tokens(baseline.state).tolist()


def test_a_unit_is_reproducible_and_is_resumed(
    without_seconds: Callable[[Any], Any], tmp_path: Path, silent: Console
) -> None:
    unit = Frontier(PROTOCOL, 5, "14→23", (8, K), (FULL, MATCHED, "Random-K", SPREAD))
    first = without_seconds(mq_niah.run(unit))
    suite = mq_niah.suite(PROTOCOL, [4], [8], 5, 1, {4: "1/6"})
    with_unit = type(suite)(suite.name, 5, suite.model, (unit,), suite.run, suite.rows)
    journal = tmp_path / "j.jsonl"
    assert without_seconds(run(with_unit, journal, silent, 1)) == first
    kept = Journal(journal)
    assert without_seconds(kept.records(unit_key("mq-niah", unit))) == first
    kept.close()
    assert first[-1]["kind"] == "stored"
    assert [(each["condition"], each["k"]) for each in first[:-1]] == [
        (FULL, 0),
        (MATCHED, 8),
        (MATCHED, K),
        ("Random-K", 8),
        ("Random-K", K),
        (SPREAD, 8),
        (SPREAD, K),
    ]


def test_rows_have_scores_gains_and_partitions() -> None:
    def record(condition: str, k: int, partition: str, right: float) -> dict[str, Any]:
        columns = {
            "kind": "case",
            "codec": "raw",
            "needles": 4,
            "facts": 12,
            "policy": "snapkv",
            "base": "1/8",
            "seed": 1,
            "partition": partition,
            "k": k,
        }
        sizes = {
            "context": 2000,
            "budget": 250 + k,
            "active_rows": 300 + k,
            "exact": float(right == 1),
        }
        return {
            **columns,
            **sizes,
            "condition": condition,
            "right": right,
            "held": 0.5,
            "overlap": 0.25,
            "seconds": 0.01,
        }

    records = [
        record(condition, k, partition, right)
        for partition in ("14→23", "24→13")
        for condition, k, right in (
            (FULL, 0, 1.0),
            (MATCHED, 8, 0.0),
            (MATCHED, 48, 0.5),
            (SPREAD, 8, 0.5),
        )
    ]
    rows = mq_niah.suite(PROTOCOL, [4], [8], 5, 1, {4: "1/6"}).rows(records)
    gains = [row for row in rows if "against" in row]
    assert [(row["of"], row["k"], row["mean"], row["n"]) for row in gains] == [(SPREAD, 8, 0.5, 2)]
    scores = {(row["condition"], row["k"]): row["mean"] for row in rows if "mean" in row}
    assert scores[MATCHED, 48] == 0.5
    assert {row["partition"] for row in rows if "partition" in row} == {"14→23", "24→13"}


def test_suites_are_built_by_name_and_unknown_ones_are_refused() -> None:
    def build(*names: str, ks: tuple[int, ...] = ()) -> Any:
        return mq_niah_suites.build_suite(
            Protocol("none", 0, "", 0), mq_niah_suites.SuiteRequest(names, ks, 7, 3)
        )

    assert [unit.protocol.needles for unit in build("2q", "8q").units] == [2, 2, 2, 8, 8, 8]
    assert {unit.protocol.policy for unit in build("policies").units} == {
        "snapkv",
        "h2o",
        "streaming_llm",
        "scissorhands",
    }
    assert build("anytime").units[0].protocol.tokens == 6000
    assert build("revisit", ks=(40,)).units[0].k == 40
    for names, ks in ((("4q", "revisit"), ()), (("5q",), ()), (("revisit",), (8, 16))):
        with pytest.raises(BadSuite):
            build(*names, ks=ks)
