"""`kvrecall fsck`: consistency check of a data directory against its catalog."""

import asyncio
import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvrecall_server.app.errors import CannotCheck, CannotServe
from kvrecall_server.app.progress import Report, show_progress
from kvrecall_server.app.settings import Settings
from kvrecall_server.cli.options import Data, Model, build_settings
from kvrecall_server.reporting.units import readable_bytes

if TYPE_CHECKING:
    from kvrecall.domain.session import SharedPages
    from kvrecall_server.admin.fsck import Finding, KnownSession, Stored
    from kvrecall_server.admin.validation.bounds import Bounds
    from kvstore.fsck import PagesReport
    from services.catalog.base import Catalog

FOUND_PROBLEMS = 1


def fsck_command(
    data: Data = None,
    model: Model = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Delete orphaned pages: pages of no session.")
    ] = False,
) -> None:
    """Check segment files and catalog of a data directory, and compare them with each other.

    The service must be stopped. Exit codes: 0 clean, 1 problems found, 2 not checkable. A catalog
    and a tier in Redis are checked too if the environment names them (KVRECALL_CATALOG_URL,
    KVRECALL_STORE__REDIS_URL); --model then selects the rows in Redis.
    """
    from kvrecall_server.admin.offline import has_catalog, has_pages

    settings = build_settings(data=data, model=model)
    console = Console()
    if not has_catalog(settings) and not has_pages(settings) and settings.store.redis_url is None:
        raise CannotCheck(
            f"{settings.data} has neither a catalog nor pages; name a data directory with --data"
        )
    with show_progress(f"checking {settings.data}") as report:
        reports, findings, sessions = asyncio.run(_check(settings, repair, report))
    _print_findings(console, reports, findings)
    problems = sum(finding.problem for finding in findings)
    console.print(
        _summary(sessions, reports, problems, len(findings) - problems),
        highlight=False,
        soft_wrap=True,
    )
    raise typer.Exit(FOUND_PROBLEMS if problems else 0)


async def _check(
    settings: Settings, repair: bool, report: Report
) -> "tuple[list[PagesReport], list[Finding], str]":
    """Check everything; return the tiers' reports, the findings and the sessions in words.

    Raises CannotCheck.
    """
    from kvrecall_server.admin.fsck import merge_reports, tier_findings

    findings = _catalog_findings(settings)
    reports = _pages(settings, report)
    pages = merge_reports(reports)
    for each in reports:
        findings += tier_findings(each)
    known = await _known(settings, _find_bounds(settings, reports), findings)
    if known is None:
        return reports, findings, "no catalog, so only the pages were checked"
    findings += _compare(*known, pages)
    if repair:
        findings += _delete_orphans(settings, *known, pages)
    return reports, findings, f"{len(known[0])} sessions"


def _catalog_findings(settings: Settings) -> "list[Finding]":
    """SQLite's own integrity check of the catalog file.

    Raises CannotCheck for a file that is no database.
    """
    from kvrecall_server.admin.fsck import Finding
    from kvrecall_server.admin.offline import catalog_file

    path = catalog_file(settings)
    if settings.catalog_url is not None or not path.exists():
        return []
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            reports = [str(row[0]) for row in connection.execute("PRAGMA integrity_check")]
            problems = [
                each for each in reports if each != "ok" and not _is_false_alarm(connection, each)
            ]
            problems += [
                f"a row of {row[0]} refers to nothing"
                for row in connection.execute("PRAGMA foreign_key_check")
            ]
    except sqlite3.DatabaseError as error:
        raise CannotCheck(
            f"the catalog {path} cannot be read: {error}; restore a backup of it"
        ) from error
    then = "restore a backup of the catalog: it is authoritative, pages are not"
    return [Finding(path.name, each, then) for each in dict.fromkeys(problems)]


def _is_false_alarm(connection: sqlite3.Connection, report: str) -> bool:
    """A report of a NULL value that is not there.

    SQLite before 3.41 looks in the wrong column of a table that is ordered by its primary key.
    """
    found = re.fullmatch(r"NULL value in (\w+)\.(\w+)", report)
    if found is None:
        return False
    (nulls,) = connection.execute(
        f"SELECT count(*) FROM {found[1]} WHERE {found[2]} IS NULL"
    ).fetchone()
    return not nulls


def _pages(settings: Settings, report: Report) -> "list[PagesReport]":
    """Reports on the durable tiers, fastest first; segment files are reported as they are read.

    Raises CannotCheck when a process uses the directory or a tier does not answer.
    """
    from kvrecall_server.admin.offline import has_pages, load_layout, pages_folder
    from kvstore.errors import KvStoreError
    from kvstore.fsck import check_directory, check_tier, locked_directory
    from kvstore.tiers.redis.tier import RedisTier

    reports = list["PagesReport"]()
    folder = pages_folder(settings)
    store = settings.store
    try:
        if has_pages(settings):
            with locked_directory(folder):
                reports.append(check_directory(folder, report))
        if store.redis_url:
            tier = RedisTier(
                store.redis_url.get_secret_value(),
                load_layout(settings),
                namespace=store.redis_namespace,
            )
            with closing(tier):
                reports.append(check_tier(tier))
    except (KvStoreError, CannotServe) as error:
        raise CannotCheck(f"pages cannot be checked: {error}") from error
    return reports


