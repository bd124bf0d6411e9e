"""A long tool result that names its subject at the very beginning: a repair sees all of it."""

import json
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from reference.chat import TOPICS, small_talk
from reference.conversation import SYSTEM_LINES
from reference.tools import TOOLS
from reference.words import draw_names

Json = dict[str, Any]

FACTS = 8
ASKED = 2
RESULT_TOKENS = 4000
# A result of small talk repeats phrases of the session's. What it repeats takes rows, too.
REPAIR_ROWS = 128
EXCHANGES = 130  # of small talk, of about 38 tokens each
ON_CALL = TOOLS[0]
CALL: Json = {
    "id": "c1",
    "type": "function",
    "function": {"name": ON_CALL.name, "arguments": json.dumps({ON_CALL.argument: "tonight"})},
}


@pytest.fixture(scope="module")
def server(new_server: Callable[..., Any]) -> Iterator[Any]:
    """A server of this module."""
    server = new_server()
    server.start()
    yield server
    server.kill()


def chat(seed: int, exchanges: int) -> list[Json]:
    """Small talk, recorded."""
    rng = random.Random(seed)
    said: list[str] = []
    messages = []
    for _ in range(exchanges):
        user, reply = small_talk(rng, rng.choice(sorted(TOPICS)), said)
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
    return messages


def lines(seed: int) -> str:
    """A log as a tool prints it: one word again and again."""
    return "ok, " * (RESULT_TOKENS // 3)


def notes(seed: int) -> str:
    """Ordinary text: as the user and the assistant have talked, in other words."""
    return " ".join(message["content"] for message in chat(1000 + seed, EXCHANGES))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("filling", [lines, notes])
def test_a_repair_finds_the_fact_that_a_long_result_names_at_its_beginning(
    server: Any, say: SimpleNamespace, seed: int, filling: Callable[[int], str]
) -> None:
    client = server.own
    names = draw_names(random.Random(seed), "held_out")[:FACTS]
    values = [f"{chr(ord('A') + i)}{4127 + 611 * i}" for i in range(FACTS)]
    session = client.create_session(
        budget=256,
        research={"method": "snapkv", "repair_rows": REPAIR_ROWS, "repair_on": ["tool_result"]},
        tools=[ON_CALL.schema()],
        seed=7,
    ).id
    client.turn(session, [{"role": "system", "content": SYSTEM_LINES[0]}], generate=False)
    for name, value in zip(names, values, strict=True):
        stated = f"Please note that the badge list says {name} {value}."
        client.turn(
            session,
            [say.user(stated), {"role": "assistant", "content": "Noted."}],
            generate=False,
        )
    client.turn(session, chat(seed, 60), generate=False)
    question = "Who is on call tonight, and what is their badge?"
    client.turn(
        session,
        [say.user(question), {"role": "assistant", "content": None, "tool_calls": [CALL]}],
        generate=False,
    )
    result = json.dumps({ON_CALL.result: names[ASKED], "log": filling(seed)})
    client.event(session, "tool_call.completed", "c1", result=result)
    say.until(lambda: bool(client.repairs(session)), "the repair on the result")
    (repair,) = client.repairs(session)
    assert repair.observed_tokens == repair.signal_tokens >= RESULT_TOKENS
    assert not repair.truncated
    assert any(values[ASKED] in passage.promoted for passage in repair.passages)
