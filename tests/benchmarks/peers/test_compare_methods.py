"""Cases for kvpress: the same tokens as in a session of ours, and records of the same form."""

import json
from pathlib import Path

import pytest

from benchmarks.peers import compare_methods
from evals import harness
from evals.configs import FULL, parse_config
from evals.harness import Session, Setup
from evals.suites.methods import suite as methods_suite
from evals.suites.methods.suite import MethodCase, load_case
from kvrecall.domain.settings.session import EpisodeSettings
from reference import MODEL_PATH


@pytest.fixture(scope="module")
def unit() -> MethodCase:
    (unit,) = compare_methods.list_units(str(MODEL_PATH), [], 1)
    return unit


def test_a_case_has_the_tokens_of_a_session(unit: MethodCase) -> None:
    case = load_case(unit)
    encoded = compare_methods.encode_case(str(MODEL_PATH), case)
    setup = Setup(str(MODEL_PATH), parse_config(FULL), "", 0, 128, EpisodeSettings())
    tokens = len(encoded["context"]) + len(encoded["continuation"])
    with harness.open_worker(setup, tokens) as worker:
        session = Session(worker, harness.build_spec(setup, tokens))
        session.append(case.context)
        session.append(case.continuation)
        assert session.token_ids == encoded["context"] + encoded["continuation"]
    assert 0 < len(encoded["recorded"]) < len(encoded["continuation"])
    assert len(encoded["questions"]) == len(case.questions)


def test_answers_of_a_press_become_rows_of_the_same_suite(unit: MethodCase) -> None:
    case = load_case(unit)
    tokenizer = harness.load(str(MODEL_PATH)).tokenizer
    replies = [tokenizer.encode(f"It is {case.questions[0].answer}.")] * len(case.questions)
    answer = {
        "arm": "kvpress snapkv",
        "budget": "1/8",
        "rows": 100,
        "length": 800,
        "active_rows": 100.0,
        "replies": replies,
        "heard": 50,
        "kl": 0.5,
        "top1": 0.75,
    }
    rows = methods_suite.result_rows(list(compare_methods.to_records(unit, case, [answer])), 0)
    means = {row["condition"]: row["mean"] for row in rows}
    assert means == {
        methods_suite.RECALL: 1 / len(case.questions),
        "mean KL, nats": 0.5,
        "top-1 agreement": 0.75,
    }


def test_every_recording_of_a_folder_is_a_case_of_its_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text('[{"role": "user", "content": "Hello?"}]')
    units = compare_methods.list_units(str(MODEL_PATH), [tmp_path], 9)
    assert len({compare_methods.case_key(unit) for unit in units}) == 2


def test_a_case_is_journaled_once(tmp_path: Path) -> None:
    journal = tmp_path / "kvpress.journal.jsonl"
    compare_methods.append_journal(journal, "one", [{"kl": 1.0}])
    compare_methods.append_journal(journal, "one", [{"kl": 2.0}])
    assert compare_methods.read_journal(journal) == {"one": [{"kl": 1.0}]}
    assert len([json.loads(line) for line in journal.read_text().splitlines()]) == 1
