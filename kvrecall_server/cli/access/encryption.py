"""`kvrecall encryption`: keys of encryption at rest."""

import asyncio
from typing import Annotated

import typer

from kvrecall_server.app.errors import CliError
from kvrecall_server.app.settings import Settings
from kvrecall_server.cli.access.tenants import require_tenant_name
from kvrecall_server.cli.options import Data, build_settings
from services.catalog.encryption.keyring import make_line

encryption_app = typer.Typer(
    help="Make keys of encryption at rest, and make a tenant's data unreadable for ever.",
    no_args_is_help=True,
)

_IS_OFF = (
    "nothing is encrypted here: KVRECALL_ENCRYPTION__KEYS_FILE names no file of keys; set it as the "
    "gateways have it"
)
_QUESTION = "All sessions of the tenant are deleted, and nothing of it can be read any more. Go on?"


class BadEncryptionOption(CliError):
    """An option of `kvrecall encryption` that cannot be accepted."""


@encryption_app.command("new-key")
def new_key_command(
    name: Annotated[
        str, typer.Argument(help="Name of the key, which no other one has: the date, for example.")
    ],
) -> None:
    """Print a line for the file of KVRECALL_ENCRYPTION__KEYS_FILE: a new random key and its name."""
    try:
        print(make_line(name))
    except ValueError as error:
        raise BadEncryptionOption(str(error)) from error


@encryption_app.command("shred")
def shred_command(
    tenant: Annotated[str, typer.Option(help="Name of the tenant; the default one's is empty.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    data: Data = None,
) -> None:
    """Delete a tenant's sessions and its data key: no copy of what they held can be read any more.

    Backups of the catalog have the key still, wrapped by the operator's; the operations manual says
    how it ends there. A catalog in a file is used by one process: stop the gateway first.
    """
    require_tenant_name(tenant)
    settings = build_settings(data=data)
    if settings.encryption.keys_file is None:
        raise BadEncryptionOption(_IS_OFF)
    if not yes:
        typer.confirm(_QUESTION, abort=True)
    sessions, had_key = asyncio.run(_shred(settings, tenant))
    key = "its data key is gone" if had_key else "it had no data key"
    print(f"deleted {sessions} session{'' if sessions == 1 else 's'} of the tenant; {key}")


async def _shred(settings: Settings, tenant: str) -> tuple[int, bool]:
    """Return the number of sessions that were deleted, and whether there was a key."""
    # The catalog's libraries are imported where they are needed.
    from kvrecall_server.admin.offline import has_catalog, open_stopped_catalog
    from kvrecall_server.admin.shredding import shred

    if not has_catalog(settings):
        raise BadEncryptionOption(f"there is no catalog in {settings.data}; name its --data")
    async with open_stopped_catalog(settings) as catalog:
        return await shred(catalog, tenant)
