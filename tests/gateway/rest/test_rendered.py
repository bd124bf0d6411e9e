"""Responses about sessions are made anew when the session or its state changes, and bounded."""

import json
from dataclasses import replace
from typing import Any

import pytest

from gateway.rest import rendered as module
from gateway.rest.rendered import RenderedSessions
from gateway.rest.schemas.sessions import to_session
from kvrecall import client
from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.sessions.state_machine import SessionState
from kvrecall.domain.settings.session import SessionSettings


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the sessions that were converted."""
    built: list[str] = []

    def build(session: Session, state: SessionState, model: str) -> client.Session:
        built.append(session.id)
        return to_session(session, state, model)

    monkeypatch.setattr(module, "to_session", build)
    return built


def make_session(id: str, **settings: Any) -> Session:
    chosen = SessionSettings(budget=64, repair_rows=8, method="snapkv", **settings)
    memory = MemoryReport(0, 64, 0, 0, 0, 0, 0, 0, (), (), (), {}, in_slot=False)
    return Session(id, 1, chosen, 0.0, 0.0, 0, memory)


def test_a_session_that_has_not_changed_is_rendered_once(counted: list[str]) -> None:
    rendered = RenderedSessions()
    session = make_session("s")
    idle = rendered.render(session, SessionState.IDLE, "m")
    assert rendered.render(session, SessionState.IDLE, "m") == idle
    assert counted == ["s"]
    running = json.loads(rendered.render(session, SessionState.DECODING, "m"))
    assert running == {**json.loads(idle), "state": "decoding"}
    after = json.loads(rendered.render(replace(session, turns=1), SessionState.IDLE, "m"))
    assert after == {**json.loads(idle), "turns": 1}
    assert counted == ["s", "s", "s"]


def test_what_is_held_is_bounded_in_number_and_in_size(
    counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SESSIONS", 2)
    rendered = RenderedSessions()
    sessions = [make_session(name) for name in "abc"]
    for session in (*sessions, sessions[2], sessions[0]):
        rendered.render(session, SessionState.IDLE, "m")
    assert counted == ["a", "b", "c", "a"]
    large = make_session("large", tools=('{"x": "' + "x" * 10_000 + '"}',))
    for _ in range(2):
        rendered.render(large, SessionState.IDLE, "m")
    assert counted[4:] == ["large", "large"]
