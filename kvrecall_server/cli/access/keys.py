"""`kvrecall keys`: the API keys of tenants."""

import asyncio
import re
import time
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvrecall_server.app.errors import CliError
from kvrecall_server.app.settings import Settings
from kvrecall_server.cli.access.tenants import require_tenant_name
from kvrecall_server.cli.options import Data, build_settings
from services.access.keys import digest_key, get_pepper_id, make_key
from services.access.principals import Scope
from services.access.settings import REVOCATION_SECONDS
from services.catalog.api_keys import KeyRecord

keys_app = typer.Typer(
    help="Make, list and revoke the keys that clients send. A gateway may run meanwhile.",
    no_args_is_help=True,
)

_SECONDS = {"m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d{1,6})([mhd])")


class BadKeyOption(CliError):
    """An option of `kvrecall keys` that cannot be accepted, or an unknown key."""


@keys_app.command("create")
def create_command(
    tenant: Annotated[str, typer.Option(help="Tenant of the key. Default: the default one.")] = "",
    name: Annotated[str, typer.Option(help="What the key is for; shown by `list`.")] = "",
    scope: Annotated[
        list[Scope] | None,
        typer.Option(
            help="Right of the key; repeatable: infer (OpenAI's and Anthropic's routes), sessions, "
            "admin (metrics, workers). Default: infer and sessions."
        ),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="Time it is valid for: 30m, 12h, 90d. Default: no end.")
    ] = None,
    data: Data = None,
) -> None:
    """Make a key and print it: it is shown this once, and stored as a digest only."""
    require_tenant_name(tenant)
    # The catalog's libraries are imported where they are needed: a worker has none of them.
    from kvrecall_server.app.access import require_pepper

    settings = build_settings(data=data)
    pepper = require_pepper(settings)
    key = make_key()
    now = time.time()
    record = KeyRecord(
        key.id,
        digest_key(key, pepper),
        get_pepper_id(pepper),
        tenant,
        name,
        tuple(scope or (Scope.INFER, Scope.SESSIONS)),
        now,
        None if expires is None else now + _parse_duration(expires),
    )
    asyncio.run(_add(settings, record))
    print(key.text)


@keys_app.command("list")
def list_command(data: Data = None) -> None:
    """List all keys, with their ids instead of the keys."""
    records = asyncio.run(_get_all(build_settings(data=data)))
    table = Table("id", "tenant", "name", "scopes", "created", "expires", "last used", "state")
    for record in records:
        table.add_row(
            record.id,
            record.tenant,
            record.name,
            " ".join(record.scopes),
            *map(_format_time, (record.created_at, record.expires_at, record.last_used_at)),
            _describe_state(record),
        )
    Console().print(table)


@keys_app.command("revoke")
def revoke_command(
    key: Annotated[str, typer.Argument(help="Id of the key, as `list` shows it.")],
    data: Data = None,
) -> None:
    """Revoke a key. It holds on all gateways within 10 seconds."""
    settings = build_settings(data=data)
    if not asyncio.run(_revoke(settings, key)):
        raise BadKeyOption("there is no key of that id; see `kvrecall keys list`")
    print(f"revoked; gateways refuse it within {REVOCATION_SECONDS:g} seconds")


async def _add(settings: Settings, record: KeyRecord) -> None:
    from kvrecall_server.app.access import open_keys

    async with open_keys(settings) as keys:
        await keys.add(record)


async def _get_all(settings: Settings) -> list[KeyRecord]:
    from kvrecall_server.app.access import open_keys

    async with open_keys(settings) as keys:
        return await keys.get_all()


async def _revoke(settings: Settings, key_id: str) -> bool:
    from kvrecall_server.app.access import open_keys

    async with open_keys(settings) as keys:
        return await keys.revoke(key_id, time.time())


def _parse_duration(text: str) -> int:
    """Return the seconds of a number with m, h or d. Raises BadKeyOption."""
    match = _DURATION.fullmatch(text)
    if match is None or not int(match[1]):
        raise BadKeyOption(f"--expires {text}: expected a number with m, h or d, such as 90d")
    return int(match[1]) * _SECONDS[match[2]]


def _describe_state(record: KeyRecord) -> str:
    if record.revoked_at is not None:
        return "revoked"
    return "valid" if record.is_usable(time.time()) else "expired"


def _format_time(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")
