"""Parsing of Redis URLs: single servers, sentinels and clusters."""

from dataclasses import dataclass, field
from typing import Literal, get_args
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from kvstore.errors import TierSettingsError

Scheme = Literal[
    "redis",
    "rediss",
    "unix",
    "redis+sentinel",
    "rediss+sentinel",
    "redis+cluster",
    "rediss+cluster",
]


@dataclass(frozen=True)
class RedisAddress:
    """Parsed URL of a Redis; its text names the server and never a password."""

    scheme: Scheme
    hosts: tuple[tuple[str, int], ...]
    path: str
    username: str | None = field(repr=False)
    password: str | None = field(repr=False)
    sentinel_password: str | None = field(repr=False)
    url: str = field(repr=False)

    def __str__(self) -> str:
        hosts = ",".join(f"{host}:{port}" for host, port in self.hosts)
        return f"{self.scheme}://{hosts}{self.path}"


def parse_address(url: str) -> RedisAddress:
    """Parse the URL of a Redis.

    Forms: `redis[s]://[user:password@]host[:port][/database]`, `unix://path`,
    `redis[s]+sentinel://host:port,.../service` with `?sentinel_password=` if the sentinels require
    one, and `redis[s]+cluster://host:port,...`.

    Raises TierSettingsError, which never repeats the URL, as it may hold a password.
    """
    try:
        address = _parse(url, urlsplit(url))
    except ValueError:
        address = None
    if address is None:
        raise TierSettingsError(
            f"this Redis URL cannot be read: expected {', '.join(get_args(Scheme))} followed by "
            "://, host:port (several with commas) and, for sentinels, /service; percent-encode "
            "special characters in a user or password"
        )
    return address


def _parse(url: str, parts: SplitResult) -> RedisAddress | None:
    scheme = next((known for known in get_args(Scheme) if known == parts.scheme), None)
    userinfo, _, hosts = parts.netloc.rpartition("@")
    needs_service = parts.scheme.endswith("+sentinel")
    # A password that is not percent-encoded may end up in any later part.
    if "@" in parts.path + parts.query or "#" in url:
        return None
    if (
        scheme is None
        or (needs_service and not parts.path.strip("/"))
        or (scheme != "unix" and not hosts)
    ):
        return None
    username, _, password = userinfo.partition(":")
    default_port = 26379 if needs_service else 6379
    return RedisAddress(
        scheme=scheme,
        hosts=tuple(_parse_host(host, default_port) for host in hosts.split(",") if host),
        path=parts.path,
        username=unquote(username) or None,
        password=unquote(password) or None,
        sentinel_password=parse_qs(parts.query).get("sentinel_password", [None])[0],
        url=url,
    )


def _parse_host(text: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("no host")
    return parts.hostname, parts.port or default_port
