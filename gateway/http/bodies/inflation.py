"""Compressed request bodies, inflated as they arrive: never further than a limit."""

import zlib
from collections.abc import Callable, Mapping
from typing import Protocol

from backports.zstd import DecompressionParameter, ZstdDecompressor, ZstdError

# A stream may ask for more memory than that to look back in: RFC 9659 allows 8 MiB over HTTP.
_ZSTD_WINDOW_LOG = 23
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32


class Inflater(Protocol):
    """Inflates one body."""

    def inflate(self, data: bytes, most: int) -> bytes:
        """Return what comes out of the next data, at most so many bytes. Raises ValueError."""
        ...

    @property
    def complete(self) -> bool:
        """True if the body may end here."""
        ...


class _Plain:
    """A body that is not compressed."""

    complete = True

    def inflate(self, data: bytes, most: int) -> bytes:
        """Return the data."""
        return data


class _Zlib:
    """A body as gzip, or as zlib's format, which is called deflate."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(_GZIP_OR_ZLIB)

    def inflate(self, data: bytes, most: int) -> bytes:
        """Inflate. Raises ValueError."""
        try:
            found = self._inner.decompress(data, most)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        if self._inner.unused_data:
            raise ValueError("there is data behind its end")
        return found

    @property
    def complete(self) -> bool:
        """True at the end."""
        return self._inner.eof


class _Zstd:
    """A body as one frame of Zstandard."""

    def __init__(self) -> None:
        options: Mapping[int, int] = {DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG}
        self._inner = ZstdDecompressor(options=options)

    def inflate(self, data: bytes, most: int) -> bytes:
        """Inflate. Raises ValueError."""
        found = b""
        try:
            if not self._inner.eof:
                found = self._inner.decompress(data, most)
                data = self._inner.unused_data
        except ZstdError as error:
            raise ValueError(str(error)) from error
        if self._inner.eof and data:
            raise ValueError("there is data behind its end")
        return found

    @property
    def complete(self) -> bool:
        """True at the end."""
        return self._inner.eof


_INFLATERS: Mapping[str, Callable[[], Inflater]] = {
    "": _Plain,
    "identity": _Plain,
    "gzip": _Zlib,
    "x-gzip": _Zlib,
    "deflate": _Zlib,
    "zstd": _Zstd,
}
ACCEPTED = ("gzip", "deflate", "zstd")
"""Content encodings of bodies, as a refusal names them."""


def find_inflater(encoding: str) -> Inflater | None:
    """Return what inflates bodies of a content encoding; None for one that is not known."""
    found = _INFLATERS.get(encoding.strip().lower())
    return None if found is None else found()
