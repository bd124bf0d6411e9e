"""`kvrecall fsck`: consistency check of a data directory against its catalog."""

import asyncio
import re
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvrecall_server.app.errors import CannotCheck, CannotServe
from kvrecall_server.app.progress import Report, show_progress
from kvrecall_server.app.rank_storage import Rank, choose_ranks
from kvrecall_server.app.settings import Settings
from kvrecall_server.cli.options import Data, Model, TensorParallel, build_settings
from kvrecall_server.reporting.units import readable_bytes

if TYPE_CHECKING:
    from kvrecall.domain.page_ids import PageId
    from kvrecall_server.admin.fsck import Finding, KnownSession, Leftovers, Stored
    from kvrecall_server.admin.fsck_ranks import RankPages
    from kvrecall_server.admin.validation.bounds import Bounds
    from kvstore.format.page import PageLayout
    from kvstore.fsck import PagesReport
    from services.catalog.base import Catalog

FOUND_PROBLEMS = 1


def fsck_command(
    data: Data = None,
    model: Model = None,
    tensor_parallel: TensorParallel = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Delete pages and states of no session now."),
    ] = False,
    restored: Annotated[
        bool,
        typer.Option(
            "--restored",
            help="The catalog is a backup: pages that are newer, or were deleted since, are no problem.",
        ),
    ] = False,
) -> None:
    """Check segment files and catalog of a data directory, and compare them with each other.

    The service must be stopped. Exit codes: 0 clean, 1 problems found, 2 not checkable. A catalog
    and a tier in Redis or a bucket are checked too if the environment names them (KVRECALL_CATALOG_URL,
    KVRECALL_STORE__REDIS_URL, KVRECALL_STORE__COLD_URL); --model then selects the rows there.
    """
    from kvrecall_server.admin.offline import has_catalog, has_pages

    settings = build_settings(data=data, model=model, tensor_parallel=tensor_parallel)
    console = Console()
    ranks = _choose_ranks(settings)
    has_rows = any(has_pages(settings, rank) for rank in ranks) or _has_remote(settings)
    if not has_catalog(settings) and not has_rows:
        raise CannotCheck(
            f"{settings.data} has neither a catalog nor pages; name a data directory with --data"
        )
    with show_progress(f"checking {settings.data}") as report:
        reports, findings, sessions = asyncio.run(
            _check(settings, ranks, report, repair=repair, restored=restored)
        )
    _print_findings(console, reports, findings)
    problems = sum(finding.problem for finding in findings)
    console.print(
        _summary(sessions, reports, problems, len(findings) - problems),
        highlight=False,
        soft_wrap=True,
    )
    raise typer.Exit(FOUND_PROBLEMS if problems else 0)


def _choose_ranks(settings: Settings) -> list[Rank]:
    """The ranks of the worker whose rows are checked. Raises CannotCheck."""
    try:
        return choose_ranks(settings)
    except CannotServe as error:
        raise CannotCheck(str(error)) from error


async def _check(
    settings: Settings, ranks: Sequence[Rank], report: Report, *, repair: bool, restored: bool
) -> "tuple[list[PagesReport], list[Finding], str]":
    """Check everything; return the tiers' reports, the findings and the sessions in words.

    Raises CannotCheck.
    """
    from kvrecall_server.admin.fsck import leftover_findings, tier_findings
    from kvrecall_server.admin.fsck_ranks import idle_findings
    from kvrecall_server.app.start.idle_rows import find_idle_rows

    findings = _catalog_findings(settings)
    parts = _read_parts(settings, ranks, report)
    reports = [each for part in parts for each in part.reports]
    for each in reports:
        findings += tier_findings(each)
    findings += idle_findings(find_idle_rows(settings.data, len(ranks)))
    known = await _known(settings, ranks[0], _find_bounds(settings, parts), findings)
    if known is None:
        return reports, findings, "no catalog, so only the pages were checked"
    for part in parts:
        compared = _compare(known.sessions, part.pages, part.kept_states, restored=restored)
        findings += part.label(compared)
        for noun, found in (("page", part.pages), ("state", part.kept_states)):
            left = _find_leftovers(settings, known, found, restored=restored)
            findings += part.label(leftover_findings(left, found, noun))
            if repair and not left.are_many:
                findings += part.label(_delete(settings, part.rank, left, found, noun))
    return reports, findings, f"{len(known.sessions)} sessions"


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


