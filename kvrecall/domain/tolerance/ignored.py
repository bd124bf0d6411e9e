"""What of a request is not taken as it was sent: a value that services and gateways report."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ignored:
    """A part of a request that was left out or replaced.

    `field`: its place, as `tools[4]`. `what`: its kind, or what was done about it, as `namespace`;
    empty for a member that is named by its field alone.
    """

    field: str
    what: str = ""
