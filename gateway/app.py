"""ASGI application: routes, error handlers and middleware around one service."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

import structlog
from fastapi import FastAPI, Response
from fastapi.middleware.cors import CORSMiddleware

from gateway.authentication import Authentication
from gateway.bodies import StrictBody
from gateway.errors import Problem, install_handlers, problem_responses
from gateway.grpc.server import GrpcServer
from gateway.metrics.service import Metrics
from gateway.middleware import RequestLog
from gateway.rest.router import create_routes
from gateway.scopes import require_rules
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

# Headers of answers that web pages may read.
EXPOSED_HEADERS = (
    "x-request-id",
    "openai-processing-ms",
    "openai-version",
    "kvrecall-session",
    "kvrecall-match",
    "kvrecall-turn",
    "kvrecall-clamped",
    *(
        f"x-ratelimit-{value}-{what}"
        for what in ("requests", "tokens")
        for value in ("limit", "remaining", "reset")
    ),
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
)


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
    require_rules(app.routes)
    app.add_middleware(StrictBody, settings=settings)
    app.add_middleware(Authentication, access=service.access)
    app.add_middleware(RequestLog, observer=metrics.count_request)
    if settings.cors_origins:
        _allow_origins(app, settings.cors_origins)
    return app


def _allow_origins(app: FastAPI, origins: Sequence[str]) -> None:
    """Let web pages of these origins send any header and read those that answers have.

    Cookies play no part: a page sends a key, so no request is authenticated by being from a browser.
    """
    app.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=EXPOSED_HEADERS,
    )


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
