"""Access control of the processes that serve, and of the command that manages keys."""

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from kvrecall.domain.addresses import is_loopback
from kvrecall.domain.errors import CatalogError
from kvrecall_server.app.catalog import get_path, open_catalog
from kvrecall_server.app.errors import CannotServe
from kvrecall_server.app.rates import build_rates
from kvrecall_server.app.settings import Settings
from services.access.authenticator import AccessPolicy
from services.access.control import AccessControl
from services.access.keys import MIN_PEPPER_BYTES
from services.catalog.api_keys import ApiKeys
from services.catalog.base import Catalog
from services.catalog.sqlite.api_keys import SqliteApiKeys
from services.catalog.sqlite.storage.database import open_beside

PEPPER_FILE = "key-pepper"


def build_access(settings: Settings, catalog: Catalog) -> AccessControl:
    """Build the access control of a service over `catalog`. Raises CannotServe."""
    access = settings.access
    policy = AccessPolicy(
        open=_find_exposed(settings) is None,
        api_key=None if settings.api_key is None else settings.api_key.get_secret_value(),
        pepper=load_pepper(settings),
        trusted_proxies=access.trusted_proxies,
        cache_seconds=access.cache_seconds,
    )
    return AccessControl(catalog.api_keys, policy, build_rates(settings))


async def require_key(settings: Settings) -> None:
    """Refuse to serve on an address that others reach while no sender would be authenticated.

    Raises CannotServe.
    """
    exposed = _find_exposed(settings)
    if exposed is None or settings.api_key or settings.access.trusted_proxies:
        return
    if settings.catalog_url is not None or get_path(settings).is_file():
        async with open_keys(settings) as keys:
            if await keys.exist():
                return
    raise CannotServe(
        f"other machines reach {exposed}, and there is no key: make one with `kvrecall keys "
        "create --tenant NAME`, or set KVRECALL_API_KEY, or name the proxies that authenticate "
        "clients in KVRECALL_ACCESS__TRUSTED_PROXIES, or listen on 127.0.0.1"
    )


def _find_exposed(settings: Settings) -> str | None:
    """Return the address of an API that other machines reach; None if there is none."""
    hosts = [settings.host]
    if settings.grpc.listen is not None:
        hosts.append(settings.grpc.listen.rpartition(":")[0])
    return next((host for host in hosts if not is_loopback(host)), None)


@asynccontextmanager
async def open_keys(settings: Settings) -> AsyncIterator[ApiKeys]:
    """Open the keys of the catalog, also beside a gateway that uses its file. Raises CannotServe."""
    try:
        database = None if settings.catalog_url else await open_beside(get_path(settings))
        if database is not None:
            try:
                yield SqliteApiKeys(database)
            finally:
                await database.close()
            return
        catalog = await open_catalog(settings)
        try:
            yield catalog.api_keys
        finally:
            await catalog.close()
    except CatalogError as error:
        raise CannotServe(error.message) from error


def find_pepper(settings: Settings) -> bytes | None:
    """Return the pepper that is set, or is in the data directory; None if none is. Raises CannotServe."""
    access = settings.access
    if access.pepper is not None:
        return _check(access.pepper.get_secret_value().encode(), "KVRECALL_ACCESS__PEPPER")
    if access.pepper_file is not None:
        return _read(access.pepper_file)
    path = settings.data / PEPPER_FILE
    return _read(path) if settings.catalog_url is None and path.exists() else None


def load_pepper(settings: Settings) -> bytes | None:
    """Return the pepper, None where gateways share a catalog and none is set. Raises CannotServe.

    A gateway with a catalog of its own makes one in its data directory.
    """
    pepper = find_pepper(settings)
    if pepper is not None or settings.catalog_url is not None:
        return pepper
    path = settings.data / PEPPER_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _make(path)
    except OSError as error:
        raise CannotServe(f"{path} cannot be written: {error.strerror}") from error
    return _read(path)


def require_pepper(settings: Settings) -> bytes:
    """Return the pepper. Raises CannotServe, which says how to make a common one."""
    pepper = load_pepper(settings)
    if pepper is None:
        raise CannotServe(
            "gateways that share a catalog need a common pepper: write 32 random bytes in hex to a "
            "file (openssl rand -hex 32) and name it in KVRECALL_ACCESS__PEPPER_FILE of all of them"
        )
    return pepper


def _make(path: Path) -> None:
    """Write a random pepper unless there is one; it appears whole or not at all."""
    if path.exists():
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{secrets.token_hex(32)}\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        with suppress(FileExistsError):  # another process was first
            os.link(part, path)
    finally:
        part.unlink()


def _read(path: Path) -> bytes:
    try:
        return _check(path.read_bytes().strip(), str(path))
    except OSError as error:
        raise CannotServe(f"the pepper {path} cannot be read: {error.strerror}") from error


def _check(pepper: bytes, source: str) -> bytes:
    if len(pepper) < MIN_PEPPER_BYTES:
        raise CannotServe(f"the pepper in {source} is shorter than {MIN_PEPPER_BYTES} bytes")
    return pepper
