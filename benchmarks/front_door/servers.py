"""Servers of the front door's benchmark, each in a process of its own: a bare echo, or a gateway.

`python -m benchmarks.front_door.servers echo|stub` serves on a free port and ends with its input.
The gateway is the one of `kvrecall gateway`, with its limits and its access log, over a worker that
computes nothing (`kvrecall_server.testing.StubWorker`). The echo is a FastAPI application with one route,
on the same server without any limits, middleware or log, whose response has the fields of a
session. Settings come from the environment, as everywhere.
"""

import asyncio
import socket
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI
from rich.console import Console

from kvrecall_server.app.access import build_access
from kvrecall_server.app.catalog import open_catalog
from kvrecall_server.app.run import LISTENING, run_service, set_up_process
from kvrecall_server.app.settings import Settings
from kvrecall_server.testing import StubWorker
from services.service import SessionService

# As many bytes as the gateway's response about a new session.
FIELDS: dict[str, Any] = {
    "state": "idle",
    "model": "tiny",
    "worker": "one",
    "recall": False,
    "budget": 256,
    "keep_reasoning": False,
    "research": {
        "repair_rows": 64,
        "repair_on": ["tool_call", "tool_delta", "tool_result"],
        "repair_settings": {},
        "repair_seconds": None,
        "method": "snapkv",
        "method_settings": {},
        "layer_budgets": None,
        "episodes": None,
    },
    "seed": 1234567890,
    "tools": [],
    "metadata": {},
    "forked_from": None,
    "turns": 0,
    "length": 0,
    "pending_calls": [],
    "created_at": "2026-01-01T00:00:00.000000Z",
    "updated_at": "2026-01-01T00:00:00.000000Z",
}


def main() -> None:
    """Serve the application that the command line names."""
    settings = Settings()
    set_up_process(settings, until_input_ends=True, component="gateway")
    asyncio.run({"echo": serve_echo, "stub": serve_stub}[sys.argv[1]](settings))


async def serve_stub(settings: Settings) -> None:
    """Serve the gateway over a stub worker."""

    async def build() -> SessionService:
        catalog = await open_catalog(settings)
        access = build_access(settings, catalog)
        return SessionService(StubWorker(), catalog, settings.service, access)

    await run_service(settings, Console(), build)


async def serve_echo(settings: Settings) -> None:
    """Serve `GET /v1/sessions/{session}` with its parameter in the response, and a POST of JSON."""
    app = FastAPI()

    @app.get("/v1/sessions/{session}")
    async def echo(session: str) -> dict[str, Any]:
        return {"id": session, **FIELDS}

    @app.post("/v1/echo")
    async def echo_body(body: dict[str, Any]) -> dict[str, Any]:
        return {"members": len(body), **FIELDS}

    with socket.create_server(("127.0.0.1", settings.port)) as listener:
        # As in kvrecall_server.app.run: the second part of a response would wait for a delayed ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
        print(f"{LISTENING}http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        await server.serve(sockets=[listener])


if __name__ == "__main__":
    main()
