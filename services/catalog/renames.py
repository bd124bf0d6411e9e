"""Renames of stored JSON fields, from the terms of kvrecall 0.1.0 to the standard ones.

Each function takes and returns a JSON object; applied again, it changes nothing. Fields are renamed
where the stored types have them and nowhere else: text, metadata and arguments of users stay.
"""

from collections.abc import Callable, Mapping
from typing import Any

Object = dict[str, Any]

_REPAIR = {"cut": "truncated"}
_OUTCOME = {"repairs_left_out": "repairs_skipped"}
_CALL = {"heard_at": "last_event_at", "said": "consumed_in_turn"}
_FINISH_REASONS = {"remembered": "appended"}


def rename_in_repair(report: Object) -> Object:
    """Rename the fields of a RepairReport."""
    return _rename(report, _REPAIR)


def rename_in_repair_record(record: Object) -> Object:
    """Rename the fields of a RepairRecord."""
    return _change(record, report=rename_in_repair)


def rename_in_outcome(outcome: Object) -> Object:
    """Rename the fields and the finish reason of a TurnOutcome."""
    return _change(
        _rename(outcome, _OUTCOME),
        repairs=_each(rename_in_repair),
        own_repair=lambda repair: None if repair is None else rename_in_repair(repair),
        finish_reason=lambda reason: _FINISH_REASONS.get(reason, reason),
    )


def rename_in_turn(turn: Object) -> Object:
    """Rename the fields of a Turn."""
    return _change(turn, outcome=rename_in_outcome)


def rename_in_call(call: Object) -> Object:
    """Rename the fields of a PendingCall."""
    return _rename(call, _CALL)


def rename_in_session(session: Object) -> Object:
    """Rename the fields of a Session."""
    return _change(session, calls=_each(rename_in_call), repairs=_each(rename_in_repair))


def rename_in_response(response: Object) -> Object:
    """Rename the fields of the response in an idempotency record.

    That is a TurnOutcome, a Session, or something of which no field was renamed.
    """
    if "finish_reason" in response:
        return rename_in_outcome(response)
    if "settings" in response:
        return rename_in_session(response)
    return response


def _rename(value: Object, names: Mapping[str, str]) -> Object:
    return {names.get(name, name): field for name, field in value.items()}


def _change(value: Object, **changes: Callable[[Any], Any]) -> Object:
    return {
        name: changes[name](field) if name in changes else field for name, field in value.items()
    }


def _each(change: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    return lambda values: [change(value) for value in values]
