"""`kvrecall upgrade`: bring a catalog of an older kvrecall to this version."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from kvrecall.app.errors import CannotServe
from kvrecall.app.settings import Settings
from kvrecall.cli.options import Data, build_settings, setting

if TYPE_CHECKING:
    from services.catalog.versions import CatalogUpgrade

CatalogUrl = Annotated[
    str | None,
    setting("catalog_url", "Redis of a catalog that gateways share. Default: a file."),
]


def upgrade_command(data: Data = None, catalog_url: CatalogUrl = None) -> None:
    """Bring the catalog to the version of this kvrecall.

    `kvrecall serve` and `kvrecall gateway` do the same when they start. Stop every older process
    that uses the catalog first. A catalog file is copied before it is changed; of a Redis, make a
    copy with its own means. A catalog of a newer kvrecall is refused and left alone.
    """
    settings = build_settings(data=data, catalog_url=catalog_url)
    with _hold_directory(settings):
        upgrade, sessions = asyncio.run(_upgrade(settings))
    Console().print(_describe(upgrade, sessions), highlight=False, soft_wrap=True, markup=False)


async def _upgrade(settings: Settings) -> "tuple[CatalogUpgrade, int]":
    """Run the upgrade. Raises CannotServe."""
    from kvrecall.app.catalog import upgrade_catalog

    return await upgrade_catalog(settings)


@contextmanager
def _hold_directory(settings: Settings) -> Iterator[None]:
    """Keep other processes out of the data directory meanwhile, if the catalog lies there.

    Raises CannotServe when the directory has no catalog, or another process uses it.
    """
    from kvstore.errors import DirectoryLockedError
    from kvstore.fsck import locked_directory

    if settings.catalog_url is not None:
        yield
        return
    if not (settings.data / "catalog.sqlite3").exists():
        raise CannotServe(f"{settings.data} holds no catalog; name a data directory with --data")
    pages = settings.data / "pages"
    if not pages.is_dir():
        yield
        return
    try:
        with locked_directory(pages):
            yield
    except DirectoryLockedError as error:
        raise CannotServe(
            f"data directory {settings.data} is in use by another kvrecall; stop that one first"
        ) from error


def _describe(upgrade: "CatalogUpgrade", sessions: int) -> str:
    count = f"{sessions} session{'' if sessions == 1 else 's'}"
    if not upgrade.upgraded:
        return f"{upgrade.location}: version {upgrade.version} already, nothing to do; {count}"
    done = (
        f"{upgrade.location}: upgraded from version {upgrade.found} to {upgrade.version}; {count}"
    )
    return done if upgrade.backup is None else f"{done}; a copy from before is {upgrade.backup}"