def _find_bounds(settings: Settings, reports: "Sequence[PagesReport]") -> "Bounds":
    """The bounds of sessions with these pages: those of their model, where it is known."""
    from kvrecall_server.admin.archive.pages import get_origin
    from kvrecall_server.admin.offline import find_bounds
    from kvrecall_server.admin.validation.bounds import Bounds

    pages = (page for report in reports for page in report.pages.values())
    page = next(pages, None)
    return Bounds() if page is None else find_bounds(settings, get_origin(page.header))


async def _known(
    settings: Settings, bounds: "Bounds", findings: "list[Finding]"
) -> "tuple[list[KnownSession], list[SharedPages]] | None":
    """The catalog's sessions and the retained pages of deleted ones; None without a catalog.

    What is wrong with a session is added to the findings.
    """
    from kvrecall_server.admin.offline import has_catalog, open_stopped_catalog
    from workers.rpc.catalog_binding import CatalogBinding

    if not has_catalog(settings):
        return None
    try:
        async with open_stopped_catalog(settings) as catalog:
            bound = CatalogBinding(settings.data / "pages" / "catalog-id").bound
            if bound not in ("", catalog.id):
                raise CannotCheck(
                    f"the pages in {settings.data / 'pages'} belong to catalog {bound}, and this is "
                    f"catalog {catalog.id}: check them with their own catalog"
                )
            sessions = [
                await _known_session(catalog, session, bounds, findings)
                for session in await catalog.sessions.get_ids()
            ]
            return sessions, await catalog.page_refs.get_retained()
    except CannotServe as error:
        raise CannotCheck(str(error)) from error


async def _known_session(
    catalog: "Catalog", id: str, bounds: "Bounds", findings: "list[Finding]"
) -> "KnownSession":
    from kvrecall_server.admin.archive.records import dump_session
    from kvrecall_server.admin.commit_history import to_commit_history
    from kvrecall_server.admin.fsck import BAD_SESSION, Finding, KnownSession
    from kvrecall_server.admin.validation.session import validate_session
    from kvrecall_server.admin.validation.state import parse_state

    dump = await dump_session(catalog, id)
    problems = validate_session(dump, bounds)
    findings += [Finding(f"session {id}", each, BAD_SESSION) for each in problems]
    state = parse_state(dump.worker_state)
    logged = sum(len(turn.token_ids) for turn in dump.turns)
    return KnownSession(
        id,
        dump.session.epoch,
        dump.session.memory.rows if state is None else state.length,
        dump.session.shared,
        log_is_whole=state is not None and logged == state.length + len(state.pending),
        history=to_commit_history(dump.history),
    )


def _compare(
    sessions: "list[KnownSession]", retained: "list[SharedPages]", pages: "Stored"
) -> "list[Finding]":
    from kvrecall_server.admin.fsck import orphan_findings, session_findings

    findings = [finding for session in sessions for finding in session_findings(session, pages)]
    return [*findings, *orphan_findings(sessions, retained, pages)]


def _delete_orphans(
    settings: Settings,
    sessions: "list[KnownSession]",
    retained: "list[SharedPages]",
    pages: "Stored",
) -> "list[Finding]":
    """Delete the pages of no session from every durable tier. Raises CannotCheck."""
    from kvrecall_server.admin.fsck import Finding, orphaned_pages
    from kvrecall_server.admin.offline import open_tiers

    known = {session.id for session in sessions}
    orphans = orphaned_pages(sessions, retained, pages)
    keys = [key for key in orphans if key.session not in known]
    if not keys:
        return []
    try:
        with open_tiers(settings) as tiers:
            for tier in tiers:
                tier.delete(keys)
                tier.flush()
    except CannotServe as error:
        raise CannotCheck(str(error)) from error
    return [Finding("--repair", f"{len(keys)} pages of no session", "deleted now", problem=False)]


def _print_findings(
    console: Console, reports: "Sequence[PagesReport]", findings: "Sequence[Finding]"
) -> None:
    for report in reports:
        if report.segments:
            console.print(_segments_table(report))
    if findings:
        table = _table("where", "finding", "consequence")
        for finding in sorted(findings, key=lambda each: not each.problem):
            style = "" if finding.problem else "dim"
            table.add_row(finding.where, finding.what, finding.then, style=style)
        console.print(table)


def _segments_table(report: "PagesReport") -> Table:
    table = _table("file", "bytes", "pages", "dead bytes", "damaged", "torn bytes")
    for each in report.segments:
        numbers = (each.pages, each.dead_bytes, each.damaged + each.corrupt, each.torn_bytes)
        table.add_row(each.name, f"{each.file_bytes:,}", *(f"{number:,}" for number in numbers))
    return table


def _table(*head: str) -> Table:
    return Table(*head, box=box.SIMPLE_HEAD, pad_edge=False)


def _summary(sessions: str, reports: "Sequence[PagesReport]", problems: int, notes: int) -> str:
    tiers = "; ".join(
        f"{each.tier}: {len(each.pages):,} pages, {readable_bytes(each.bytes)}" for each in reports
    )
    result = "clean" if not problems else f"{problems} problem{'s' if problems > 1 else ''}"
    return f"{sessions}; {tiers or 'no pages'}: {result}" + (f", {notes} to note" if notes else "")
