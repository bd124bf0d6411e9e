"""A worker of a later protocol version."""

from kvrecall.protocol import PROTOCOL_VERSION
from workers.rpc import service


def apply() -> None:
    """Announce the next version."""
    vars(service)["PROTOCOL_VERSION"] = PROTOCOL_VERSION + 1
