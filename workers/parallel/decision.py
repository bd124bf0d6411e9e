"""Decision of a worker's scheduler, as rank 0 tells it the other ranks."""

from dataclasses import dataclass
from typing import Literal

from google.protobuf.message import Message

Action = Literal[
    "enter",
    "start",
    "advance",
    "decode",
    "fail",
    "fetch",
    "swap out",
    "preempt",
    "unload",
    "call",
    "nothing",
    "close",
]


@dataclass(frozen=True)
class Decision:
    """What every rank does next, in the order in which rank 0 says it.

    Attributes:
        action: What is done; "nothing" says that rank 0 is there.
        jobs: Numbers of the jobs that it is done to, in their order.
        session: Name of the session that it is done to.
        request: Of a job that enters, a message of the wire; None for a measurement.
        call: Name of a call between two steps, and its arguments.
    """

    action: Action
    jobs: tuple[int, ...] = ()
    session: str = ""
    request: Message | None = None
    call: tuple[str, tuple[object, ...]] = ("", ())
