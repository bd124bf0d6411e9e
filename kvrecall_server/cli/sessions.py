"""`kvrecall sessions`: the sessions of a running service."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from kvrecall.client import KvrecallClient
from kvrecall.client.sessions import Session
from kvrecall_server.cli.options import Json, ServerUrl, get_server_url
from kvrecall_server.cli.tables import print_table

_PAGE = 100
_COLUMNS = ("id", "tokens", "active rows", "turns", "last use", "state", "name")

Limit = Annotated[int, typer.Option(min=1, help="Most sessions to list, newest use first.")]


def sessions_command(url: ServerUrl = None, limit: Limit = 50, as_json: Json = False) -> None:
    """List the sessions of a running service: their length, active rows, last use and state."""
    with KvrecallClient(get_server_url(url)) as client:
        found = list(_iter_sessions(client, limit))
    if as_json:
        print(json.dumps([_describe(each) for each in found], indent=1))
        return
    print_table(_COLUMNS, [_to_cells(_describe(each)) for each in found])
    print(f"{len(found)} session{'' if len(found) == 1 else 's'}")


def _iter_sessions(client: KvrecallClient, limit: int) -> Iterator[Session]:
    cursor: str | None = None
    while limit > 0:
        page = client.list_sessions(min(limit, _PAGE), cursor, order="updated")
        yield from page.sessions
        limit -= len(page.sessions)
        cursor = page.next_cursor
        if cursor is None:
            return


def _describe(session: Session) -> dict[str, Any]:
    """The values of a row."""
    return {
        "id": session.id,
        "tokens": session.length,
        "active_rows": session.memory.active_rows,
        "turns": session.turns,
        "last_use": session.updated_at.astimezone(UTC).isoformat(timespec="seconds"),
        "state": session.state,
        "name": session.metadata.get("name", ""),
    }


def _to_cells(row: dict[str, Any]) -> list[str]:
    ago = datetime.now(UTC) - datetime.fromisoformat(row["last_use"])
    return [
        row["id"],
        f"{row['tokens']:,}",
        f"{row['active_rows']:,}",
        f"{row['turns']:,}",
        f"{_to_words(ago.total_seconds())} ago",
        row["state"],
        row["name"],
    ]


def _to_words(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"
