"""The identity of a Redis catalog: its id and version, required where its commands run.

A server may come back empty under a running process: after a failover to an empty replica, a
restart without its log, a FLUSHALL. Its keys then say of every session that there is none. So on one
server, or a primary behind sentinels, whatever may change something checks the identity in the
script that changes it, and plain reads are followed by a read of the identity on the same
connection. In a cluster the identity lies on one server: it is read before a change, and beside
reads. A cluster that loses another server's part is not noticed here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvrecall.domain.errors import CatalogReplaced
from services.catalog.redis import scripts
from services.catalog.redis.keys import Keys
from services.catalog.redis.shared_connection import Command
from services.catalog.versions import build_catalog_replaced

_REFUSED = "CATALOGREPLACED"
# Commands that change nothing: they are sent as they are.
_READS = frozenset(
    {"EXISTS", "GET", "HGET", "HGETALL", "HKEYS", "HMGET", "HRANDFIELD", "LLEN", "LRANGE"}
    | {"SMEMBERS", "SRANDMEMBER", "STRLEN", "TIME", "ZCARD", "ZRANGE", "ZRANDMEMBER"}
    | {"ZRANGEBYSCORE", "ZREVRANGEBYSCORE", "ZSCORE"}
)


@dataclass(frozen=True)
class RedisIdentity:
    """The id and the version that a catalog was opened with."""

    keys: Keys
    id: str
    version: str

    def build_reads(self, at_once: bool) -> list[tuple[str, Command]]:
        """Build the commands that read the identity, each after the key to route it by.

        `at_once`: in one command, of a server that has both keys.
        """
        names = (self.keys.id, self.keys.version)
        if at_once:
            return [(names[0], ("MGET", *names))]
        return [(name, ("GET", name)) for name in names]

    def require(self, replies: Sequence[Any]) -> None:
        """Check the replies to the reads. Raises CatalogReplaced."""
        values = replies[0] if isinstance(replies[0], list) else replies
        found = [(value or b"-").decode() for value in values]
        if found != [self.id, self.version]:
            raise self._build_error(*found)

    def guard(self, command: Command) -> Command:
        """Return a command that refuses to run in another catalog; reads stay as they are."""
        name, *words = command
        if name in _READS:
            return command
        if name == "EVAL":
            script, count, *rest = words
            assert isinstance(script, str)
            assert isinstance(count, int)
            keys, arguments = rest[:count], rest[count:]
        else:
            script, keys, arguments = scripts.RUN_COMMAND, [words[0]], list(command)
        keys = [*keys, self.keys.id, self.keys.version]
        return ("EVAL", _guard_script(script), len(keys), *keys, *arguments, self.id, self.version)

    def read_refusal(self, error: Exception) -> CatalogReplaced | None:
        """Return the error that a guarded command was refused with, if it was."""
        _, refused, found = str(error).partition(f"{_REFUSED} ")
        return self._build_error(*found.split()[:2]) if refused else None

    def _build_error(self, id: str, version: str) -> CatalogReplaced:
        location = f"the namespace {self.keys.namespace!r} in Redis"
        return build_catalog_replaced(location, self.id, _to_found(id, self.id, version))


@cache
def _guard_script(script: str) -> str:
    return f"{scripts.REQUIRE_IDENTITY}\n{script}"


def _to_found(id: str, expected: str, version: str) -> str:
    """Say what was found instead, for people."""
    if id == "-":
        return "is empty, or has lost its id"
    return f"has version {version} now" if id == expected else f"holds another catalog, {id}"
