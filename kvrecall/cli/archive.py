"""`kvrecall export` and `kvrecall import`: a session as one file, out of one data directory and into another."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvrecall.app.errors import CannotServe
from kvrecall.app.settings import Settings
from kvrecall.cli.options import given
from kvrecall.reporting.units import readable_bytes

if TYPE_CHECKING:
    from kvrecall.admin.archive.pages import PagesMoved
    from services.catalog.base import Catalog

Data = Annotated[Path | None, typer.Option(help="The data directory. Default: ./kvrecall-data.")]
Model = Annotated[
    str | None, typer.Option(help="The model that is served there. Default: the reference.")
]
WithoutPages = Annotated[
    bool,
    typer.Option(
        "--without-pages", help="Leave the rows out: they are computed again when they are needed."
    ),
]


def export_command(
    session: Annotated[str, typer.Argument(help="The session's id.")],
    file: Annotated[Path, typer.Argument(help="The file to write.")],
    data: Data = None,
    model: Model = None,
    without_pages: WithoutPages = False,
) -> None:
    """Write a session to one file: what was said, its state, and its rows."""
    settings = Settings(**given({"data": data, "model": model}))
    moved = asyncio.run(_exported(settings, session, file, with_pages=not without_pages))
    told = "no rows" if without_pages else _told(moved)
    Console().print(f"{session} written to {file}: {told}", highlight=False, soft_wrap=True)


def import_command(
    file: Annotated[Path, typer.Argument(help="A file that export has written.")],
    data: Data = None,
    model: Model = None,
    name: Annotated[str | None, typer.Option("--as", help="Another id than the file's.")] = None,
    without_pages: WithoutPages = False,
) -> None:
    """Add the session of a file; nothing is changed unless the file is whole and of the same model."""
    settings = Settings(**given({"data": data, "model": model}))
    session, moved = asyncio.run(_imported(settings, file, name, with_pages=not without_pages))
    Console().print(
        f"{session} added to {settings.data}: {_told(moved)}", highlight=False, soft_wrap=True
    )


async def _exported(
    settings: Settings, session: str, file: Path, *, with_pages: bool
) -> "PagesMoved":
    """Raises CannotServe, BadSessionFile."""
    from kvrecall.admin.archive.format import write_archive
    from kvrecall.admin.archive.pages import PagesMoved, build_header, count_pages, read_pages
    from kvrecall.admin.archive.records import dump_session, to_records
    from kvrecall.admin.offline import claimed, has_catalog, layout_in, opened_catalog, opened_tiers

    if not has_catalog(settings):
        raise CannotServe(f"{settings.data} holds no catalog; name a data directory with --data")
    layout = layout_in(settings)
    with opened_tiers(settings, layout) as tiers:
        async with opened_catalog(settings) as catalog, claimed(catalog, session):
            dump = await dump_session(catalog, session)
        moved = PagesMoved(missing=count_pages(dump, layout))
        with write_archive(file) as writer:
            writer.add(build_header(session, layout, settings.model, has_pages=with_pages))
            for record in to_records(dump):
                writer.add(record)
            for record in read_pages(dump, tiers, layout) if with_pages else ():
                writer.add(record)
                moved = moved.with_pages([record.data])
    return moved


async def _imported(
    settings: Settings, file: Path, name: str | None, *, with_pages: bool
) -> "tuple[str, PagesMoved]":
    """Raises CannotServe, BadSessionFile."""
    from kvrecall.admin.archive.pages import check_archive, put_pages
    from kvrecall.admin.archive.records import from_records
    from kvrecall.admin.offline import layout_in, opened_catalog, opened_tiers

    layout = layout_in(settings)
    found = check_archive(file, layout)
    dump = from_records(found.records, name or found.header.session)
    with opened_tiers(settings, layout) as tiers:
        async with opened_catalog(settings) as catalog:
            await _require_new(catalog, dump.session.id)
            with put_pages(file, dump, tiers[-1], layout, wanted=with_pages) as moved:
                await catalog.sessions.restore(dump)
    return dump.session.id, moved


async def _require_new(catalog: "Catalog", session: str) -> None:
    """Raises CannotServe when there is a session of that id."""
    from kvrecall.domain.errors import UnknownSession

    try:
        await catalog.sessions.get(session)
    except UnknownSession:
        return
    raise CannotServe(f"there is a session {session} already; give the file's another id with --as")


def _told(moved: "PagesMoved") -> str:
    rows = f"{moved.pages:,} pages, {readable_bytes(moved.bytes)}"
    lost = (
        f"; {moved.missing} pages are missing and are computed again when they are needed"
        if moved.missing
        else ""
    )
    return rows + lost
