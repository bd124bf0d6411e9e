"""What a Redis server says of its replicas."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Replication:
    """A server's history, and how far its replicas have followed it.

    Attributes:
        history: Id of the history: another one after a failover.
        offset: Bytes that the server has sent to replicas.
        confirmed: Of these, what each replica that is online has confirmed.
    """

    history: str
    offset: int
    confirmed: tuple[int, ...]

    @classmethod
    def read(cls, info: bytes | Mapping[str, Any]) -> "Replication":
        """Read the reply to INFO replication, as it was sent or as redis-py parses it."""
        fields = _parse(info) if isinstance(info, bytes) else info
        replicas = [value for value in fields.values() if isinstance(value, Mapping)]
        return cls(
            str(fields["master_replid"]),
            int(fields["master_repl_offset"]),
            tuple(int(each["offset"]) for each in replicas if each.get("state") == "online"),
        )

    @property
    def has_replicas(self) -> bool:
        """Whether a replica is online."""
        return bool(self.confirmed)

    def has_copy(self, written: "Replication") -> bool:
        """Return whether a replica has confirmed what the server had written by then."""
        followed = self.history == written.history
        return followed and max(self.confirmed, default=-1) >= written.offset


def _parse(info: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for line in info.decode().splitlines():
        name, found, value = line.partition(":")
        if found and name.startswith("slave") and "=" in value:
            fields[name] = dict(part.split("=", 1) for part in value.split(","))
        elif found:
            fields[name] = value
    return fields
