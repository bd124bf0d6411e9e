"""The phases of a turn, whose seconds its outcome has."""

from enum import StrEnum


class Phase(StrEnum):
    """A phase of a turn. The members are in the order of time; a turn has some of them.

    The first three are the service's, the others its worker's. `first_token` ends with the first
    token, `decode` with the last. `append` is of recorded text, which is appended instead of an answer
    or before one.
    """

    WAITING = "waiting"
    MATCH = "match"
    FIND = "find"
    QUEUED = "queued"
    REWRITE = "rewrite"
    SETTLE = "settle"
    SWITCH = "switch"
    REPAIR = "repair"
    SHARE = "share"
    REMEMBER = "remember"
    PREFILL = "prefill"
    APPEND = "append"
    FIRST_TOKEN = "first_token"
    DECODE = "decode"
    EVICT = "evict"
    FLUSH = "flush"