def _read_parts(settings: Settings, ranks: Sequence[Rank], report: Report) -> "list[RankPages]":
    """Reports on the durable tiers of each rank, fastest first: those of rows, and those of recurrent states.

    Segment files are reported as they are read. Raises CannotCheck when a process uses the directory or
    a tier does not answer.
    """
    from kvrecall_server.admin.fsck_ranks import RankPages
    from kvrecall_server.admin.fsck_states import label_states
    from kvrecall_server.admin.offline import load_layouts, pages_folder, states_folder
    from kvstore.errors import KvStoreError

    found = list[RankPages]()
    try:
        remote = _has_remote(settings)
        layouts = load_layouts(settings, len(ranks)) if remote else (None, None)
        for rank in ranks:
            own = rank.settings_of(settings)
            rows = _read_tiers(own, pages_folder(own), layouts[0], report)
            states = _read_tiers(own, states_folder(own), layouts[1], report)
            found.append(RankPages(rank, tuple(rows), tuple(map(label_states, states))))
    except (KvStoreError, CannotServe) as error:
        raise CannotCheck(f"pages cannot be checked: {error}") from error
    return found


def _read_tiers(
    settings: Settings, folder: Path, layout: "PageLayout | None", report: Report
) -> "list[PagesReport]":
    """Reports on the files of a folder, where it exists, and on a layout's pages in Redis or a bucket."""
    from kvrecall_server.app.tiers import cold_tier
    from kvstore.fsck import check_directory, check_tier, locked_directory
    from kvstore.tiers.redis.tier import RedisTier

    reports = list["PagesReport"]()
    store = settings.store
    if folder.is_dir():
        with locked_directory(folder):
            reports.append(check_directory(folder, report))
    if store.redis_url and layout is not None:
        url = store.redis_url.get_secret_value()
        with closing(RedisTier(url, layout, namespace=store.redis_namespace)) as tier:
            reports.append(check_tier(tier))
    if layout is not None and (bucket := cold_tier(layout, store)) is not None:
        with closing(bucket):
            reports.append(check_tier(bucket))
    return reports


def _has_remote(settings: Settings) -> bool:
    """Return whether pages may lie elsewhere than in the data directory."""
    return settings.store.redis_url is not None or settings.store.cold_url is not None


def _find_bounds(settings: Settings, parts: "Sequence[RankPages]") -> "Bounds":
    """The bounds of sessions with these pages: those of their model, where it is known."""
    from kvrecall_server.admin.offline import find_bounds, get_whole_origin
    from kvrecall_server.admin.validation.bounds import Bounds

    reports = (report for part in parts for report in part.rows)
    page = next((page for report in reports for page in report.pages.values()), None)
    if page is None:
        return Bounds()
    return find_bounds(settings, get_whole_origin(page.header, len(parts)))


@dataclass(frozen=True)
class _Known:
    """The catalog's sessions, and its dead pages: of no session any more, and to be deleted."""

    sessions: "list[KnownSession]"
    dead: "frozenset[PageId]"


async def _known(
    settings: Settings, first: Rank, bounds: "Bounds", findings: "list[Finding]"
) -> "_Known | None":
    """What the catalog knows; None without a catalog. The first rank's pages name theirs.

    What is wrong with a session is added to the findings.
    """
    from kvrecall_server.admin.offline import has_catalog, open_stopped_catalog, pages_folder
    from workers.rpc.catalog_binding import CatalogBinding

    if not has_catalog(settings):
        return None
    try:
        async with open_stopped_catalog(settings) as catalog:
            pages = pages_folder(first.settings_of(settings))
            bound = CatalogBinding(pages / "catalog-id").bound
            if bound not in ("", catalog.id):
                raise CannotCheck(
                    f"the pages in {pages} belong to catalog {bound}, and this is "
                    f"catalog {catalog.id}: check them with their own catalog"
                )
            sessions = [
                await _known_session(catalog, session, bounds, findings)
                for session in await catalog.sessions.get_ids()
            ]
            await catalog.pages.drop_abandoned(settings.service.unknown_page_seconds)
            dead = await catalog.pages.get_dead(await catalog.pages.count_dead())
            return _Known(sessions, frozenset(dead))
    except CannotServe as error:
        raise CannotCheck(str(error)) from error


