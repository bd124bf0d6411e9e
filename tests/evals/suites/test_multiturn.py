"""Suite multiturn on two short dialogues, in the packaged model."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from evals import harness
from evals.configs import FULL
from evals.errors import BadConfig, BadExample, BadSuite
from evals.harness import Setup
from evals.languages.reference import REFERENCE
from evals.suites.multiturn import suite as multiturn
from evals.suites.multiturn.arms import DEFAULT_ARMS, Arm, choose_arms, parse_arm
from evals.suites.multiturn.dialogue import Size, Turn
from evals.suites.multiturn.kinds import build_dialogue
from evals.suites.multiturn.rows import result_rows
from evals.suites.multiturn.scores import CHOICE, DENSITY, EXACT, KL, TOP1, choose, score_reply
from evals.suites.multiturn.sessions import DialogueSession, count_rows, list_turns
from evals.suites.multiturn.suite import Unit
from kvrecall.protocol.v1 import worker_pb2 as pb
from reference import MODEL_PATH
from workers.engine.session import Distribution

MakeSetup = Callable[..., Setup]
MODEL = str(MODEL_PATH)


@pytest.fixture
def unit(make_setup: MakeSetup) -> Unit:
    return Unit(
        make_setup(FULL, seed=4),
        "qa",
        "end",
        Size(turns=2),
        "generated",
        choose_arms(["streaming_llm", "snapkv+repair"]),
        ("1/4",),
    )


def of_arm(records: Any, arm: str, measure: str) -> list[float]:
    return [each["right"] for each in records if each["arm"] == arm and each["measure"] == measure]


def unnamed(state: pb.SessionState) -> pb.SessionState:
    """A copy of a state without the ids of its pages: each session has a key of its own."""
    copy = pb.SessionState()
    copy.CopyFrom(state)
    copy.ClearField("page_ids")
    return copy


def test_the_full_cache_answers_a_question_at_the_end_and_arms_stay_within_their_budget(
    unit: Unit,
) -> None:
    records = multiturn.run(unit)
    assert of_arm(records, FULL, EXACT) == [1.0, 1.0]
    for arm in ("streaming_llm", "snapkv+repair"):
        assert len(of_arm(records, arm, EXACT)) == len(of_arm(records, arm, KL)) == 2
        held = [each for each in records if each["arm"] == arm]
        length = held[0]["length"]
        assert all(each["rows"] == length // 4 >= each["active_rows"] > 0 for each in held)
    assert multiturn.run(unit) == records


def test_an_arm_that_evicts_nothing_is_the_full_cache(unit: Unit) -> None:
    whole = replace(unit, arms=choose_arms(["snapkv"]), budgets=("1000",))
    records = multiturn.run(whole)
    assert of_arm(records, "snapkv", EXACT) == of_arm(records, FULL, EXACT)
    assert of_arm(records, "snapkv", KL) == pytest.approx([0, 0], abs=1e-5)
    assert of_arm(records, "snapkv", TOP1) == [1.0, 1.0]


def test_a_sparse_arm_keeps_every_row_and_reports_its_density_once_for_all_budgets(
    unit: Unit,
) -> None:
    sparse = replace(unit, arms=choose_arms(["full^0.9", "full^0.999"]), budgets=("1/4", "1/2"))
    records = multiturn.run(sparse)
    assert {each["budget"] for each in records} == {"1/1"}
    last = [each for each in records if each["turn"] == 2]
    assert all(each["active_rows"] == each["length"] for each in last)
    less, more = (of_arm(records, arm, DENSITY) for arm in ("full^0.9", "full^0.999"))
    assert len(less) == len(more) == len(of_arm(records, FULL, EXACT))
    assert all(0 < few <= many <= 1 for few, many in zip(less, more, strict=True))
    assert sum(less) < sum(more), "the first turn is too short to leave anything out"


def test_a_reply_is_chosen_among_the_candidates_behind_its_prefix(unit: Unit) -> None:
    records = multiturn.run(replace(unit, answers="chosen"))
    dialogue = build_dialogue("qa", 4, unit.size, REFERENCE, ())
    full = [each for each in records if each["arm"] == FULL]
    for turn, each in zip(dialogue.turns, full, strict=True):
        assert each["measure"] == CHOICE
        assert each["chance"] == 0.25
        assert each["reply"] in {turn.give([choice]) for choice in turn.choices}
        assert each["right"] == float(each["reply"] == turn.give(turn.answers))
    assert of_arm(records, FULL, CHOICE) == [1.0, 1.0]


def test_all_arms_replay_the_full_caches_reply_and_nothing_of_their_own(unit: Unit) -> None:
    dialogue = build_dialogue("qa", 4, unit.size, REFERENCE, ())
    asked = list_turns(dialogue, "end", "generated")
    assert [len(each.messages) for each in asked] == [2, 1], "the system's message comes first"
    rows = count_rows(MODEL, asked)
    with harness.open_worker(unit.setup, rows) as worker:
        full = DialogueSession(worker, parse_arm(FULL), rows, 4)
        recorded = [full.record(each) for each in asked]
        recorded_ids = list(full.session.token_ids)
        assert len(recorded_ids) <= rows
        full.close()
        arm = DialogueSession(worker, parse_arm("streaming_llm"), 60, 1)
        scored = [arm.replay(each, REFERENCE) for each in recorded]
        assert arm.session.token_ids == recorded_ids
        assert any(
            ours.reply != theirs.reply for ours, theirs in zip(scored, recorded, strict=True)
        )


def test_a_repair_brings_back_rows_by_the_question_and_not_by_the_recorded_reply(
    unit: Unit,
) -> None:
    dialogue = build_dialogue("qa", 4, unit.size, REFERENCE, ())
    asked = list_turns(dialogue, "end", "generated")
    rows = count_rows(MODEL, asked)
    with harness.open_worker(unit.setup, rows) as worker:
        full = DialogueSession(worker, parse_arm(FULL), rows, 4)
        recorded = [full.record(each) for each in asked]
        full.close()
        arm = DialogueSession(worker, parse_arm("snapkv+repair"), 110, 1)
        for each in recorded:
            arm.replay(each, REFERENCE)
        scored = arm.session.state
        arm.close()
        by_hand = DialogueSession(worker, parse_arm("snapkv+repair"), 110, 1)
        by_hand.session.append(recorded[0].messages)
        report = by_hand.session.repair(asked[1].messages)
        by_hand.session.append(recorded[1].messages)
        tokenizer = harness.load(MODEL).tokenizer
        prompt = len(tokenizer.encode(str(asked[1].messages[0]["content"])))
        assert 0 < len(report.promoted) <= by_hand.session.spec.repair_rows
        assert prompt <= report.signal_tokens <= prompt + 10
        assert unnamed(by_hand.session.state) == unnamed(scored)


def test_an_arm_takes_options_of_its_session(unit: Unit) -> None:
    arm = Arm("hurried", parse_arm("snapkv").config, {"repair_seconds": 0.5})
    spec = arm.build_spec("one", 100, 37, 3)
    assert spec.options == '{"repair_seconds": 0.5}'
    assert (spec.budget, spec.repair_rows, spec.method) == (100, 0, "snapkv")
    repaired = parse_arm("snapkv+repair")
    assert repaired.build_spec("one", 1000, 37, 3).repair_rows == 125
    assert repaired.build_spec("one", 300, 37, 3).repair_rows == 64
    assert repaired.build_spec("one", 80, 37, 3).repair_rows == 43
    assert multiturn.run(replace(unit, arms=(parse_arm(FULL), arm)))


def test_arms_are_chosen_by_name_or_configuration() -> None:
    assert [arm.name for arm in choose_arms([])] == list(DEFAULT_ARMS)
    names = [FULL, "snapkv+repair", 'snapkv{"window":16}', "snapkv~0.5+reselect/2"]
    assert [arm.name for arm in choose_arms(names[1:])] == names
    assert [arm.name for arm in choose_arms(["full^0.98"])] == [FULL, "full^0.98"]
    with pytest.raises(BadConfig, match="no arm of multiturn"):
        choose_arms(["epicache"])
    for kept in ("full+reselect", "full^0.98+reselect", "full~0.5"):
        with pytest.raises(BadConfig, match="no arm of multiturn"):
            choose_arms([kept])
    with pytest.raises(BadConfig, match="no run configuration"):
        choose_arms(["snapkv+"])


def test_names_that_do_not_exist_are_refused() -> None:
    with pytest.raises(BadSuite, match="no place 'front'"):
        multiturn.parse_places(["front"])
    with pytest.raises(BadSuite, match="no way 'sung'"):
        multiturn.parse_answers("sung", of_reference=True)
    assert multiturn.parse_places([]) == ("begin", "middle", "end")
    assert multiturn.parse_answers("", of_reference=True) == "generated"
    assert multiturn.parse_answers("", of_reference=False) == "chosen"


def test_dialogues_come_whole_one_after_the_other(unit: Unit) -> None:
    suite = multiturn.suite(unit, ("qa", "list"), ("begin", "end"), 2)
    assert [(each.setup.seed, each.kind, each.place) for each in suite.units] == [
        (seed, kind, place)
        for seed in (4, 5)
        for kind in ("qa", "list")
        for place in ("begin", "end")
    ]


def record(place: str, arm: str, measure: str, turn: int, right: float, seed: int = 1) -> Any:
    full = arm == FULL
    return {
        "kind": "qa",
        "place": place,
        "seed": seed,
        "turn": turn,
        "evidence": "own" if turn == 1 else "earlier",
        "arm": arm,
        "budget": "1/1" if full else "1/8",
        "rows": 100,
        "active_rows": 90.0,
        "measure": measure,
        "right": right,
        **({"chance": 0.25} if full and measure == CHOICE else {}),
    }


@pytest.fixture
def records() -> list[Any]:
    """Three dialogues of two turns: the full cache is right at both places, at the middle never."""
    made = []
    for seed in (1, 2, 3):
        for turn in (1, 2):
            for place, full, snapkv, keydiff in (
                ("begin", 1.0, 0.0, 1.0),
                ("middle", 0.0, 1.0, 1.0),
                ("end", 1.0, 1.0 if turn == 1 else 0.0, 1.0),
            ):
                for arm, right in ((FULL, full), ("snapkv", snapkv), ("keydiff", keydiff)):
                    made.append(record(place, arm, CHOICE, turn, right, seed))
                made.append(record(place, "snapkv", KL, turn, 0.5, seed))
    return made


def test_scores_have_rows_by_place_turn_and_evidence(records: list[Any]) -> None:
    rows = {
        (row["condition"], row["method"]): row
        for row in result_rows(records, 0)
        if row.get("measure") == CHOICE and "unreported" not in row
    }
    assert rows["qa/begin", "snapkv"]["mean"] == 0
    assert rows["qa/end", "snapkv"]["mean"] == 0.5
    assert rows["qa/end", "snapkv"]["n"] == 3, "the interval is over dialogues"
    assert rows["qa/end/t1", "snapkv"]["mean"] == 1
    assert rows["qa/end/earlier", "snapkv"]["mean"] == 0
    assert rows["qa/end", FULL]["share"] == "1/1"
    assert "budget" not in rows["qa/end", FULL]
    assert rows["qa/end", "snapkv"]["budget"] == 100


def test_a_cell_at_chance_is_listed_and_not_reported_but_its_distances_are(
    records: list[Any],
) -> None:
    rows = result_rows(records, 0)
    middle = [row for row in rows if row.get("place") == "middle"]
    unreported = [row for row in middle if row.get("unreported")]
    assert [(row["measure"], row["mean"], row["chance"]) for row in unreported] == [
        (CHOICE, 0.0, 0.25)
    ]
    assert {row["measure"] for row in middle if "unreported" not in row} == {KL}


def test_differences_are_paired_and_the_place_costs_what_the_full_cache_does_not_lose(
    records: list[Any],
) -> None:
    rows = {row["condition"]: row for row in result_rows(records, 0) if "against" in row}
    assert rows["qa/begin: keydiff minus snapkv"]["mean"] == 1
    assert rows["qa/end: keydiff minus snapkv"]["mean"] == 0.5
    assert rows["qa/begin: snapkv minus full"]["mean"] == -1
    assert rows["qa: snapkv minus full, begin minus end"]["mean"] == -0.5
    assert rows["qa: keydiff minus full, begin minus end"]["mean"] == 0
    assert not any("middle" in condition for condition in rows)


def test_a_reply_is_scored_by_the_kind_of_its_dialogue() -> None:
    turn = Turn(("a",), "Which?", ("Oakton", "Elmford"), (0,))
    listed = "The city list says Anna Oakton\nThe city list says Boris Elmford\nNoted"
    assert score_reply("qa", turn, "It says Anna Oakton.", REFERENCE) == {EXACT: 0.0}
    scores = score_reply("list", turn, listed, REFERENCE)
    assert scores["lines_f1"] == pytest.approx(2 * 1 * (2 / 3) / (1 + 2 / 3))
    assert scores["rouge_l"] == pytest.approx(2 * 2 / (11 + 2))
    assert score_reply("locomo", turn, "Elmford", REFERENCE) == {"f1": 1.0}


def test_candidates_with_the_same_first_token_are_refused() -> None:
    tokenizer = harness.load(MODEL).tokenizer
    turn = Turn(("a",), "Which?", ("Oakton",), (0,), ("Oakton", "Oakton hill"), ("It is",))
    kept = Distribution((1,), torch.zeros(1, 10))
    with pytest.raises(BadExample, match="do not differ in their first token"):
        choose(kept, turn, ["Oakton"], tokenizer)


def test_an_arm_has_the_options_of_its_configuration_and_its_own() -> None:
    (_, both, often, retrieving) = choose_arms(
        ["snapkv^stored+reselect", 'snapkv{"pool":1}+reselect/2', "snapkv~0.5"]
    )
    options = json.loads(both.build_spec("one", 100, 37, 3).options)
    assert options["prefill"] == {"attend": "stored"}
    assert options["reselect"] == {}
    spec = often.build_spec("one", 100, 37, 3)
    assert json.loads(spec.method_settings) == {"pool": 1}
    assert json.loads(spec.options) == {"reselect": {"every": 2}}
    assert json.loads(retrieving.build_spec("one", 100, 37, 3).options) == {
        "retrieve": {"share": 0.5}
    }
