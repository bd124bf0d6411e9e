"""Suite longconv on a conversation of a few hundred tokens."""

from collections.abc import Callable, Sequence
from typing import Any

from evals.configs import parse_configs
from evals.harness import Setup
from evals.suite import Record
from evals.suites.longconv import suite as longconv
from evals.suites.longconv.suite import LongConv

MakeSetup = Callable[..., Setup]


def small(setup: Setup) -> LongConv:
    return LongConv(setup, tokens=500, topics=3, questions=6)


def questions_in(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["kind"] == "question"]


def test_the_full_cache_answers_and_the_newest_rows_alone_do_not(make_setup: MakeSetup) -> None:
    full = questions_in(longconv.run(small(make_setup("full", "1/1"))))
    newest = questions_in(longconv.run(small(make_setup("streaming_llm", "1/8"))))
    assert [record["expected"] for record in full] == [record["expected"] for record in newest]
    assert sum(record["right"] for record in full) >= 5
    assert sum(record["right"] for record in newest) <= 3


def test_a_unit_is_reproducible(
    make_setup: MakeSetup, without_seconds: Callable[[Any], Any]
) -> None:
    unit = small(make_setup("epicache", "1/4"))
    assert without_seconds(longconv.run(unit)) == without_seconds(longconv.run(unit))


def test_every_config_of_a_budget_has_the_same_number_of_rows(make_setup: MakeSetup) -> None:
    configs = ("snapkv", "keydiff", "pyramidkv", "adakv", "epicache+one_pass")
    histories = [longconv.run(small(make_setup(config, "1/4")))[0] for config in configs]
    assert len({(history["rows"], history["length"]) for history in histories}) == 1
    assert all(history["active_rows"] <= history["rows"] for history in histories)


def test_a_question_records_the_episode_it_was_matched_with(make_setup: MakeSetup) -> None:
    history, *questions = longconv.run(small(make_setup("epicache+per_episode@uniform", "1/4")))
    assert history["episodes"] == 2
    assert 0 < history["index_bytes"] < 0.02 * history["copy_bytes"]
    assert {record["episode"] for record in questions} <= {0, 1}
    assert {record["held"] for record in questions} <= {0.0, 1.0}
    assert all(record["rows_moved"] + record["rows_kept"] > 0 for record in questions)


def test_a_suite_has_the_full_cache_once_and_every_config_at_every_budget(
    make_setup: MakeSetup,
) -> None:
    found = longconv.suite(
        small(make_setup("full")), parse_configs(["snapkv", "full", "keydiff"]), ["1/8", "1/4"], 3
    )
    assert len(found.units) == 3 * (1 + 2 * 2)
    assert len(set(found.units)) == len(found.units)
    assert {unit.setup.seed for unit in found.units} == {11, 12, 13}
