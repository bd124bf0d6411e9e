"""`kvrecall fsck`: whether a data directory holds what its catalog says, and what will become of what is wrong."""

import asyncio
import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvrecall.app.errors import CannotCheck, CannotServe
from kvrecall.app.settings import Settings
from kvrecall.cli.options import given
from kvrecall.reporting.units import readable_bytes

if TYPE_CHECKING:
    from kvrecall.admin.fsck import Finding, KnownSession, Stored
    from kvrecall.domain.session import SharedPages
    from kvstore.fsck import PagesReport
    from services.catalog.base import Catalog

FOUND_PROBLEMS = 1


def fsck_command(
    data: Annotated[
        Path | None, typer.Option(help="The data directory. Default: ./kvrecall-data.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Whose rows are meant, where they lie in Redis. Default: the reference."),
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop pages that belong to no session.")
    ] = False,
) -> None:
    """Check a data directory that no process uses: segment files, catalog, and the two against each other.

    Ends with 0 when all is well, 1 when problems were found, 2 when it could not be checked. What lies in Redis is
    checked as well, where the environment names one (KVRECALL_CATALOG_URL, KVRECALL_STORE__REDIS_URL).
    """
    from kvrecall.admin.offline import has_catalog, has_pages

    settings = Settings(**given({"data": data, "model": model}))
    console = Console()
    if not has_catalog(settings) and not has_pages(settings) and settings.store.redis_url is None:
        raise CannotCheck(
            f"{settings.data} holds neither a catalog nor pages; name a data directory with --data"
        )
    problems = asyncio.run(_checked(settings, console, repair))
    raise typer.Exit(FOUND_PROBLEMS if problems else 0)


async def _checked(settings: Settings, console: Console, repair: bool) -> int:
    """Say what was found; returns how many problems there are. Raises CannotCheck."""
    from kvrecall.admin.fsck import stored, tier_findings

    findings = _catalog_findings(settings)
    reports = _pages(settings)
    pages = stored(reports)
    for report in reports:
        findings += tier_findings(report)
    known = await _known(settings)
    if known is not None:
        findings += _compared(*known, pages)
        if repair:
            findings += _dropped(settings, *known, pages)
    _tell(console, reports, findings)
    problems = sum(finding.problem for finding in findings)
    sessions = (
        "no catalog, so pages were checked by themselves"
        if known is None
        else f"{len(known[0])} sessions"
    )
    console.print(
        _summary(sessions, reports, problems, len(findings) - problems),
        highlight=False,
        soft_wrap=True,
    )
    return problems


def _catalog_findings(settings: Settings) -> "list[Finding]":
    """What SQLite itself says of the catalog's file. Raises CannotCheck for a file that is none."""
    from kvrecall.admin.fsck import Finding
    from kvrecall.admin.offline import catalog_file

    path = catalog_file(settings)
    if settings.catalog_url is not None or not path.exists():
        return []
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            wrong = [str(row[0]) for row in connection.execute("PRAGMA integrity_check")]
            wrong = [
                each for each in wrong if each != "ok" and not _is_false_alarm(connection, each)
            ]
            wrong += [
                f"a row of {row[0]} refers to nothing"
                for row in connection.execute("PRAGMA foreign_key_check")
            ]
    except sqlite3.DatabaseError as error:
        raise CannotCheck(
            f"the catalog {path} cannot be read: {error}; put back a copy of it"
        ) from error
    then = "put back a copy of the catalog: it is the truth, pages are not"
    return [Finding(path.name, each, then) for each in dict.fromkeys(wrong)]


def _is_false_alarm(connection: sqlite3.Connection, wrong: str) -> bool:
    """SQLite before 3.41 looks for NULL in the wrong column of a table that is ordered by its primary key."""
    found = re.fullmatch(r"NULL value in (\w+)\.(\w+)", wrong)
    if found is None:
        return False
    (nulls,) = connection.execute(
        f"SELECT count(*) FROM {found[1]} WHERE {found[2]} IS NULL"
    ).fetchone()
    return not nulls


