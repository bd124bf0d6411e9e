"""Client of one bucket: calls for many objects at once, each as one request of its own.

A request takes tens of milliseconds however small the object is, so the requests of a call run side by
side. After a failure every call fails at once until a probe succeeds: a silent bucket costs its callers one
timeout, and not one for each page.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.errors import StoreClosedError, TierFailedError, TierSettingsError
from kvstore.tiers.bucket.address import BucketAddress
from kvstore.tiers.bucket.stored_object import StoredObject

if TYPE_CHECKING:
    from obstore.store import S3Store

    from kvstore.format.page import Blob

_T = TypeVar("_T")
_R = TypeVar("_R")

REQUESTS_AT_ONCE = 16
"""Requests of one bucket that run side by side."""

_RETRIES = 2
_NO_BUCKET = "NoSuchBucket"
# What one request of a server's deletion takes.
_DELETED_AT_ONCE = 1000
_LISTED_AT_ONCE = 1000


class BucketClient:
    """Reads and writes the objects of a bucket below `prefix`. Safe to call from several threads.

    Credentials come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and others), or from
    the role of the machine or container, as obstore finds them.

    Raises TierSettingsError where obstore is missing or the address cannot be used, and TierFailedError
    for every failure of a call.
    """

    def __init__(self, address: BucketAddress, prefix: str, timeout_seconds: float) -> None:
        self._address = address
        self._failures, self._store = _connect(address, prefix, timeout_seconds)
        self._threads = ThreadPoolExecutor(REQUESTS_AT_ONCE, "kvstore-bucket")
        self._closed = False
        self._failure: str | None = None

    def __str__(self) -> str:
        return str(self._address)

    def get(self, names: Sequence[str]) -> list[memoryview | None]:
        """Read objects, None where there is none, nor a bucket."""
        return self._run_each(names, lambda name: memoryview(self._store.get(name).bytes()))

    def get_starts(self, names: Sequence[str], size: int) -> list[memoryview | None]:
        """Read the first `size` bytes of objects, None where there is none."""
        return self._run_each(
            names, lambda name: memoryview(self._store.get_range(name, start=0, length=size))
        )

    def find(self, names: Sequence[str]) -> list[StoredObject | None]:
        """Look for objects, None where there is none, nor a bucket."""
        return self._run_each(names, lambda name: _describe(self._store.head(name)))

    def put(self, name: str, content: "Blob") -> None:
        """Store an object, whole: no reader sees a part of it."""

        def put() -> bool:
            self._store.put(name, memoryview(content), use_multipart=False)
            return True

        if self._run(put) is None:
            raise self._describe_loss()

    def put_each(self, objects: Sequence[_T], put: Callable[[_T], None]) -> None:
        """Run `put` for each of these on the client's threads. Raises the first error, after all ended."""
        self._run_aside(objects, put)

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; unknown ones are ignored, as all are where there is no bucket."""
        batches = [
            list(names[first : first + _DELETED_AT_ONCE])
            for first in range(0, len(names), _DELETED_AT_ONCE)
        ]
        self._run_each(batches, lambda batch: self._store.delete(batch))

    def list_all(self) -> Iterator[list[StoredObject]]:
        """Yield all objects below the prefix, in lists of a request each."""
        stream = iter(self._store.list(chunk_size=_LISTED_AT_ONCE))
        while (chunk := self._run(lambda: next(stream, None))) is not None:
            yield [_describe(each) for each in chunk]

    @property
    def has_failed(self) -> bool:
        """True while calls fail at once."""
        return self._failure is not None

    def probe(self, name: str) -> None:
        """Ask for an object, whether calls fail or not; if the bucket answers, they reach it again.

        Raises TierFailedError.
        """
        self._send(lambda: self._store.head(name))
        self._failure = None

    def close(self) -> None:
        """Wait for the requests that run, and stop the threads. May be called twice.

        Calls raise StoreClosedError from now on, those that wait for a thread too.
        """
        self._closed = True
        self._threads.shutdown()

    def _run_each(self, keys: Sequence[_T], request: Callable[[_T], _R]) -> list[_R | None]:
        """Run a request for each key, side by side; None where there is no object."""
        if len(keys) == 1:  # The caller's own thread does.
            return [self._run(lambda: request(keys[0]))]
        return self._run_aside(keys, lambda key: self._run(lambda: request(key)))

    def _run_aside(self, keys: Sequence[_T], work: Callable[[_T], _R]) -> list[_R]:
        """Run work for each key on the client's threads. Raises the first error, after all ended."""
        try:
            futures = [self._threads.submit(work, key) for key in keys]
        except RuntimeError as error:  # They were stopped just now.
            raise StoreClosedError(f"{self} is closed") from error
        if failure := next(filter(None, [each.exception() for each in futures]), None):
            raise failure
        return [each.result() for each in futures]

    def _run(self, request: Callable[[], _R]) -> _R | None:
        """Run a request; None where there is no object. Raises TierFailedError, StoreClosedError."""
        if self._closed:
            raise StoreClosedError(f"{self} is closed")
        if self._failure is not None:
            raise TierFailedError(self._failure)
        return self._send(request)

    def _send(self, request: Callable[[], _R]) -> _R | None:
        try:
            return request()
        except FileNotFoundError:
            return None
        except self._failures as error:
            if _NO_BUCKET in str(error):
                raise self._describe_loss() from None
            self._failure = f"{self} failed: {_shorten(error)}"
            raise TierFailedError(self._failure) from None

    def _describe_loss(self) -> TierFailedError:
        """The error of a call that needs a bucket where there is none. That is an answer: calls go on."""
        return TierFailedError(
            f"{self}: no such bucket ({_NO_BUCKET}); create it, or correct its name"
        )


def _connect(
    address: BucketAddress, prefix: str, timeout_seconds: float
) -> "tuple[tuple[type[Exception], ...], S3Store]":
    """Create a client, which sends nothing yet; return the errors of its calls, and it."""
    try:
        # Imported here: only workers with a bucket need it.
        from obstore.exceptions import BaseError
        from obstore.store import S3Store
    except ImportError as error:
        raise TierSettingsError(
            "pages in a bucket need the library obstore: pip install 'kvrecall-server[s3]'"
        ) from error
    settings: dict[str, Any] = {}
    options: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=timeout_seconds / 2),
        "read_timeout": timedelta(seconds=timeout_seconds),
        "timeout": timedelta(seconds=3 * timeout_seconds),
    }
    if address.endpoint is not None:
        settings["endpoint"] = address.endpoint
        if address.endpoint.startswith("http:"):
            # A server of the operator's own network may have no certificate: its URL says so.
            options["allow_http"] = True
    if address.region is not None:
        settings["region"] = address.region
    try:
        store = S3Store(
            address.bucket,
            prefix=prefix,
            client_options=options,  # type: ignore[arg-type]
            retry_config={
                "max_retries": _RETRIES,
                "retry_timeout": timedelta(seconds=timeout_seconds),
            },
            **settings,
        )
    except (BaseError, ValueError) as error:
        raise TierSettingsError(f"{address} cannot be used: {_shorten(error)}") from None
    return (BaseError, OSError), store


def _describe(found: Any) -> StoredObject:
    return StoredObject(found["path"], found["size"], int(found["last_modified"].timestamp()))


def _shorten(error: Exception) -> str:
    """The first line of an error: obstore adds its own structures below."""
    return str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
