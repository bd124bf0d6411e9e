"""A turn with a user's message brings the end of the log, as far as a template may say it otherwise."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvrecall.domain.messages import Message
from kvrecall.domain.reports import MemoryReport, TurnOutcome
from kvrecall.domain.rewrites.rewrite import Edit, Rewrite
from kvrecall.domain.sessions.session import Turn
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.token_log import count_tokens, join_tokens, restate_turns
from services.sessions.log_end import read_log_end

ASKED = [Message("user", "And now?")]


def turn(number: int, role: str, tokens: range, stop: int, rewrite: Rewrite | None = None) -> Turn:
    """A turn of one message and an answer."""
    outcome = TurnOutcome(
        session="s",
        turn=number,
        message=Message("assistant", f"answer {number}", reasoning="because"),
        finish_reason="stop",
        prompt_tokens=4,
        output_tokens=4,
        memory=MemoryReport(),
        repairs=(),
        seconds={},
        stop=stop,
        rewrite=rewrite,
    )
    messages = (Message(role, f"said {number}"),)
    return Turn("s", number, messages, tuple(tokens), outcome, (4, len(tokens) - 4))


REWRITE = Rewrite(0, 0, (Edit(70, 80, (5, 6)),))
LOG = [
    turn(1, "user", range(100), 100),
    turn(2, "user", range(200, 300), 192, REWRITE),
    turn(3, "tool", range(400, 410), 202),
]


def make(**given: Any) -> tuple[Any, Any, Any]:
    """A catalog with the log, the session, and the worker's description."""

    async def get_after(session: str, number: int, limit: int) -> list[Turn]:
        return LOG[number : number + limit]

    catalog = SimpleNamespace(turns=SimpleNamespace(get_after=get_after))
    settings = SimpleNamespace(**{"keep_reasoning": False, "episodes": None, **given})
    session = SimpleNamespace(id="s", turns=given.get("turns", len(LOG)), settings=settings)
    info = SimpleNamespace(rewrites=given.get("rewrites", True), has_states=False, page_tokens=64)
    return catalog, session, info


async def read(messages: list[Message], **given: Any) -> pb.Earlier | None:
    catalog, session, info = make(**given)
    return await read_log_end(catalog, session, messages, info)


async def test_the_messages_since_the_users_last_one_come_with_tokens_before_them() -> None:
    found = await read(ASKED)
    assert found is not None
    assert [message.content for message in found.messages] == [
        *("said 2", "answer 2", "said 3", "answer 3")
    ]
    assert found.messages[1].reasoning == "because"
    log = [*range(70), 5, 6, *range(80, 100), *range(200, 300), *range(400, 410)]
    assert list(found.token_ids) == log == join_tokens(LOG)
    assert count_tokens(LOG) == len(log)


@pytest.mark.parametrize(
    "given", [{"keep_reasoning": True}, {"episodes": object()}, {"rewrites": False}, {"turns": 0}]
)
async def test_nothing_is_brought_where_nothing_is_rewritten(given: dict[str, Any]) -> None:
    assert await read(ASKED, **given) is None


async def test_within_a_loop_of_tools_nothing_is_rewritten() -> None:
    assert await read([Message("tool", "found", tool_call_id="c1")]) is None


def test_earlier_turns_have_what_is_left_of_them() -> None:
    first, second, third = restate_turns(LOG)
    assert first.token_ids == (*range(70), 5, 6, *range(80, 100))
    assert first.utterance_tokens == (4, 88)
    assert [each.outcome.stop for each in (first, second, third)] == [92, 192, 202]
