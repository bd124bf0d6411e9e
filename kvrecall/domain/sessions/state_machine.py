"""The states of a session and the events that move it between them."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from kvrecall.domain.errors import IllegalTransition


class SessionState(StrEnum):
    """States of a session. Only `idle` and `paused` are ever stored."""

    IDLE = "idle"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PAUSED = "paused"
    REPAIRING = "repairing"


class SessionEvent(StrEnum):
    """Events that move a session from one state to another."""

    TURN_STARTED = "turn_started"
    TOKEN_GENERATED = "token_generated"
    TURN_ENDED = "turn_ended"
    CALLS_EMITTED = "calls_emitted"
    REPAIR_STARTED = "repair_started"
    REPAIR_ENDED_IN_IDLE = "repair_ended_in_idle"
    REPAIR_ENDED_IN_PAUSE = "repair_ended_in_pause"
    ROLLED_BACK_TO_IDLE = "rolled_back_to_idle"
    ROLLED_BACK_TO_PAUSE = "rolled_back_to_pause"


_STEPS = {
    (SessionState.IDLE, SessionEvent.TURN_STARTED): SessionState.PREFILLING,
    (SessionState.PAUSED, SessionEvent.TURN_STARTED): SessionState.PREFILLING,
    (SessionState.PREFILLING, SessionEvent.TOKEN_GENERATED): SessionState.DECODING,
    (SessionState.DECODING, SessionEvent.TOKEN_GENERATED): SessionState.DECODING,
    (SessionState.PREFILLING, SessionEvent.TURN_ENDED): SessionState.IDLE,
    (SessionState.DECODING, SessionEvent.TURN_ENDED): SessionState.IDLE,
    (SessionState.PREFILLING, SessionEvent.CALLS_EMITTED): SessionState.PAUSED,
    (SessionState.DECODING, SessionEvent.CALLS_EMITTED): SessionState.PAUSED,
    (SessionState.IDLE, SessionEvent.REPAIR_STARTED): SessionState.REPAIRING,
    (SessionState.PAUSED, SessionEvent.REPAIR_STARTED): SessionState.REPAIRING,
    (SessionState.REPAIRING, SessionEvent.REPAIR_ENDED_IN_IDLE): SessionState.IDLE,
    (SessionState.REPAIRING, SessionEvent.REPAIR_ENDED_IN_PAUSE): SessionState.PAUSED,
}
_ROLLBACKS = {
    (state, event): target
    for state in SessionState
    for event, target in (
        (SessionEvent.ROLLED_BACK_TO_IDLE, SessionState.IDLE),
        (SessionEvent.ROLLED_BACK_TO_PAUSE, SessionState.PAUSED),
    )
}
TRANSITIONS: Mapping[tuple[SessionState, SessionEvent], SessionState] = MappingProxyType(
    _STEPS | _ROLLBACKS
)


def next_state(state: SessionState, event: SessionEvent) -> SessionState:
    """The state after `event`. Raises IllegalTransition when the event cannot happen in `state`."""
    if (state, event) not in TRANSITIONS:
        raise IllegalTransition(f"a session that is {state} cannot have {event}")
    return TRANSITIONS[state, event]
