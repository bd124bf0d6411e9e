"""The gRPC server: address, TLS, limits, health and reflection."""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gateway.grpc.handlers import SERVICE, CallHandlers, CallObserver
from gateway.grpc.servicer import SessionsServicer
from gateway.grpc.settings import GrpcSettings
from gateway.http.settings import GatewaySettings
from kvrecall.protocol.certificates import CannotBind, bind
from kvrecall.telemetry.spans import Tracer
from services.service import SessionService

_MIN_PINGS = 10  # per keepalive interval, that a client may send


class CannotListen(Exception):
    """The address or the certificate of the gRPC API cannot be used."""


class GrpcServer:
    """gRPC server beside the HTTP API. Its address is bound on creation; it answers from `start` on.

    `address` is its HOST:PORT. Raises CannotListen. Create it in a running event loop.
    """

    def __init__(self, listen: str, settings: GrpcSettings, limits: GatewaySettings) -> None:
        self._settings = settings
        self._limits = limits
        self._server = grpc.aio.server(options=_build_options(settings, limits))
        self._health = health.aio.HealthServicer()
        self._stopping: asyncio.Task[None] | None = None
        self.address = f"{listen.rpartition(':')[0]}:{_bind(self._server, listen, settings)}"

    async def start(self, service: SessionService, observer: CallObserver, tracer: Tracer) -> None:
        """Answer calls with `service`, and report SERVING in grpc.health.v1."""
        servicer = SessionsServicer(service)
        handlers = CallHandlers(
            servicer, service.access, self._limits, self._settings.max_calls, observer, tracer
        )
        self._server.add_generic_rpc_handlers((handlers.build(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if self._settings.reflection:
            names = (SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        await self._health.set(SERVICE.full_name, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()

    async def announce_stop(self) -> None:
        """Report NOT_SERVING from now on; calls are answered until `stop`."""
        await self._health.enter_graceful_shutdown()

    def begin_stop(self, seconds: float) -> None:
        """Refuse new calls at once, and cancel those that run after `seconds`."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(seconds), name="grpc stop")

    async def stop(self, seconds: float = 0.0) -> None:
        """Stop, and return when no call runs any more."""
        self.begin_stop(seconds)
        assert self._stopping is not None, "the stop has begun"
        await self._stopping

    async def _stop(self, seconds: float) -> None:
        await self.announce_stop()
        await self._server.stop(seconds)


def _build_options(settings: GrpcSettings, limits: GatewaySettings) -> list[tuple[str, Any]]:
    keepalive_ms = int(settings.keepalive_seconds * 1000)
    return [
        ("grpc.so_reuseport", 0),  # two gateways at one address would share its calls at random
        ("grpc.max_receive_message_length", limits.max_body_bytes),
        ("grpc.max_concurrent_streams", settings.max_streams),
        ("grpc.max_metadata_size", limits.max_header_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_header_bytes),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.server_handshake_timeout_ms", int(limits.header_seconds * 1000)),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", int(settings.keepalive_timeout_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", keepalive_ms // _MIN_PINGS),
    ]


def _bind(server: grpc.aio.Server, listen: str, settings: GrpcSettings) -> int:
    """Bind the address; returns its port. Raises CannotListen."""
    try:
        return bind(server, listen, settings)
    except CannotBind as error:
        raise CannotListen(str(error)) from error
