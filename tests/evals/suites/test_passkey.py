"""Suite passkey on short histories."""

from collections.abc import Callable
from functools import partial

import pytest

from evals import harness
from evals.configs import arms_of
from evals.harness import Setup
from evals.suites import passkey
from evals.suites.passkey import Hidden, Passkey, hidden

SetupOf = Callable[..., Setup]


@pytest.fixture(scope="module")
def told() -> Hidden:
    from reference import MODEL_PATH

    return hidden(3, 600, partial(harness.tokens_of, harness.loaded(str(MODEL_PATH)).tokenizer))


@pytest.mark.parametrize(("depth", "share"), [(0.0, 0.0), (0.5, 0.5), (1.0, 1.0)])
def test_the_passkey_stands_at_its_depth_and_once(told: Hidden, depth: float, share: float) -> None:
    messages = told.messages(depth)
    holding = [place for place, message in enumerate(messages) if told.value in message["content"]]
    assert len(holding) == 1
    assert (holding[0] - 1) / (len(messages) - 3) == pytest.approx(share, abs=0.05)


def test_all_depths_say_the_same_words(told: Hidden) -> None:
    contents = [
        sorted(message["content"] for message in told.messages(depth)) for depth in (0.0, 0.3, 1.0)
    ]
    assert contents[0] == contents[1] == contents[2]


def test_only_the_value_at_the_end_is_an_answer(told: Hidden) -> None:
    assert told.is_answered_by(f"It is {told.value}.")
    assert not told.is_answered_by(f"It is {told.value}9.")
    assert not told.is_answered_by(f"{told.value} is not it.")


def test_the_newest_rows_alone_hold_a_passkey_at_the_end_and_none_at_the_beginning(
    setup_of: SetupOf,
) -> None:
    found = passkey.run(Passkey(setup_of("streaming_llm", "96"), 500, (0.0, 1.0)))
    assert [record["right"] for record in found] == [0.0, 1.0]
    assert [record["depth"] for record in found] == [0.0, 1.0]
    whole = passkey.run(Passkey(setup_of("full", "1/1"), 500, (0.0,)))
    assert whole[0]["right"] == 1.0


def test_rows_have_every_length_and_depth_by_method(setup_of: SetupOf) -> None:
    suite = passkey.suite(
        setup_of("full", "96"), arms_of(["streaming_llm"]), 1, [200, 300], [0.0, 1.0]
    )
    assert {(unit.setup.arm.name, unit.tokens) for unit in suite.units} == {
        (arm, tokens) for arm in ("full", "streaming_llm") for tokens in (200, 300)
    }
    rows = suite.rows([record for unit in suite.units for record in suite.run(unit)])
    placed = {
        (row["method"], row["tokens"], row["depth"]): row["n"] for row in rows if "depth" in row
    }
    assert len(placed) == 2 * 2 * 2
    assert set(placed.values()) == {1}
