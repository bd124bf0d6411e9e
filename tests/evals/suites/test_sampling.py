"""Suite sampling: what loops, what is right, and rows by candidate and kind of prompt."""

import json
from typing import Any

import pytest

from evals.suites.sampling.prompts import FACTS, OPEN, TALKS
from evals.suites.sampling.suite import has_word, loops, result_rows, suite
from kvrecall_server.cli.eval.run import build_setup

COLD = '{"temperature": 0.2}'


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("He loves to eat and he loves to sleep.", False),
        ("He is a good cat, a very good cat indeed. " * 3, True),
        ("He is a good cat, a very good cat indeed. " * 2, False),
        ("no no no no no no no no", True),
        ("", False),
    ],
)
def test_an_answer_loops_that_says_six_words_three_times(text: str, found: bool) -> None:
    assert loops(text) is found


def test_an_answer_is_right_with_one_of_the_words_as_a_whole_word() -> None:
    assert has_word("It is Paris.", ("paris",))
    assert has_word("There are 12.", ("twelve", "12"))
    assert not has_word("There are 112.", ("twelve", "12"))


def test_candidates_have_seeds_and_prompts_of_one_split() -> None:
    setup = build_setup("smollm2", "1/1", 5, 128, "4")
    units = suite(setup, ["{}", COLD], 2, "held-out").units
    assert [(each.sampling, each.setup.seed, each.split) for each in units] == [
        ("{}", 5, "held-out"),
        ("{}", 6, "held-out"),
        (COLD, 5, "held-out"),
        (COLD, 6, "held-out"),
    ]
    with pytest.raises(json.JSONDecodeError):
        suite(setup, ["cold"], 1, "tuning")


def test_the_splits_have_no_prompt_in_common() -> None:
    for prompts in (FACTS, OPEN, TALKS):
        tuning, held_out = (set(prompts[split]) for split in ("tuning", "held-out"))
        assert len(tuning) == len(held_out) > 1
        assert not tuning & held_out


def test_rows_are_means_by_candidate_and_kind() -> None:
    def record(sampling: str, kind: str, loops: float, **values: Any) -> dict[str, Any]:
        return {"sampling": sampling, "kind": kind, "loops": loops, **values}

    records = [
        record("{}", "fact", 0.0, right=1.0),
        record("{}", "fact", 1.0, right=0.0),
        record("{}", "open", 1.0),
        record(COLD, "talk", 0.0),
    ]
    rows = [(row["method"], row["condition"], row["mean"]) for row in result_rows(records, 0)]
    assert rows == [
        ("{}", "facts answered right", 0.5),
        ("{}", "open answers that loop", 1.0),
        (COLD, "turns that loop", 0.0),
    ]
