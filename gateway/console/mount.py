"""Mount of the console: its files under /console, with headers that confine its pages.

The console is a client as any other: it has no key, no data and no route of the API.
"""

from importlib.metadata import version
from pathlib import Path

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PREFIX = "/console"
STATIC = Path(__file__).parent / "static"

# Scripts, styles and requests of the own origin only, nothing inline, nothing evaluated; a string
# becomes markup nowhere.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # With the files' ETags: a page of an older version is never mixed with modules of a newer one.
    "Cache-Control": "no-cache",
}


class ConsoleHeaders:
    """Adds the console's headers to every answer under its prefix, errors included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or not is_console_path(scope["path"]):
            await self._app(scope, receive, send)
            return

        async def send_confined(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, send_confined)


def is_console_path(path: str) -> bool:
    """Return whether a path is the console's."""
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def mount_console(app: FastAPI, read_only: bool) -> None:
    """Serve the console under /console; `read_only` hides what changes sessions.

    `ConsoleHeaders` belongs around the application. Hiding protects nothing: the API takes the same
    requests from anybody who has a key.
    """

    async def get_settings(request: Request) -> Response:
        return JSONResponse({"read_only": read_only, "version": version("kvrecall")})

    async def get_document(request: Request) -> Response:
        return FileResponse(STATIC / "index.html", media_type="text/html")

    routes = [
        Route("/settings.json", get_settings),
        Mount("/assets", StaticFiles(directory=STATIC)),
        # The address of a page is its state, and the page's own script reads it.
        Route("/{page:path}", get_document),
    ]
    app.router.routes.append(Mount(PREFIX, routes=routes))
