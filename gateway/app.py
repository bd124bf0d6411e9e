"""ASGI application: routes, error handlers and middleware around one service."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from pydantic import BaseModel

from gateway.console.guards import BrowserGuard
from gateway.console.mount import ConsoleHeaders, mount_console
from gateway.grpc.server import GrpcServer
from gateway.http.authentication import Authentication
from gateway.http.bodies.parsing import BodyParser
from gateway.http.bodies.receiving import StrictBody
from gateway.http.errors import SCHEMA_PATH, Problem, install_handlers, problem_responses
from gateway.http.middleware import RequestLog
from gateway.http.scopes import require_rules
from gateway.http.settings import GatewaySettings
from gateway.metrics.recorder import Recorder
from gateway.metrics.status import StatusGauges
from gateway.observation.log import log_event
from gateway.observation.spans import TRACE_RESPONSE, TraceRequests, create_span_observer
from gateway.rest.reference_page import HEADERS as REFERENCE_HEADERS
from gateway.rest.reference_page import render
from gateway.rest.routes.watching import build_version
from gateway.router import VENDOR_FORMATS, create_routes
from kvrecall import client
from kvrecall.domain.errors import ShuttingDown
from kvrecall.metrics.page import Metrics, MetricsPage
from kvrecall.sandbox.tenant_threads import TenantThreads
from kvrecall.telemetry.spans import Tracer
from kvrecall.telemetry.wire import PassingTracer
from services.service import SessionService

# Headers of answers that web pages may read.
EXPOSED_HEADERS = (
    "x-request-id",
    TRACE_RESPONSE,
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
# Large bodies of one tenant that may wait to be parsed.
_MOST_LARGE_BODIES = 64
# FastAPI's own traces have whole URLs in them, and messages of errors: those of a request.
_NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}


class Application(FastAPI):
    """FastAPI application with the schemas of errors in its OpenAPI description."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI description, with the schemas that no route returns by itself."""
        description = super().openapi()
        schemas = description["components"]["schemas"]
        bodies: list[type[BaseModel]] = [Problem, *(each.error_body for each in VENDOR_FORMATS)]
        for body in bodies:
            schema = body.model_json_schema(ref_template=SCHEMA_PATH)
            for name, part in {body.__name__: schema, **schema.pop("$defs", {})}.items():
                schemas.setdefault(name, part)
        return description


def create_app(
    service: SessionService,
    settings: GatewaySettings,
    rpc: GrpcServer | None = None,
    tracer: Tracer | None = None,
    local: Sequence[Metrics] = (),
) -> FastAPI:
    """Build the application of `service`, which it starts and stops with itself.

    `rpc` is the server of the gRPC API, if there is one: it answers while the application runs.
    `local` are the metrics of a worker in this process, for the metrics page.
    """
    recorder = Recorder()
    tracer = tracer or PassingTracer()
    # One: the interpreter parses one body at a time in any case.
    parsing = TenantThreads(1, _MOST_LARGE_BODIES, "bodies")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            if rpc is not None:
                await rpc.start(service, recorder.count_call, tracer)
            yield
        finally:
            if rpc is not None:
                await rpc.stop(service.announce_stop())
            await service.stop()
            parsing.close()

    app = Application(
        title="kvrecall",
        version=version("kvrecall"),
        description="Conversational memory for self-hosted LLMs.",
        lifespan=lifespan,
        routes=create_routes(service, settings),
        docs_url=None,
        redoc_url=None,
        telemetry=_NO_TELEMETRY,
    )
    service.observe(recorder.observe)
    service.observe_catalog(recorder.count_catalog_call)
    service.observe(log_event)
    service.observe(create_span_observer(lambda: _get_model(service)))
    _add_operations(app, service, settings)
    _add_metrics(app, service, recorder.metrics, local)
    install_handlers(app, VENDOR_FORMATS)
    if settings.console:
        mount_console(app, settings.console_read_only)
    require_rules(app.routes)
    parser = BodyParser(service.limits.mends, parsing)
    app.add_middleware(StrictBody, settings=settings, parser=parser)
    app.add_middleware(Authentication, access=service.access, check_room=service.check_room)
    app.add_middleware(BrowserGuard, hosts=settings.hosts, origins=settings.cors_origins)
    app.add_middleware(RequestLog, observer=recorder)
    app.add_middleware(TraceRequests, tracer=tracer)
    if settings.console:  # outside of the log, whose answers to failures are the console's too
        app.add_middleware(ConsoleHeaders)
    if settings.cors_origins:
        _allow_origins(app, settings.cors_origins)
    return app


