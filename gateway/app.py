"""The application: routes, error handlers and middleware around one service, whose life it shares."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

import structlog
from fastapi import FastAPI, Response

from gateway.errors import Problem, install_handlers, problems
from gateway.metrics.service import Metrics
from gateway.middleware import RequestLog, StrictBody
from gateway.rest.routes.sessions import sessions_router
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
    """An application whose description has the schema of problems, which no route returns as its own."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI description."""
        described = super().openapi()
        described["components"]["schemas"].setdefault("Problem", Problem.model_json_schema())
        return described


def create_app(service: SessionService, settings: GatewaySettings) -> FastAPI:
    """The front door of `service`, which is started and stopped with the application."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    app = Application(
        title="kvrecall",
        version=version("kvrecall"),
        description="Conversational memory for self-hosted LLMs.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    metrics = Metrics(service.admission)
    service.observe(metrics.observe)
    service.observe(log_failure)
    app.include_router(sessions_router(service, settings))
    _add_operations(app, service, metrics)
    install_handlers(app)
    app.add_middleware(StrictBody, max_bytes=settings.max_body_bytes)
    app.add_middleware(RequestLog, observer=metrics.count_request)
    return app


def log_failure(observation: ServiceEvent) -> None:
    """Write down what no client may be told: a repair in the background that failed, a turn that broke off."""
    log = structlog.get_logger("kvrecall.service")
    match observation:
        case RepairFailed():
            log.warning("repair failed", **vars(observation))
        case EpisodesFailed():
            log.warning("episodes failed", **vars(observation))
        case PagesRebuilt():
            log.warning("lost pages were computed again", **vars(observation))
        case TurnRetried():
            log.warning("turn goes on in another worker", **vars(observation))
        case SessionMoved():
            log.info("session moved", **vars(observation))
        case PauseTimedOut():
            log.warning("pause timed out", **vars(observation))
        case TurnFailed():
            log.info("turn not committed", **vars(observation))


def _add_operations(app: FastAPI, service: SessionService, metrics: Metrics) -> None:
    @app.get("/healthz", tags=["operations"])
    async def healthz() -> dict[str, str]:
        """The process is alive."""
        return {"status": "alive"}

    @app.get("/readyz", responses=problems(503), tags=["operations"])
    async def readyz() -> dict[str, str]:
        """New work is taken, and the worker answers."""
        if not service.ready:
            raise ShuttingDown("the service is not taking requests now", retry_after_seconds=1.0)
        await service.stats()
        return {"status": "ready"}

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
        tags=["operations"],
    )
    async def metrics_page() -> Response:
        """Prometheus metrics; of a worker that is away, that it is."""
        try:
            stats = await service.stats()
        except WorkerLost:
            stats = {}
        return Response(metrics.render(stats), media_type=metrics.content_type)
