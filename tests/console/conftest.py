"""The console in Debian's Chromium, over a real `kvrecall serve` with the reference model.

Every page of a test is watched: nothing on the console, no violation of the policy, no request of
another origin.
"""

import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect

from kvrecall.client import KvrecallClient, Message
from tests.console.served import ON_CALL, SMALL_TALK, Console
from tests.end_to_end.servers import Process

# Waits are for conditions; this is how long a busy machine may take.
WAIT_MS = 30_000.0
expect.set_options(timeout=WAIT_MS)
HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def browser_type_launch_args(browser_type_launch_args: dict[str, Any]) -> dict[str, Any]:
    """Debian's browser, which runs as root in CI."""
    return {
        **browser_type_launch_args,
        "executable_path": "/usr/bin/chromium",
        "args": ["--no-sandbox"],
    }


@pytest.fixture(scope="session")
def new_console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Console]]:
    """Starts servers over empty data directories on ports of their own; keywords: environment."""
    made: list[Console] = []

    def make(**environment: str) -> Console:
        folder = tmp_path_factory.mktemp("console")
        with socket.create_server(("127.0.0.1", 0)) as bound:
            port = str(bound.getsockname()[1])  # kept over restarts
        arguments = ["--port", port, "--data", str(folder / "data")]
        made.append(Console(Process("serve", arguments, folder / "server.log", environment)))
        made[-1].process.start()
        return made[-1]

    yield make
    for console in made:
        console.kill()


@pytest.fixture(scope="session")
def served(new_console: Callable[..., Console]) -> Console:
    """A server that the tests share."""
    return new_console()


@pytest.fixture
def client(served: Console) -> Iterator[KvrecallClient]:
    """A client of the shared server."""
    with KvrecallClient(served.url) as client:
        yield client


@pytest.fixture(scope="session")
def talk(served: Console) -> str:
    """A session with a fact, small talk beyond its budget, a pause with repairs, and an answer."""
    with KvrecallClient(served.url) as client:
        session = client.create_session(
            budget=256,
            research={"method": "snapkv", "repair_rows": 64},
            seed=1,
            tools=[ON_CALL],
            metadata={"kind": "talk"},
        ).id
        client.turn(session, [Message.system("Answer shortly.")], generate=False)
        client.turn(session, "Please note that the extension list says Melnor K4821.")
        client.turn(session, SMALL_TALK * 10, generate=False)
        turn = client.turn(session, "Who is on call tonight, and what is their extension?")
        assert turn.tool_calls, "the reference model calls its tool"
        for call in turn.tool_calls:
            client.event(session, "tool_call.started", call.id)
            client.event(session, "tool_call.delta", call.id, delta="looking it up")
            client.event(session, "tool_call.completed", call.id, result='{"person": "Melnor"}')
        client.turn(session, [], wait_for_repairs=True, max_tokens=40)
        return session


@pytest.fixture
def watched(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages; after the test, none of them has complained or asked another origin."""
    complaints: list[str] = []
    origins: set[str] = set()
    contexts = []
    allowed: set[str] = set()

    def note(message: ConsoleMessage) -> None:
        # A refused request is the browser's own line; tests of errors expect these.
        if "Failed to load resource" not in message.text:
            complaints.append(f"{message.type}: {message.text}")

    def ask(request: Request) -> None:
        if not request.url.startswith(("data:", "blob:")):
            origins.add("/".join(request.url.split("/")[:3]))

    def open_page(address: str, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        page.on("console", note)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", ask)
        page.add_init_script(
            "addEventListener('securitypolicyviolation', e => "
            "console.error('violates', e.violatedDirective, e.blockedURI))"
        )
        allowed.add("/".join(address.split("/")[:3]))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert origins <= allowed


@pytest.fixture(scope="session")
def node_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """npm's packages of package-lock.json, in a folder of this run."""
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name, folder)
    subprocess.run(["npm", "ci", "--silent", "--ignore-scripts"], cwd=folder, check=True)
    return folder / "node_modules"


@pytest.fixture(scope="session")
def axe(node_modules: Path) -> str:
    """The source of axe-core."""
    return (node_modules / "axe-core/axe.min.js").read_text(encoding="utf-8")


@pytest.fixture
def check_access(axe: str) -> Callable[[Page], None]:
    """Checks a page with axe-core: no violation of any rule."""

    def check(page: Page) -> None:
        page.evaluate(axe)  # the page's policy does not bind the debugger
        found = page.evaluate(
            "axe.run().then(({violations, passes}) => ({"
            "passes: passes.length, violations: violations.map(({id, nodes}) => "
            "`${id}: ${nodes.map(({html}) => html.slice(0, 120)).join(' | ')}`)}))"
        )
        assert found["passes"] > 10, "axe looked at the page"
        assert found["violations"] == []

    return check
