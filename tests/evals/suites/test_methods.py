"""Suite methods on one short recording."""

from collections.abc import Callable
from typing import Any

import pytest

from evals import harness
from evals.configs import FULL, parse_configs
from evals.errors import BadExample
from evals.harness import Setup
from evals.languages.reference import REFERENCE
from evals.suites.longconv.conversations import generate_topics
from evals.suites.methods import suite as methods_suite
from evals.suites.methods.cases import CaseSize, build_case
from reference import MODEL_PATH

SIZE = CaseSize(context=700, continuation=200, facts=2)
MakeSetup = Callable[..., Setup]


@pytest.fixture(scope="module")
def messages() -> list[dict[str, Any]]:
    return generate_topics(4, 1500, 3, 4).messages()


def test_facts_are_planted_at_spread_depths_and_the_recording_goes_on(
    messages: list[dict[str, Any]],
) -> None:
    tokenizer = harness.load(str(MODEL_PATH)).tokenizer
    case = build_case(messages, 3, SIZE, REFERENCE, tokenizer)
    assert [question.depth for question in case.questions] == pytest.approx([0.25, 0.75], abs=0.15)
    assert harness.count_tokens(tokenizer, case.context) <= SIZE.context
    following = [dict(message) for message in case.continuation]
    start = messages.index(following[0])
    assert following == messages[start : start + len(following)]
    assert messages[start - 1] in case.context
    stating = [m for m in case.context if m["role"] == "user" and m not in messages]
    answers = [question.answer for question in case.questions]
    assert [answer in m["content"] for answer, m in zip(answers, stating, strict=True)] == [
        True
    ] * 2
    assert build_case(messages, 3, SIZE, REFERENCE, tokenizer) == case
    with pytest.raises(BadExample, match="no room for 2 facts"):
        build_case(messages[:4], 3, SIZE, REFERENCE, tokenizer)


def test_the_full_cache_answers_all_and_a_small_budget_is_away_from_it(
    make_setup: MakeSetup,
) -> None:
    suite = methods_suite.suite(
        make_setup(FULL), parse_configs(["streaming_llm"]), ["1/4", "1000"], [], 1, SIZE
    )
    assert [unit.setup.config.name for unit in suite.units] == [FULL, "streaming_llm"]
    records = [record for unit in suite.units for record in suite.run(unit)]
    rows = {(row["condition"], row["method"], row["share"]): row for row in suite.rows(records)}
    assert rows[methods_suite.RECALL, FULL, "1/1"]["mean"] == 1.0
    assert rows["mean KL, nats", "streaming_llm", "1000"]["mean"] == pytest.approx(0, abs=1e-5)
    assert rows["mean KL, nats", "streaming_llm", "1/4"]["mean"] > 0.01
    assert rows["top-1 agreement", "streaming_llm", "1000"]["mean"] == 1.0
    assert rows[methods_suite.RECALL, "streaming_llm", "1/4"]["n"] == SIZE.facts
