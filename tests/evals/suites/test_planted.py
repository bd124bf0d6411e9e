"""Suite planted on short generated texts, in the packaged model."""

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from evals import harness
from evals.errors import BadDataFile, BadSuite
from evals.suites.planted import suite as planted
from evals.suites.planted.facts import FORMS, Fact, Split, draw_facts
from evals.suites.planted.rows import FULL, result_rows
from evals.suites.planted.sessions import Cell, open_engine
from evals.suites.planted.suite import NONE, Planted
from evals.suites.planted.texts import build_text, plant
from reference import MODEL_PATH

MODEL = str(MODEL_PATH)
count_tokens = partial(harness.count_tokens, harness.load(MODEL).tokenizer)
REPAIRS = planted.CONDITIONS[2:]
UNIT = Planted(
    MODEL, "", "tuning", 3, tokens=500, budget=120, k=24, conditions=REPAIRS, block_tokens=64
)


@pytest.mark.parametrize("count", [1, 3])
def test_every_statement_is_planted_once_and_spoken_by_the_user(count: int) -> None:
    text = build_text("", "tuning", 1, 600, count_tokens)
    facts = draw_facts(random.Random(1), "tuning", count)
    messages = plant(text, facts, seed=1)
    for fact in facts:
        stating = [each for each in messages if fact.statement in each["content"]]
        assert [each["role"] for each in stating] == ["user"]
        assert fact.statement not in "".join(each["content"] for each in text)
    assert [each["role"] for each in messages] == [each["role"] for each in text]
    assert 600 <= count_tokens(text) < 700


def test_the_splits_share_no_wording() -> None:
    forms = {split: {form.question for form in FORMS[split]} for split in FORMS}
    assert not forms["tuning"] & forms["held_out"]
    assert build_text("", "tuning", 1, 300, count_tokens) != build_text(
        "", "held_out", 1, 300, count_tokens
    )


def test_real_texts_of_the_splits_come_from_other_files(tmp_path: Path) -> None:
    for name in ("ada", "bob", "cleo"):
        lines = [
            {"speaker": ("A", "B")[i % 2], "dia_id": f"D1:{i}", "text": f"{name} says {i}."}
            for i in range(60)
        ]
        conversation = {"speaker_a": "A", "speaker_b": "B", "session_1": lines}
        (tmp_path / f"{name}.json").write_text(json.dumps({"conversation": conversation, "qa": []}))

    def speakers(split: Split) -> set[str]:
        texts = [build_text(str(tmp_path), split, seed, 200, count_tokens) for seed in range(4)]
        return {message["content"].split()[0] for text in texts for message in text}

    assert speakers("tuning") == {"ada", "cleo"}
    assert speakers("held_out") == {"bob"}


def test_a_text_without_room_for_the_facts_is_refused() -> None:
    text = build_text("", "tuning", 1, 60, count_tokens)
    with pytest.raises(BadDataFile, match="no room"):
        plant(text[:3], draw_facts(random.Random(1), "tuning", 4), seed=1)


def test_a_reply_is_right_if_every_token_of_the_value_is_predicted() -> None:
    """What the model predicts after the same words in its own context is what it read there."""
    fact = Fact("", "", "The number of the room is", "47")
    text = [
        {"role": "user", "content": "say it"},
        {"role": "assistant", "content": "The number of the room is 47."},
    ]
    with open_engine(MODEL, 600, 1, 64) as engine:
        base = Cell.append(engine, turns=[text] * 4, seed=0, method="full", budget=600)
        (reply,) = base.ask([fact])
        (other,) = base.ask([replace(fact, value="93")])
        assert base.ask([fact]) == [reply], "nothing is committed"
    assert reply.right == (reply.text == "47")
    assert other.right == (other.text == "93")
    assert reply.log_prob > other.log_prob
    assert not (reply.right and other.right)


def test_every_condition_repairs_its_own_fork_within_k() -> None:
    records = planted.run(UNIT)
    assert [each["condition"] for each in records] == [name for name, _ in REPAIRS]
    for each in records:
        assert each["promoted"] > 0
        assert each["promoted"] <= UNIT.k
        assert 0 <= each["in_statements"] <= 1
    again = planted.run(UNIT)
    seconds = {"seconds": 0}
    assert [dict(each) | seconds for each in again] == [dict(each) | seconds for each in records]


def test_no_fork_sees_another_ones_rows() -> None:
    together = planted.run(UNIT)
    for condition, record in zip(UNIT.conditions, together, strict=True):
        (alone,) = planted.run(replace(UNIT, conditions=(condition,)))
        assert alone["log_prob"] == record["log_prob"]
        assert alone["promoted"] == record["promoted"]


