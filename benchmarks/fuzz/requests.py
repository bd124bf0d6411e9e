"""A request as bytes, which can be sent again, and its reply."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Cut(StrEnum):
    """Where a client leaves: not at all, in the middle of its body, or of the reply."""

    NONE = "none"
    BODY = "body"
    REPLY = "reply"


@dataclass(frozen=True)
class Request:
    """A request of any door; for gRPC `path` is the method, `headers` are the metadata."""

    door: str
    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    cut: Cut = Cut.NONE

    def describe(self) -> dict[str, Any]:
        """Return it as JSON values: the body as text, or in hexadecimal where it is none."""
        try:
            body = {"body": self.body.decode("utf-8")}
        except UnicodeDecodeError:
            body = {"body_hex": self.body.hex()}
        return {
            "door": self.door,
            "method": self.method,
            "path": self.path,
            "headers": [list(each) for each in self.headers],
            "cut": str(self.cut),
            **body,
        }

    @classmethod
    def from_described(cls, read: Mapping[str, Any]) -> "Request":
        """Return the request that `describe` has described."""
        body = bytes.fromhex(read["body_hex"]) if "body_hex" in read else read["body"].encode()
        headers = tuple((name, value) for name, value in read["headers"])
        return cls(read["door"], read["method"], read["path"], headers, body, Cut(read["cut"]))


@dataclass(frozen=True)
class Reply:
    """What came back: an HTTP status or the name of a gRPC status, and the text.

    `error` is the client's word for a reply that broke off or never came. `code` is the error code
    of a gRPC status' details.
    """

    status: str
    content_type: str = ""
    body: bytes = b""
    error: str = ""
    code: str = ""
    seconds: float = 0.0
