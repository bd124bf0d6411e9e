"""`kvrecall health`: a probe for containers that have no curl: one request, exit code 0 or 1."""

import asyncio
import os
import ssl
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from kvrecall_server.app.errors import CliError
from kvrecall_server.cli.options import build_settings

if TYPE_CHECKING:
    import httpx

    from services.cluster.settings import WireSettings

_MOST_TEXT = 200

HealthUrl = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="http://HOST:PORT of a gateway or of a worker's --ops, or grpc://HOST:PORT of a worker.",
    ),
]
Ready = Annotated[
    bool, typer.Option("--ready", help="Ask whether it takes work, not only whether it runs.")
]
Timeout = Annotated[
    float, typer.Option(min=0.001, help="Longest time of the whole probe, in seconds.")
]


class NotHealthy(CliError):
    """The process does not answer, or answers that it is not healthy."""

    exit_code = 1


def health_command(url: HealthUrl, ready: Ready = False, timeout: Timeout = 5.0) -> None:
    """Ask a gateway or a worker for its health: exit code 0, or 1 and a line on standard error.

    Over HTTP it asks /healthz, with --ready /readyz; over gRPC it asks grpc.health.v1, with the
    token and the certificates of KVRECALL_WIRE__.... No proxy of the environment is used.
    """
    try:
        asyncio.run(_probe(url, ready, timeout))
    except TimeoutError as error:
        raise NotHealthy(f"{url} did not answer within {timeout:g} seconds") from error


async def _probe(url: str, ready: bool, seconds: float) -> None:
    """Ask once. Raises NotHealthy, and TimeoutError after `seconds`."""
    try:
        parts = urlsplit(url)
        address = parts.port and parts.netloc
    except ValueError as error:
        raise NotHealthy(f"{url} is no address: {error}") from error
    async with asyncio.timeout(seconds):
        match parts.scheme:
            case "http" | "https" if parts.hostname:
                await _ask_http(url.rstrip("/") + ("/readyz" if ready else "/healthz"))
            case "grpc" if address:
                await _ask_grpc(address, ready, build_settings().wire)
            case _:
                raise NotHealthy(
                    f"{url} is no address of a probe: expected http://HOST:PORT, "
                    "https://HOST:PORT or grpc://HOST:PORT"
                )


async def _ask_http(url: str) -> None:
    """Raise NotHealthy unless GET answers 200."""
    import httpx

    # Certificates are those of OpenSSL, which SSL_CERT_FILE and SSL_CERT_DIR replace.
    verify = ssl.create_default_context() if url.startswith("https:") else False
    try:
        async with httpx.AsyncClient(verify=verify, trust_env=False, timeout=None) as client:
            response = await client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NotHealthy(f"{url} cannot be reached: {_to_line(str(error))}") from error
    if response.status_code != httpx.codes.OK:
        raise NotHealthy(f"{url} answered {response.status_code}: {_get_reason(response)}")


def _get_reason(response: "httpx.Response") -> str:
    """The detail of a problem document, or the beginning of the body."""
    try:
        body: Any = response.json()
    except ValueError:
        body = None
    detail = body.get("detail") if isinstance(body, dict) else None
    return _to_line(str(detail or response.text))


async def _ask_grpc(address: str, ready: bool, settings: "WireSettings") -> None:
    """Raise NotHealthy unless the health service answers, and with `ready` says SERVING."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read at the import: one line is enough
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from kvrecall.protocol.certificates import read_channel
    from kvrecall.protocol.v1 import TOKEN_KEY

    options = [("grpc.enable_http_proxy", 0)]
    token = settings.token
    metadata = () if token is None else ((TOKEN_KEY, token.get_secret_value()),)
    try:
        credentials = read_channel(settings)
    except OSError as error:
        raise NotHealthy(f"a certificate cannot be read: {error}") from error
    channel = (
        grpc.aio.insecure_channel(address, options=options)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials, options=options)
    )
    async with channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), metadata=metadata)
        except grpc.aio.AioRpcError as error:
            reason = _to_line(error.details() or "")
            raise NotHealthy(f"{address} answered {error.code().name}: {reason}") from error
    if ready and answer.status != health_pb2.HealthCheckResponse.SERVING:
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise NotHealthy(f"{address} takes no work now: {status}")


def _to_line(text: str) -> str:
    return " ".join(text.split())[:_MOST_TEXT]
