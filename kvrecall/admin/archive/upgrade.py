"""Upgrades of the records of older archive formats."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from kvrecall.admin.archive.record import Record, RecordKind
from services.catalog import renames

# By the format version they start from: what becomes of the JSON values, by kind of record.
_UPGRADES: Mapping[int, Mapping[RecordKind, renames.Change]] = MappingProxyType(
    {
        1: {
            RecordKind.SESSION: renames.rename_in_session,
            RecordKind.TURN: renames.rename_in_turn,
            RecordKind.CALL: renames.rename_in_call,
            RecordKind.REPAIR: renames.rename_in_repair_record,
        }
    }
)


def upgrade_record(record: Record, version: int) -> Record:
    """Return a record of a file of format `version` as the current format has it."""
    while version in _UPGRADES:
        change = _UPGRADES[version].get(record.kind)
        if change is not None:
            record = replace(record, value=change(record.value))
        version += 1
    return record