def test_without_a_repair_the_session_has_its_whole_budget() -> None:
    records = planted.run(replace(UNIT, k=0, conditions=planted.CONDITIONS[:2]))
    assert [each["condition"] for each in records] == [FULL, NONE]
    text = build_text("", "tuning", 3, 500, count_tokens)
    turns = harness.split_turns(text, harness.load(MODEL).tokenizer, 64)
    with open_engine(MODEL, 1000, 1, 64) as engine:
        rows = {}
        for method, budget in (("snapkv", 120), ("full", 1000)):
            base = Cell.append(engine, turns=turns, seed=3, method=method, budget=budget)
            rows[method] = max(engine.memory(engine.session("base")).active_rows)
            state = base.state
            base.close()
    assert 120 - state.unsettled <= rows["snapkv"] <= 120
    assert rows["full"] == state.length


def test_a_method_is_a_run_configuration() -> None:
    """Prompts over every stored row leave rows that other prompts do not, and are asked alike."""
    stored = replace(UNIT, conditions=REPAIRS[-1:])
    (with_all,) = planted.run(replace(stored, method="snapkv^stored"))
    (with_active,) = planted.run(stored)
    assert with_all["method"] == "snapkv^stored"
    assert with_all["log_prob"] != with_active["log_prob"]


def test_all_numbers_of_questions_are_asked_of_one_text() -> None:
    unit = replace(UNIT, facts=3, asked=(1, 3), conditions=REPAIRS[-1:], k=48)
    full = replace(unit, k=0, conditions=planted.CONDITIONS[:1])
    records = [*planted.run(unit), *planted.run(full)]
    assert [len(each["expected"]) for each in records] == [1, 3, 1, 3]
    first, every = records[0]["expected"], records[1]["expected"]
    assert every[:1] == first
    assert [each["expected"] for each in records[2:]] == [first, every]
    assert {each["planted"] for each in records} == {3}


def test_a_long_result_is_a_signal_with_the_first_question_in_it() -> None:
    unit = replace(UNIT, facts=2, asked=(2,), results=(150, 300), conditions=REPAIRS[3:4])
    records = planted.run(unit)
    names = ["questions", "result of 150 tokens", "result of 300 tokens"]
    assert [each["signal"] for each in records] == names
    assert [len(each["expected"]) for each in records] == [2, 1, 1]
    assert [each["signal_tokens"] // 150 for each in records[1:]] == [1, 2]
    assert all(0 < each["promoted"] <= UNIT.k for each in records)


def test_a_suite_has_results_at_the_largest_k_alone_and_whole_texts_in_order() -> None:
    suite = planted.suite(UNIT, (2, 4), (32, 48), 2, (500,))
    assert [(unit.seed, unit.k, unit.results) for unit in suite.units] == [
        (seed, k, results) for seed in (3, 4) for k, results in ((0, ()), (32, ()), (48, (500,)))
    ]
    assert {(unit.facts, unit.asked) for unit in suite.units} == {(4, (2, 4))}


def test_the_full_cache_is_among_any_conditions() -> None:
    names = [name for name, _ in planted.choose_conditions(["bursts (paper)"])]
    assert names == [FULL, "bursts (paper)"]
    assert planted.choose_conditions([]) == planted.CONDITIONS
    with pytest.raises(BadSuite, match="no condition 'burst'"):
        planted.choose_conditions(["burst"])


def test_a_number_of_questions_at_which_the_full_cache_guesses_is_listed() -> None:
    common = {"signal": "questions", "planted": 4, "split": "tuning", "method": "snapkv"}
    records = [
        {**common, "facts": facts, "budget": 9, "condition": FULL, "k": 0, "seed": seed}
        | {"right": right, "log_prob": -1.0}
        for facts, values in ((2, (1.0, 1.0, 0.5)), (4, (0.0, 0.25, 0.5)))
        for seed, right in enumerate(values)
    ]
    rows = result_rows(records, 0)
    assert {row["facts"] for row in rows if "of" in row} == {2}
    (listed,) = [row for row in rows if row.get("unreported")]
    assert (listed["facts"], listed["chance"]) == (4, 0.25)


def test_rows_compare_with_the_full_cache_and_the_paper_text_by_text() -> None:
    common = {
        "signal": "questions",
        "facts": 1,
        "planted": 1,
        "split": "tuning",
        "method": "snapkv",
        "budget": 256,
    }
    records = [
        {**common, "condition": name, "k": k, "seed": seed, "right": right, "log_prob": -1.0}
        for name, k, values in (
            (FULL, 0, (1.0, 1.0)),
            ("bursts (paper)", 48, (0.0, 1.0)),
            ("spread", 48, (1.0, 1.0)),
        )
        for seed, right in enumerate(values)
    ]
    rows = result_rows(records, 0)
    means = {row["condition"]: row["mean"] for row in rows if "mean" in row}
    assert means["spread"] == 1.0
    assert means["spread minus bursts (paper)"] == 0.5
    assert means["spread minus full cache"] == 0.0
    assert means["bursts (paper) minus full cache"] == -0.5


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(BadSuite, match="no split 'test'; there are tuning, held_out"):
        planted.parse_split("test")
