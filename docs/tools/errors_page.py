"""The page of error codes: each with its HTTP and gRPC status."""

from tables import to_table

INTRODUCTION = """# Error codes

An HTTP error is a problem document (RFC 9457): `type`, `title`, `status`, `detail` and `code`, and
members that depend on the code. A gRPC error carries the code as trailing metadata
`kvrecall-code`. Codes are stable, messages are not. They are declared once, in
`kvrecall/domain/codes.py`.
"""


def build() -> str:
    """The page's text."""
    from kvrecall.domain.codes import ErrorCode

    rows = [[f"`{code}`", str(code.http_status), f"`{code.grpc_status}`"] for code in ErrorCode]
    return f"{INTRODUCTION}\n{to_table(['code', 'HTTP', 'gRPC'], rows)}"
