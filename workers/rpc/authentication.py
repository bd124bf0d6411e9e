"""Authentication of a worker's clients: the shared token, or a certificate, or loopback alone."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from kvrecall.domain.addresses import is_loopback
from kvrecall.protocol.v1 import TOKEN_KEY
from workers.errors import CannotListen
from workers.rpc.settings import ServerSettings


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every call, of whatever service, that does not carry the token."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        # A stream handler for all calls: no byte of a refused request is read.
        self._refusal: Any = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        """Pass a call with the token on. The comparison takes the same time for any wrong token."""
        given = dict(details.invocation_metadata or ()).get(TOKEN_KEY, "")
        given = given.encode() if isinstance(given, str) else given
        if hmac.compare_digest(given, self._token):
            return await continuation(details)
        return self._refusal


async def _refuse(requests: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "the call has no token, or a wrong one: the gateway's KVRECALL_WIRE__TOKEN must be the "
        "worker's KVRECALL_SERVER__TOKEN",
    )


def require_authentication(settings: ServerSettings) -> None:
    """Raise CannotListen if other machines could reach the worker without proving who they are."""
    if ":" not in settings.listen:
        return  # no HOST:PORT, which the bind refuses
    if listens_on_loopback(settings) or settings.token or settings.tls_client_ca:
        return
    raise CannotListen(
        f"{settings.listen} is reachable from other machines, and any client that reaches it can "
        "read and delete every session: set KVRECALL_SERVER__TOKEN to a secret, and "
        "KVRECALL_WIRE__TOKEN of the gateways to the same; or ask for client certificates with "
        "--tls-cert, --tls-key and --tls-client-ca; or listen on 127.0.0.1"
    )


def listens_on_loopback(settings: ServerSettings) -> bool:
    """Return whether only this machine reaches the worker."""
    return is_loopback(settings.listen.rpartition(":")[0])
