"""The unit of a session archive."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class RecordKind(IntEnum):
    """The kind of a record."""

    HEADER = 1
    SESSION = 2
    STATE = 3
    TURN = 4
    CALL = 5
    REPAIR = 6
    EPISODES = 7
    EPISODE = 8
    SEGMENT = 9
    PAGE = 10
    RESPONSE = 11
    CONVERSATION = 12
    SIGNATURE = 13
    END = 255


@dataclass(frozen=True)
class Record:
    """A JSON value, and bytes that belong to it."""

    kind: RecordKind
    value: Any = None
    data: bytes = b""