def _get_model(service: SessionService) -> str:
    return "" if service.known_info is None else service.known_info.model


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


def _add_operations(app: FastAPI, service: SessionService, settings: GatewaySettings) -> None:
    @app.get("/", include_in_schema=False)
    async def root(request: Request) -> Response:
        """The console for a browser; for other clients the places to begin at."""
        if settings.console and "text/html" in request.headers.get("accept", ""):
            # Relative, for a proxy that serves the application under a path.
            return RedirectResponse("console/", headers={"vary": "accept"})
        links = {"docs": "/docs", "openapi": "/openapi.json", "models": "/v1/models"}
        if settings.console:
            links["console"] = "/console/"
        found = {"name": "kvrecall", "version": app.version, "links": links}
        return JSONResponse(found, headers={"vary": "accept"})

    @app.get("/healthz", tags=["operations"])
    async def healthz() -> dict[str, str]:
        """Liveness: the process is running."""
        return {"status": "alive"}

    @app.get("/readyz", responses=problem_responses(503), tags=["operations"])
    async def readyz(
        workers: Annotated[bool, Query(description="Whether a worker must answer, too.")] = False,
    ) -> dict[str, str]:
        """Readiness: requests are accepted, and the catalog answers.

        A gateway without workers is ready: it answers with problems that say when to try again, and
        a balancer that left it out would have nothing to send requests to. With `workers`, one must
        answer, and `failed_tiers` names the storage tiers that fail now, as WORKER/TIER: turns go
        on, but their rows may be durable in no tier. `catalog` is `full` when it stores no more: it
        answers and deletes, which is how it is emptied.
        """
        if not service.ready:
            raise ShuttingDown("the service does not accept requests now", retry_after_seconds=1.0)
        await service.status.check_catalog()
        failed = await service.status.find_failed_tiers() if workers else []
        full = {} if await service.status.has_room() else {"catalog": "full"}
        tiers = {"failed_tiers": ", ".join(failed)} if failed else {}
        return {"status": "ready", **full, **tiers}

    @app.get("/health", responses=problem_responses(503), tags=["operations"])
    async def health() -> dict[str, str]:
        """Readiness with a worker, under the name that vLLM and llama.cpp have for it.

        Load generators wait for it before they send requests: as `/readyz?workers=true`.
        """
        await readyz(workers=True)
        return {"status": "ok"}

    build_page = cache(lambda: render(app.openapi()))

    @app.get("/docs", include_in_schema=False)
    async def reference() -> HTMLResponse:
        """The API's reference as a page."""
        return HTMLResponse(build_page(), headers=REFERENCE_HEADERS)

    @app.get("/version", tags=["operations"])
    async def get_version() -> client.Version:
        """Version of the service, the revision of its source, and the served model."""
        return build_version(service, settings)


def _add_metrics(
    app: FastAPI, service: SessionService, metrics: Metrics, local: Sequence[Metrics]
) -> None:
    gauges = StatusGauges(metrics, service.status)
    page = MetricsPage("serve" if local else "gateway", app.version, (metrics, *local))

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
        tags=["operations"],
    )
    async def metrics_page(request: Request) -> Response:
        """Prometheus metrics of this gateway, in OpenMetrics if asked for; workers have their own.

        `kvrecall serve` shows those of its worker as well.
        """
        await gauges.refresh()
        content_type, text = page.render(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})
