"""`kvrecall export` and `kvrecall import`: a session as one .kvs file."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvrecall_server.app.errors import BadSessionFile, CannotServe
from kvrecall_server.app.progress import Report, show_progress
from kvrecall_server.app.rank_storage import Rank, choose_ranks
from kvrecall_server.app.settings import Settings
from kvrecall_server.cli.access.tenants import require_tenant_name
from kvrecall_server.cli.options import Data, Model, TensorParallel, build_settings
from kvrecall_server.reporting.units import readable_bytes

if TYPE_CHECKING:
    from kvrecall_server.admin.archive.answers import Answers
    from kvrecall_server.admin.archive.pages import CheckedArchive, PagesMoved
    from kvrecall_server.admin.archive.signing import ArchiveKey, Signature
    from services.catalog.base import Catalog
    from services.catalog.records import SessionDump

Session = Annotated[str, typer.Argument(help="Id of the session.")]
Target = Annotated[Path, typer.Argument(help="File to write.")]
Source = Annotated[Path, typer.Argument(help="File that `kvrecall export` wrote.")]
NewId = Annotated[
    str | None, typer.Option("--as", help="Id of the new session. Default: the file's.")
]
Tenant = Annotated[
    str,
    typer.Option(
        "--tenant",
        help="Tenant of the new session. Default: the local one, as of a key-less service.",
    ),
]
RequireSignature = Annotated[
    bool,
    typer.Option(
        "--require-signature", help="Refuse a file that this installation has not signed."
    ),
]
WithoutPages = Annotated[
    bool,
    typer.Option(
        "--without-pages", help="Leave out the rows; they are computed again when needed."
    ),
]

_NO_ROWS = "no rows; they are computed again when they are needed"


def export_command(
    session: Session,
    file: Target,
    data: Data = None,
    model: Model = None,
    tensor_parallel: TensorParallel = None,
    without_pages: WithoutPages = False,
) -> None:
    """Write a session to one file: its messages, its state and its rows.

    OpenAI's responses and conversations that it has answered go with it.

    The service that uses the data directory must be stopped. Rows of a worker of several ranks stay where
    they are.
    """
    settings = build_settings(data=data, model=model, tensor_parallel=tensor_parallel)
    ranks = choose_ranks(settings)
    with_pages = not without_pages and len(ranks) == 1
    with show_progress(f"exporting {session}") as report:
        moved, answers = asyncio.run(
            _export(settings, ranks[0], session, file, report, with_pages=with_pages)
        )
    summary = (_describe(moved) if with_pages else _NO_ROWS) + _list(answers)
    Console().print(f"{session} written to {file}: {summary}", highlight=False, soft_wrap=True)


def import_command(
    file: Source,
    data: Data = None,
    model: Model = None,
    tensor_parallel: TensorParallel = None,
    name: NewId = None,
    tenant: Tenant = "",
    require_signature: RequireSignature = False,
    without_pages: WithoutPages = False,
) -> None:
    """Add the session of a file to a data directory.

    The file is checked first: nothing changes if it is damaged or of another model, or if its
    values do not add up. Only a signature shows that nobody has changed it. Rows are left out where a
    worker of several ranks is to have the session.
    """
    require_tenant_name(tenant)
    settings = build_settings(data=data, model=model, tensor_parallel=tensor_parallel)
    wanted = Wanted(file, name, tenant, require_signature, with_pages=not without_pages)
    with show_progress(f"importing {file}") as report:
        session, moved, answers, signature = asyncio.run(_import(settings, wanted, report))
    summary = f"{_describe(moved)}{_list(answers)}; {signature}"
    Console().print(
        f"{session} added to {settings.data}: {summary}", highlight=False, soft_wrap=True
    )


async def _export(
    settings: Settings, rank: Rank, session: str, file: Path, report: Report, *, with_pages: bool
) -> "tuple[PagesMoved, Answers]":
    """Write the file; return the counts of its pages, and its responses. The rank's pages name the model.

    Raises CannotServe, BadSessionFile.
    """
    from kvrecall_server.admin.archive.answers import dump_answers, to_answer_records
    from kvrecall_server.admin.archive.format import write_archive
    from kvrecall_server.admin.archive.pages import (
        PagesMoved,
        build_header,
        count_pages,
        read_pages,
    )
    from kvrecall_server.admin.archive.records import dump_session, to_records
    from kvrecall_server.admin.offline import (
        claimed,
        find_origin,
        has_catalog,
        open_stopped_catalog,
        open_tiers,
    )

    if not has_catalog(settings):
        raise CannotServe(f"{settings.data} holds no catalog; name a data directory with --data")
    with open_tiers(settings, rank, with_bucket=with_pages) as tiers:
        async with open_stopped_catalog(settings) as catalog, claimed(catalog, session):
            dump = await dump_session(catalog, session)
            answers = await dump_answers(catalog, dump.session)
            key = await _find_page_key(catalog, dump.session.settings.tenant)
        origin = find_origin(settings, tiers, rank.count)
        moved = PagesMoved(missing=count_pages(dump))
        with write_archive(file, _find_key(settings)) as writer:
            writer.add(build_header(session, origin, settings.model, has_pages=with_pages))
            for record in (*to_records(dump), *to_answer_records(answers)):
                writer.add(record)
            for record in read_pages(dump, tiers, key) if with_pages else ():
                writer.add(record)
                moved = moved.with_pages([record.data])
                report(moved.pages, moved.pages + moved.missing)
    return moved, answers


@dataclass(frozen=True)
class Wanted:
    """What is to be imported, and how."""

    file: Path
    name: str | None
    tenant: str
    require_signature: bool
    with_pages: bool


async def _import(
    settings: Settings, wanted: Wanted, report: Report
) -> "tuple[str, PagesMoved, Answers, Signature]":
    """Add the session; return its id, page counts, the responses that were added, and who signed it.

    Raises CannotServe, BadSessionFile.
    """
    from kvrecall_server.admin.archive.answers import restore_answers
    from kvrecall_server.admin.archive.pages import name_pages, put_pages
    from kvrecall_server.admin.offline import open_stopped_catalog, open_tiers

    rank = choose_ranks(settings)[0]
    with_pages = wanted.with_pages and rank.count == 1
    found, dump, answers = _read(settings, rank, wanted, report)
    dump = name_pages(dump, found.header.origin.page_tokens)
    with open_tiers(settings, rank) as tiers:
        async with open_stopped_catalog(settings) as catalog:
            await _require_new(catalog, dump.session.id)
            key = await _find_page_key(catalog, dump.session.settings.tenant)
            with put_pages(wanted.file, dump, tiers[-1], key, wanted=with_pages) as moved:
                await catalog.sessions.restore(dump)
            seconds = settings.service.response_days * 86_400.0
            added = await restore_answers(catalog, answers, seconds)
    return dump.session.id, moved, added, found.signature


def _read(
    settings: Settings, rank: Rank, wanted: Wanted, report: Report
) -> "tuple[CheckedArchive, SessionDump, Answers]":
    """Read and check the file against the data directory. Raises CannotServe, BadSessionFile."""
    from kvrecall_server.admin.archive.answers import from_answer_records
    from kvrecall_server.admin.archive.pages import check_archive, require_origin
    from kvrecall_server.admin.archive.records import from_records
    from kvrecall_server.admin.archive.signing import Signature
    from kvrecall_server.admin.offline import find_bounds, read_origin
    from kvrecall_server.admin.validation.answers import validate_answers
    from kvrecall_server.admin.validation.session import describe, validate_session

    file = wanted.file
    found = check_archive(file, report, _find_key(settings))
    if wanted.require_signature and found.signature is not Signature.OWN:
        raise BadSessionFile(
            f"{file} is {found.signature}, and --require-signature is given: export the session "
            "where the pepper of this installation is (KVRECALL_ACCESS__PEPPER_FILE), or leave the "
            "option out"
        )
    dump = from_records(found.records, wanted.name or found.header.session, wanted.tenant)
    answers = from_answer_records(found.records, dump.session)
    origin = read_origin(settings, rank)
    require_origin(file, found, origin)
    problems = validate_session(dump, find_bounds(settings, origin)) + validate_answers(answers)
    if problems:
        raise BadSessionFile(
            f"{file} does not add up: {describe(problems)}. Export the session again, from a data "
            "directory that `kvrecall fsck` finds clean"
        )
    return found, dump, answers


def _find_key(settings: Settings) -> "ArchiveKey | None":
    """Return the key that archives are signed with; None where the installation has no pepper."""
    from kvrecall_server.admin.archive.signing import ArchiveKey
    from kvrecall_server.app.access import find_pepper

    pepper = find_pepper(settings)
    return None if pepper is None else ArchiveKey(pepper)


async def _find_page_key(catalog: "Catalog", tenant: str) -> bytes:
    """Return the key that a tenant's pages are encrypted with; empty where none are."""
    from kvrecall.domain.page_ids import derive_page_key

    return derive_page_key(await catalog.data_keys.get_key(tenant))


async def _require_new(catalog: "Catalog", session: str) -> None:
    """Check that no session has that id. Raises CannotServe."""
    from kvrecall.domain.errors import UnknownSession

    try:
        await catalog.sessions.get(session)
    except UnknownSession:
        return
    raise CannotServe(
        f"session {session} exists already; import the file under another id with --as"
    )


def _list(answers: "Answers") -> str:
    from kvrecall_server.admin.archive.answers import describe

    found = describe(answers)
    return f"; {found}" if found else ""


def _describe(moved: "PagesMoved") -> str:
    rows = f"{moved.pages:,} pages, {readable_bytes(moved.bytes)}"
    lost = (
        f"; {moved.missing} pages are missing and are computed again when they are needed"
        if moved.missing
        else ""
    )
    return rows + lost
