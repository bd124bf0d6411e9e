"""ASGI application: routes, error handlers and middleware around one service."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

import structlog
from fastapi import FastAPI, Response

from gateway.bodies import StrictBody
from gateway.errors import Problem, install_handlers, problem_responses
from gateway.grpc.server import GrpcServer
from gateway.metrics.service import Metrics
from gateway.middleware import RequestLog
from gateway.rest.router import create_routes
from gateway.settings import GatewaySettings
from kvrecall.domain.errors import ShuttingDown, WorkerLost
from kvrecall.domain.events import (
    EpisodesFailed,
    PagesRebuilt,
    PauseTimedOut,
    RepairFailed,
    ServiceEvent,
    SessionMoved,
    TurnFailed,
    TurnRetried,
)
from services.service import SessionService


class Application(FastAPI):
    """FastAPI application with the schema of problems in its OpenAPI description."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI description, with the schema that no route returns by itself."""
        description = super().openapi()
        description["components"]["schemas"].setdefault("Problem", Problem.model_json_schema())
        return description


def create_app(
    service: SessionService, settings: GatewaySettings, rpc: GrpcServer | None = None
) -> FastAPI:
    """Build the application of `service`, which it starts and stops with itself.

    `rpc` is the server of the gRPC API, if there is one: it answers while the application runs.
    """
    metrics = Metrics(service.admission)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            if rpc is not None:
                await rpc.start(service, metrics.count_call)
            yield
        finally:
            if rpc is not None:
                await rpc.stop(service.announce_stop())
            await service.stop()

    app = Application(
        title="kvrecall",
        version=version("kvrecall"),
        description="Conversational memory for self-hosted LLMs.",
        lifespan=lifespan,
        routes=create_routes(service, settings),
        docs_url=None,
        redoc_url=None,
    )
    service.observe(metrics.observe)
    service.observe(log_event)
    _add_operations(app, service, metrics)
    install_handlers(app)
    app.add_middleware(StrictBody, settings=settings)
    app.add_middleware(RequestLog, observer=metrics.count_request)
    return app


def log_event(event: ServiceEvent) -> None:
    """Log failures that no response reports, such as a failed background repair, and moves."""
    log = structlog.get_logger("kvrecall.service")
    match event:
        case RepairFailed():
            log.warning("repair failed", **vars(event))
        case EpisodesFailed():
            log.warning("episode maintenance failed", **vars(event))
        case PagesRebuilt():
            log.warning("missing pages recomputed", **vars(event))
        case TurnRetried():
            log.warning("turn retried in another worker", **vars(event))
        case SessionMoved():
            log.info("session moved", **vars(event))
        case PauseTimedOut():
            log.warning("tool calls timed out", **vars(event))
        case TurnFailed():
            log.info("turn failed", **vars(event))


def _add_operations(app: FastAPI, service: SessionService, metrics: Metrics) -> None:
    @app.get("/healthz", tags=["operations"])
    async def healthz() -> dict[str, str]:
        """Liveness: the process is running."""
        return {"status": "alive"}

    @app.get("/readyz", responses=problem_responses(503), tags=["operations"])
    async def readyz() -> dict[str, str]:
        """Readiness: requests are accepted and a worker is reachable.

        `failed_tiers` names the storage tiers that fail now, as WORKER/TIER: turns go on, but their
        rows may be durable in no tier.
        """
        if not service.ready:
            raise ShuttingDown("the service does not accept requests now", retry_after_seconds=1.0)
        failed = sorted(
            f"{worker}/{tier}"
            for worker, stats in (await service.stats()).items()
            for tier, tier_stats in stats.tiers.items()
            if tier_stats.failure
        )
        return {"status": "ready", **({"failed_tiers": ", ".join(failed)} if failed else {})}

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
        tags=["operations"],
    )
    async def metrics_page() -> Response:
        """Prometheus metrics of the service and its workers; unreachable workers have only `up`."""
        try:
            stats = await service.stats()
        except WorkerLost:
            stats = {}
        return Response(metrics.render(stats), media_type=metrics.content_type)
