"""Suite passkey on short histories."""

from collections.abc import Callable
from functools import partial

import pytest

from evals import harness
from evals.configs import parse_configs
from evals.harness import Setup
from evals.suites import passkey
from evals.suites.passkey import Passkey, PasskeyHistory, build_history
from reference import MODEL_PATH

MakeSetup = Callable[..., Setup]


@pytest.fixture(scope="module")
def history() -> PasskeyHistory:
    return build_history(
        3, 600, partial(harness.count_tokens, harness.load(str(MODEL_PATH)).tokenizer)
    )


@pytest.mark.parametrize(("depth", "share"), [(0.0, 0.0), (0.5, 0.5), (1.0, 1.0)])
def test_the_passkey_is_stated_once_at_its_depth(
    history: PasskeyHistory, depth: float, share: float
) -> None:
    messages = history.messages(depth)
    stating = [
        index for index, message in enumerate(messages) if history.value in message["content"]
    ]
    assert len(stating) == 1
    assert (stating[0] - 1) / (len(messages) - 3) == pytest.approx(share, abs=0.05)


def test_all_depths_have_the_same_messages(history: PasskeyHistory) -> None:
    contents = [
        sorted(message["content"] for message in history.messages(depth))
        for depth in (0.0, 0.3, 1.0)
    ]
    assert contents[0] == contents[1] == contents[2]


def test_the_newest_rows_alone_answer_a_passkey_at_the_end_and_none_at_the_beginning(
    make_setup: MakeSetup,
) -> None:
    found = passkey.run(Passkey(make_setup("streaming_llm", "96"), 500, (0.0, 1.0)))
    assert [record["right"] for record in found] == [0.0, 1.0]
    assert [record["depth"] for record in found] == [0.0, 1.0]
    whole = passkey.run(Passkey(make_setup("full", "1/1"), 500, (0.0,)))
    assert whole[0]["right"] == 1.0


def test_rows_have_every_length_and_depth_by_method(make_setup: MakeSetup) -> None:
    suite = passkey.suite(
        make_setup("full", "96"), parse_configs(["streaming_llm"]), 1, [200, 300], [0.0, 1.0]
    )
    assert {(unit.setup.config.name, unit.tokens) for unit in suite.units} == {
        (config, tokens) for config in ("full", "streaming_llm") for tokens in (200, 300)
    }
    rows = suite.rows([record for unit in suite.units for record in suite.run(unit)])
    placed = {
        (row["method"], row["tokens"], row["depth"]): row["n"] for row in rows if "depth" in row
    }
    assert len(placed) == 2 * 2 * 2
    assert set(placed.values()) == {1}