def _pages(settings: Settings) -> "list[PagesReport]":
    """The tiers, fastest first. Raises CannotCheck when a process uses the directory, or a tier does not answer."""
    from kvrecall.admin.offline import has_pages, layout_in, pages_folder
    from kvstore.errors import KvStoreError
    from kvstore.fsck import check_directory, check_tier, locked_directory
    from kvstore.tiers.redis.tier import RedisTier

    reports = list["PagesReport"]()
    folder = pages_folder(settings)
    store = settings.store
    try:
        if has_pages(settings):
            with locked_directory(folder):
                reports.append(check_directory(folder))
        if store.redis_url:
            tier = RedisTier(
                store.redis_url.get_secret_value(),
                layout_in(settings),
                namespace=store.redis_namespace,
            )
            with closing(tier):
                reports.append(check_tier(tier))
    except (KvStoreError, CannotServe) as error:
        raise CannotCheck(f"pages cannot be checked: {error}") from error
    return reports


async def _known(settings: Settings) -> "tuple[list[KnownSession], list[SharedPages]] | None":
    """What the catalog says: its sessions, and what is kept of deleted ones; None where there is no catalog here."""
    from kvrecall.admin.offline import has_catalog, opened_catalog

    if not has_catalog(settings):
        return None
    try:
        async with opened_catalog(settings) as catalog:
            sessions = [
                await _known_session(catalog, session)
                for session in await catalog.sessions.get_ids()
            ]
            return sessions, await catalog.page_refs.get_retained()
    except CannotServe as error:
        raise CannotCheck(str(error)) from error


async def _known_session(catalog: "Catalog", id: str) -> "KnownSession":
    from kvrecall.admin.fsck import KnownSession
    from kvrecall.protocol.v1 import worker_pb2 as wire

    session = await catalog.sessions.get(id)
    state = wire.SessionState.FromString(await catalog.sessions.get_worker_state(id))
    logged = len(await catalog.turns.get_token_ids(id))
    return KnownSession(
        id, session.epoch, state.length, session.shared, logged, state.length + len(state.pending)
    )


def _compared(
    sessions: "list[KnownSession]", kept: "list[SharedPages]", pages: "Stored"
) -> "list[Finding]":
    from kvrecall.admin.fsck import leftover_findings, session_findings

    findings = [finding for session in sessions for finding in session_findings(session, pages)]
    return [*findings, *leftover_findings(sessions, kept, pages)]


def _dropped(
    settings: Settings, sessions: "list[KnownSession]", kept: "list[SharedPages]", pages: "Stored"
) -> "list[Finding]":
    """Delete pages that belong to no session, in every tier. Raises CannotCheck."""
    from kvrecall.admin.fsck import Finding, leftovers
    from kvrecall.admin.offline import layout_in, opened_tiers

    known = {session.id for session in sessions}
    keys = [key for key in leftovers(sessions, kept, pages) if key.session not in known]
    if not keys:
        return []
    try:
        with opened_tiers(settings, layout_in(settings)) as tiers:
            for tier in tiers:
                tier.delete(keys)
                tier.flush()
    except CannotServe as error:
        raise CannotCheck(str(error)) from error
    return [Finding("--repair", f"{len(keys)} pages of no session", "dropped now", problem=False)]


def _tell(
    console: Console, reports: "Sequence[PagesReport]", findings: "Sequence[Finding]"
) -> None:
    for report in reports:
        if report.segments:
            console.print(_segments(report))
    if findings:
        table = _table("where", "what", "what will become of it")
        for finding in sorted(findings, key=lambda each: not each.problem):
            style = "" if finding.problem else "dim"
            table.add_row(finding.where, finding.what, finding.then, style=style)
        console.print(table)


def _segments(report: "PagesReport") -> Table:
    table = _table("file", "bytes", "pages", "dead bytes", "damaged", "torn bytes")
    for each in report.segments:
        numbers = (each.pages, each.dead_bytes, each.damaged + each.corrupt, each.torn_bytes)
        table.add_row(each.name, f"{each.file_bytes:,}", *(f"{number:,}" for number in numbers))
    return table


def _table(*head: str) -> Table:
    return Table(*head, box=box.SIMPLE_HEAD, pad_edge=False)


def _summary(sessions: str, reports: "Sequence[PagesReport]", problems: int, notes: int) -> str:
    held = "; ".join(
        f"{each.tier}: {len(each.pages):,} pages, {readable_bytes(each.bytes)}" for each in reports
    )
    found: Any = "clean" if not problems else f"{problems} problem{'s' if problems > 1 else ''}"
    return f"{sessions}; {held or 'no pages'}: {found}" + (f", {notes} to note" if notes else "")
