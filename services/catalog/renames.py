"""Renames of stored JSON fields, from the terms of kvrecall 0.1.0 to the standard ones.

Each function takes and returns a JSON object; applied again, it changes nothing. Fields are renamed
where the stored types have them and nowhere else: text, metadata and arguments of users stay. A
value of another form than the stored type has is returned as it is, for the reader to refuse.
"""

from collections.abc import Callable, Mapping
from typing import Any

# A change of a JSON value.
Change = Callable[[Any], Any]

_REPAIR = {"cut": "truncated"}
_OUTCOME = {"repairs_left_out": "repairs_skipped"}
_CALL = {"heard_at": "last_event_at", "said": "consumed_in_turn"}


def rename_in_repair(report: Any) -> Any:
    """Rename the fields of a RepairReport."""
    return _rename(report, _REPAIR)


def rename_in_repair_record(record: Any) -> Any:
    """Rename the fields of a RepairRecord."""
    return _change(record, report=rename_in_repair)


def rename_in_outcome(outcome: Any) -> Any:
    """Rename the fields and the finish reason of a TurnOutcome."""
    return _change(
        _rename(outcome, _OUTCOME),
        repairs=_each(rename_in_repair),
        own_repair=rename_in_repair,
        finish_reason=lambda reason: "appended" if reason == "remembered" else reason,
    )


def rename_in_turn(turn: Any) -> Any:
    """Rename the fields of a Turn."""
    return _change(turn, outcome=rename_in_outcome)


def rename_in_call(call: Any) -> Any:
    """Rename the fields of a PendingCall."""
    return _rename(call, _CALL)


def rename_in_session(session: Any) -> Any:
    """Rename the fields of a Session."""
    return _change(session, calls=_each(rename_in_call), repairs=_each(rename_in_repair))


def rename_in_response(response: Any) -> Any:
    """Rename the fields of the response in an idempotency record.

    That is a TurnOutcome, a Session, or something of which no field was renamed.
    """
    if not isinstance(response, dict):
        return response
    if "finish_reason" in response:
        return rename_in_outcome(response)
    return rename_in_session(response) if "settings" in response else response


def _rename(value: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(value, dict):
        return value
    return {names.get(name, name): field for name, field in value.items()}


def _change(value: Any, **changes: Change) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        name: changes[name](field) if name in changes else field for name, field in value.items()
    }


def _each(change: Change) -> Change:
    return lambda values: list(map(change, values)) if isinstance(values, list) else values
