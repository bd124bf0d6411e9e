"""Suite longconv on a conversation of a few hundred tokens."""

from collections.abc import Callable, Sequence
from typing import Any

from evals.configs import arms_of
from evals.harness import Setup
from evals.suite import Record
from evals.suites.longconv import suite as longconv
from evals.suites.longconv.suite import LongConv

SetupOf = Callable[..., Setup]


def small(setup: Setup) -> LongConv:
    return LongConv(setup, tokens=500, topics=3, questions=6)


def asked(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["kind"] == "question"]


def test_the_full_cache_answers_and_the_newest_rows_alone_do_not(setup_of: SetupOf) -> None:
    full = asked(longconv.run(small(setup_of("full", "1/1"))))
    newest = asked(longconv.run(small(setup_of("streaming_llm", "1/8"))))
    assert [record["expected"] for record in full] == [record["expected"] for record in newest]
    assert sum(record["right"] for record in full) >= 5
    assert sum(record["right"] for record in newest) <= 3


def test_the_same_unit_finds_the_same_again(
    setup_of: SetupOf, timeless: Callable[[Any], Any]
) -> None:
    unit = small(setup_of("epicache", "1/4"))
    assert timeless(longconv.run(unit)) == timeless(longconv.run(unit))


def test_every_arm_of_a_budget_holds_the_same_number_of_rows(setup_of: SetupOf) -> None:
    arms = ("snapkv", "keydiff", "pyramidkv", "adakv", "epicache+one_pass")
    histories = [longconv.run(small(setup_of(arm, "1/4")))[0] for arm in arms]
    assert len({(history["rows"], history["length"]) for history in histories}) == 1
    assert all(history["active_rows"] <= history["rows"] for history in histories)


def test_a_question_of_an_episode_says_what_it_was_matched_with(setup_of: SetupOf) -> None:
    history, *questions = longconv.run(small(setup_of("epicache+per_episode@uniform", "1/4")))
    assert history["episodes"] == 2
    assert 0 < history["index_bytes"] < 0.02 * history["copy_bytes"]
    assert {record["episode"] for record in questions} <= {0, 1}
    assert {record["held"] for record in questions} <= {0.0, 1.0}
    assert all(record["rows_moved"] + record["rows_kept"] > 0 for record in questions)


def test_a_suite_has_each_conversation_once_in_full_and_every_arm_at_every_budget(
    setup_of: SetupOf,
) -> None:
    found = longconv.suite(
        small(setup_of("full")), arms_of(["snapkv", "full", "keydiff"]), ["1/8", "1/4"], 3
    )
    assert len(found.units) == 3 * (1 + 2 * 2)
    assert len(set(found.units)) == len(found.units)
    assert {unit.setup.seed for unit in found.units} == {11, 12, 13}
