"""MQ-NIAH on one small example: what is asked, what is held, that every condition has the rows it says."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evals import harness
from evals.conditions import BASE, CONDITIONS, FULL, MATCHED, OURS, PER_HEAD, REFRESH, SPREAD, SWAP
from evals.errors import BadExample, BadSuite
from evals.journal import Journal, key_of
from evals.replay_session import tokens_held
from evals.runner import run
from evals.suites.mq_niah import suite as mq_niah
from evals.suites.mq_niah import variants as mq_niah_suites
from evals.suites.mq_niah.case import Case, Protocol, begun
from evals.suites.mq_niah.examples import (
    PARTITIONS,
    Example,
    example,
    other_question,
    question_of,
    turns_of,
)
from evals.suites.mq_niah.suite import Frontier
from reference import MODEL_PATH

TOKENS = 700
DISTRACTORS = 2
K = 24
PROTOCOL = Protocol(str(MODEL_PATH), 4, "1/6", TOKENS, DISTRACTORS)


def length_of(messages: Any) -> int:
    return harness.tokens_of(harness.loaded(str(MODEL_PATH)).tokenizer, messages)


@pytest.fixture(scope="module")
def made() -> Example:
    return example(5, 4, DISTRACTORS, TOKENS, length_of)


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    with begun(PROTOCOL, 5, "14→23") as found:
        yield found


@pytest.mark.parametrize("needles", sorted(PARTITIONS))
def test_every_needle_is_asked_and_the_latest_never_in_the_second_turn(needles: int) -> None:
    latest = {needles, needles - 1} if needles > 4 else {needles}
    for partition in PARTITIONS[needles]:
        first, second = turns_of(partition)
        assert len(first) == len(second)
        assert not set(second) & set(first)
        assert latest <= set(first)


def test_a_context_states_its_needles_in_their_order_once_and_has_its_length(made: Example) -> None:
    text = " ".join(str(message["content"]) for message in made.context)
    places = [text.index(needle.span) for needle in made.needles]
    assert places == sorted(places)
    assert all(text.count(needle.span) == 1 for needle in made.needles)
    assert length_of(made.context) == pytest.approx(TOKENS, abs=90)
    assert len(made.people) == 4 + DISTRACTORS


def test_the_same_seed_gives_the_same_example_and_another_another(made: Example) -> None:
    assert example(5, 4, DISTRACTORS, TOKENS, length_of) == made
    assert example(6, 4, DISTRACTORS, TOKENS, length_of) != made


def test_a_donor_asks_about_nobody_of_the_example(made: Example) -> None:
    donor = other_question(5, made, (2, 3), DISTRACTORS, TOKENS)
    assert not any(person in str(donor["content"]) for person in made.people)


def test_too_many_facts_for_the_context_are_refused() -> None:
    with pytest.raises(BadExample, match="no room for 12 facts"):
        example(1, 4, 8, 300, length_of)
    with pytest.raises(BadExample, match="the language has 42 people"):
        example(1, 8, 35, 8000, length_of)


def test_spans_are_the_tokens_of_key_and_value(case: Case) -> None:
    tokenizer = harness.loaded(str(MODEL_PATH)).tokenizer
    said = [
        token
        for segment in tokenizer.prompt(
            [], [dict(message) for message in case.example.context], [], False
        )
        for token in segment.token_ids
    ]
    for needle in case.example.needles:
        text = tokenizer.decode([said[at] for at in case.spans[needle.name]])
        assert needle.span in text
        assert len(text) <= len(needle.span) + 8


def test_the_full_cache_answers_everything_and_its_base_holds_a_budget(case: Case) -> None:
    ready = case.before()
    assert case.share_right(CONDITIONS[FULL](ready, 0).state, case.second) == 1.0
    assert len(ready.base) == case.cache.base_rows == case.cache.context // 6
    assert len(ready.base) + len(ready.candidates) == case.cache.context
    assert tokens_held(ready.state).tolist() == [*ready.base.tolist(), *case.cache.after.tolist()]


def test_sinks_the_newest_tokens_and_the_first_turn_stay_in_every_condition_but_a_swap(
    case: Case,
) -> None:
    ready = case.before()
    kept = {*case.cache.kept.nonzero().flatten().tolist(), *case.cache.after.tolist()}
    newest = {*case.cache.after.tolist()[-case.cache.replayed.engine.settings.recent :], 0, 1, 2, 3}
    for name, make in CONDITIONS.items():
        held = set(tokens_held(make(ready, K).state).tolist())
        assert (newest if name == SWAP else kept) <= held, name


@pytest.mark.parametrize("name", list(CONDITIONS))
def test_a_condition_holds_the_rows_it_says(case: Case, name: str) -> None:
    ready = case.before()
    held = CONDITIONS[name](ready, K)
    more = {FULL: len(ready.candidates), BASE: 0, SWAP: 0}.get(name, K)
    assert held.budget == len(ready.base) + more
    assert case.cache.rows_of(held.state, held.budget) == held.budget + len(case.cache.after)
    if name not in (FULL, MATCHED, REFRESH, SWAP, PER_HEAD):
        brought = set(tokens_held(held.state).tolist()) - set(tokens_held(ready.state).tolist())
        assert len(brought) == more
        assert brought <= set(ready.candidates.tolist())


def test_a_question_is_taken_back_and_meets_the_state_it_was_given(case: Case) -> None:
    state = case.before().state
    question = [{"role": "user", "content": case.second[0].question}]
    length = case.cache.replayed.state.length
    replies = [case.cache.replayed.ask(state, question, 24) for _ in range(2)]
    assert replies[0] == replies[1]
    assert case.cache.replayed.state.length == length


def test_ours_brings_back_what_is_asked(case: Case) -> None:
    ready = case.before()
    brought = CONDITIONS[SPREAD](ready, K)
    assert case.overlap(case.cache.held_of_context(brought.state), case.second) > 0.9
    nothing = case.cache.replayed.repaired(
        ready.state, K, OURS, [question_of(case.second)], lambda: True
    )
    assert nothing.report.truncated
    assert tokens_held(nothing.state).tolist() == tokens_held(ready.state).tolist()


def test_a_unit_that_runs_twice_finds_the_same_and_is_resumed(
    timeless: Callable[[Any], Any], tmp_path: Path, silent: Console
) -> None:
    unit = Frontier(PROTOCOL, 5, "14→23", (8, K), (FULL, MATCHED, "Random-K", SPREAD))
    first = timeless(mq_niah.run(unit))
    suite = mq_niah.suite(PROTOCOL, [4], [8], 5, 1, {4: "1/6"})
    with_unit = type(suite)(suite.name, 5, suite.model, (unit,), suite.run, suite.rows)
    journal = tmp_path / "j.jsonl"
    assert timeless(run(with_unit, journal, silent, 1)) == first
    kept = Journal(journal)
    assert timeless(kept.records(key_of("mq-niah", unit))) == first
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
        told = {
            "kind": "case",
            "codec": "raw",
            "needles": 4,
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
            **told,
            **sizes,
            "condition": condition,
            "right": right,
            "held": 0.5,
            "overlap": 0.25,
            "seconds": 0.01,
        }

    found = [
        record(condition, k, partition, right)
        for partition in ("14→23", "24→13")
        for condition, k, right in (
            (FULL, 0, 1.0),
            (MATCHED, 8, 0.0),
            (MATCHED, 48, 0.5),
            (SPREAD, 8, 0.5),
        )
    ]
    rows = mq_niah.suite(PROTOCOL, [4], [8], 5, 1, {4: "1/6"}).rows(found)
    gains = [row for row in rows if "against" in row]
    assert [(row["of"], row["k"], row["mean"], row["n"]) for row in gains] == [(SPREAD, 8, 0.5, 2)]
    scores = {(row["condition"], row["k"]): row["mean"] for row in rows if "mean" in row}
    assert scores[MATCHED, 48] == 0.5
    assert {row["partition"] for row in rows if "partition" in row} == {"14→23", "24→13"}


def test_a_suite_is_found_by_its_name_and_what_is_none_is_refused() -> None:
    def made(*names: str, ks: tuple[int, ...] = ()) -> Any:
        return mq_niah_suites.suite_of(
            Protocol("none", 0, "", 0), mq_niah_suites.Chosen(names, ks, 7, 3)
        )

    assert [unit.protocol.needles for unit in made("2q", "8q").units] == [2, 2, 2, 8, 8, 8]
    assert {unit.protocol.policy for unit in made("policies").units} == {
        "snapkv",
        "h2o",
        "streaming_llm",
        "scissorhands",
    }
    assert made("anytime").units[0].protocol.tokens == 6000
    assert made("revisit", ks=(40,)).units[0].k == 40
    for names, ks in ((("4q", "revisit"), ()), (("5q",), ()), (("revisit",), (8, 16))):
        with pytest.raises(BadSuite):
            made(*names, ks=ks)
