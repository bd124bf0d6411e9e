"""Notices: what readers of a stream learn of an event. Ids and numbers only, never text. Pure."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.events import (
    CallReported,
    EpisodesBuilt,
    EpisodesFailed,
    PagesRebuilt,
    PauseTimedOut,
    RepairBegan,
    RepairFailed,
    RepairFinished,
    ServiceEvent,
    SessionCreated,
    SessionDeleted,
    SessionForked,
    SessionMoved,
    StateChanged,
    TurnFailed,
    TurnFinished,
    TurnRetried,
    TurnStarted,
)
from kvrecall.domain.tool_calls import CallStatus

Value = Any
"""A value of JSON."""
GetTenant = Callable[[str], str | None]

DELETED = "deleted"
SNAPSHOT = "snapshot"


@dataclass(frozen=True)
class Notice:
    """Something that happened in a tenant's session: the kind of event, and its numbers."""

    name: str
    tenant: str
    session: str
    data: Mapping[str, Value]

    def to_json(self) -> dict[str, Any]:
        """Return the data as its readers get it: it names the session, if it is of one."""
        return {"session": self.session, **self.data} if self.session else dict(self.data)

    def encode(self) -> str:
        """Encode for another gateway."""
        return json.dumps([self.name, self.tenant, self.session, self.data])

    @classmethod
    def decode(cls, text: str | bytes) -> "Notice":
        """Decode what another gateway encoded. Raises ValueError for anything else."""
        values = json.loads(text)
        if not isinstance(values, list) or len(values) != len(fields(cls)):
            raise ValueError("not a notice")
        name, tenant, session, data = values
        texts = all(isinstance(each, str) for each in (name, tenant, session))
        if not texts or not isinstance(data, dict):
            raise ValueError("not a notice")
        return cls(name, tenant, session, data)


def to_notices(event: ServiceEvent, get_tenant: GetTenant) -> list[Notice]:
    """Convert an event; none for one that no reader needs, or of a session that is not known.

    `get_tenant` returns the tenant of a session that is active in this process. A turn that named
    another tenant's session is none of that session's.
    """
    found = _describe(event)
    foreign = isinstance(event, TurnFailed) and event.code == ErrorCode.UNKNOWN_SESSION
    if found is None or foreign:
        return []
    session, described = found
    tenant = event.tenant if isinstance(event, SessionDeleted) else get_tenant(session)
    if tenant is None:
        return []
    return [Notice(name, tenant, session, data) for name, data in described]


_Described = tuple[str, list[tuple[str, dict[str, Value]]]]


def _describe(event: ServiceEvent) -> _Described | None:
    """Return the session of an event, with names and data of its notices."""
    match event:
        case StateChanged(session, state):
            return session, [("state", {"state": state.value})]
        case TurnStarted() | TurnFinished() | TurnFailed() | TurnRetried():
            return _describe_turn(event)
        case RepairBegan() | RepairFinished() | RepairFailed():
            return _describe_repair(event)
        case CallReported(session, call, kind, status, late=False):
            return session, [("call", {"call": call, "status": status.value, "type": str(kind)})]
        case PauseTimedOut(session, calls):
            timed_out = {"status": CallStatus.TIMED_OUT.value, "type": "timed_out"}
            return session, [("call", {"call": call, **timed_out}) for call in calls]
        case _:
            return _describe_session(event)


def _describe_turn(event: TurnStarted | TurnFinished | TurnFailed | TurnRetried) -> _Described:
    match event:
        case TurnStarted(session, turn):
            return session, [("turn", {"turn": turn, "status": "started"})]
        case TurnFailed(session, code):
            return session, [("turn", {"turn": None, "status": "failed", "code": str(code)})]
        case TurnRetried():
            data: dict[str, Value] = {"turn": None, "status": "retried", "code": str(event.code)}
            return event.session, [("turn", {**data, "worker": event.worker})]
        case TurnFinished(outcome, _, timing):
            data = {
                "turn": outcome.turn,
                "status": "committed",
                "finish_reason": outcome.finish_reason,
                "prompt_tokens": outcome.prompt_tokens,
                "output_tokens": outcome.output_tokens,
                "length": outcome.memory.length,
                "durable": outcome.durable,
                "seconds": timing.total,
            }
            return outcome.session, [("turn", data)]


def _describe_repair(event: RepairBegan | RepairFinished | RepairFailed) -> _Described:
    match event:
        case RepairBegan(session, trigger, call):
            data: dict[str, Value] = {"trigger": str(trigger), "call": call or None}
            return session, [("repair", {"status": "started", **data})]
        case RepairFailed():
            data = {"trigger": str(event.trigger), "call": None, "code": str(event.code)}
            return event.session, [("repair", {"status": "failed", **data, "final": event.final})]
        case RepairFinished(session, report, memory):
            data = {
                "status": "committed",
                "trigger": str(report.trigger),
                "call": report.call_id or None,
                "promoted": report.promoted,
                "candidates": report.candidates,
                "scored_rows": report.scored_rows,
                "demoted": report.demoted,
                "seconds": report.seconds,
                "truncated": report.truncated,
                "in_pause": report.in_pause,
                "promoted_rows": memory.promoted_rows,
            }
            return session, [("repair", data)]


def _describe_session(event: ServiceEvent) -> _Described | None:
    match event:
        case EpisodesBuilt():
            numbers = {"episodes": event.episodes, "segments": event.segments}
            data: dict[str, Value] = {"status": "built", **numbers, "seconds": event.seconds}
            return event.session, [("episodes", data)]
        case EpisodesFailed():
            data = {"status": "failed", "step": event.step, "code": str(event.code)}
            return event.session, [("episodes", data)]
        case SessionMoved():
            workers = {"left": event.left, "worker": event.worker}
            return event.session, [("moved", {**workers, "seconds": event.seconds})]
        case PagesRebuilt():
            data = {"worker": event.worker, "pages": event.pages, "seconds": event.seconds}
            return event.session, [("rebuilt", data)]
        case SessionCreated(session):
            return session, [("created", {})]
        case SessionForked():
            return event.child, [("created", {"parent": event.session})]
        case SessionDeleted(session):
            return session, [(DELETED, {})]
        case _:
            return None