async def _known_session(
    catalog: "Catalog", id: str, bounds: "Bounds", findings: "list[Finding]"
) -> "KnownSession":
    from kvrecall.domain.errors import DataKeyDeleted
    from kvrecall.domain.page_ids import split_ids
    from kvrecall_server.admin.archive.records import dump_session
    from kvrecall_server.admin.fsck import BAD_SESSION, UNREADABLE, Finding, KnownSession
    from kvrecall_server.admin.validation.session import validate_session
    from kvrecall_server.admin.validation.state import parse_state
    from services.catalog.token_log import count_tokens

    try:
        dump = await dump_session(catalog, id)
    except DataKeyDeleted:
        what = "is encrypted under a data key of its tenant that was deleted"
        findings.append(Finding(f"session {id}", what, UNREADABLE))
        pages = split_ids(await catalog.sessions.get_page_ids(id))
        return KnownSession(id, None, pages, log_is_whole=False)
    problems = validate_session(dump, bounds)
    findings += [Finding(f"session {id}", each, BAD_SESSION) for each in problems]
    state = parse_state(dump.worker_state)
    logged = count_tokens(dump.turns)
    return KnownSession(
        id,
        dump.session.memory.rows if state is None else state.length,
        split_ids(dump.page_ids),
        log_is_whole=state is not None and logged == state.length + len(state.pending),
        snapshots=() if state is None else tuple(state.snapshots),
    )


def _compare(
    sessions: "Sequence[KnownSession]", pages: "Stored", states: "Stored", *, restored: bool
) -> "list[Finding]":
    from kvrecall_server.admin.fsck import session_findings
    from kvrecall_server.admin.fsck_states import state_findings

    findings = list["Finding"]()
    for session in sessions:
        findings += session_findings(session, pages, restored=restored)
        findings += state_findings(session, states, pages.page_tokens, restored=restored)
    return findings


def _find_leftovers(
    settings: Settings, known: _Known, found: "Stored", *, restored: bool
) -> "Leftovers":
    """The pages, or states, of no session; many of them are too many for a sweep."""
    from kvrecall_server.admin.fsck import find_leftovers

    return find_leftovers(
        known.sessions,
        known.dead,
        found,
        max_unknown=settings.service.max_unknown_pages,
        max_share=settings.service.max_unknown_share,
        restored=restored,
    )


def _delete(
    settings: Settings, rank: Rank, left: "Leftovers", found: "Stored", noun: str
) -> "list[Finding]":
    """Delete pages or states of no session from every durable tier of a rank.

    Those that a turn on another worker may be about to commit stay in tiers that it shares: young
    ones. Raises CannotCheck.
    """
    from kvrecall_server.admin.fsck import Finding
    from kvrecall_server.admin.offline import open_tiers

    everywhere = [
        *left.dead,
        *_find_old(left.unknown, found, settings.service.unknown_page_seconds),
    ]
    everything = [*left.dead, *left.unknown]
    if not everything:
        return []
    try:
        with open_tiers(settings, rank, states=noun == "state", with_bucket=True) as tiers:
            for tier in tiers:
                tier.delete(everywhere if tier.shared else everything)
                tier.flush()
    except CannotServe as error:
        raise CannotCheck(str(error)) from error
    what = f"{len(everything)} {noun}s of no session"
    return [Finding("--repair", what, "deleted now", problem=False)]


def _find_old(ids: "Sequence[PageId]", found: "Stored", seconds: float) -> "list[PageId]":
    """Find the pages of which every copy is older than so many seconds."""
    newest = time.time() - seconds
    return [
        page_id
        for page_id in ids
        if all(page.header.written_at <= newest for page in found.pages[page_id])
    ]


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
