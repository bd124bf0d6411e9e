"""Versions of sessions: every commit makes another one, and a read makes none."""

from typing import Any

from kvrecall.domain.messages import Message
from kvrecall.domain.sessions.state_machine import SessionState
from kvrecall.domain.tool_events import ToolEvent, ToolEventType
from services.reading.versions import get_version


async def test_every_commit_makes_another_version(harness: Any, call: Any) -> None:
    session = await harness.session(repair_rows=8)
    versions = []

    async def note() -> None:
        await harness.wait_until_idle(session)
        found, _ = await harness.service.get(session)
        assert get_version(found) == get_version((await harness.service.get(session))[0])
        versions.append(get_version(found))

    await note()
    await harness.say(session, Message("user", "hello"))
    await note()
    await harness.pause(session, call("c1", "Bern"))
    await note()
    for kind, text in (
        (ToolEventType.STARTED, ""),
        (ToolEventType.DELTA, "ra"),
        (ToolEventType.COMPLETED, "rain"),
    ):
        await harness.service.event(session, ToolEvent(kind, "c1", text))
        await note()
    assert len(set(versions)) == len(versions)


async def test_a_state_is_part_of_a_version_where_it_is_shown(harness: Any) -> None:
    found, _ = await harness.service.get(await harness.session())
    shown = {get_version(found, state) for state in (None, *SessionState)}
    assert len(shown) == 1 + len(SessionState)
