"""The console's files: their headers, their addresses, and the setting that serves them."""

import re
from pathlib import Path
from typing import Any

import pytest

from gateway.console.mount import HEADERS, STATIC
from gateway.http.settings import GatewaySettings
from kvrecall_server.app.settings import Settings
from services.access.authenticator import AccessPolicy

PAGES = ("/console/", "/console/sessions", "/console/sessions/s_1/repairs", "/console/playground")


@pytest.fixture
def gateway_settings() -> GatewaySettings:
    return GatewaySettings(console=True, console_read_only=True)


class TestFiles:
    @pytest.mark.parametrize("path", PAGES)
    async def test_every_address_of_a_page_has_the_document(self, api: Any, path: str) -> None:
        answer = await api.http.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/html")
        assert answer.content == (STATIC / "index.html").read_bytes()

    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [
            ("GET", "/console/", 200),
            ("GET", "/console", 307),
            ("GET", "/console/assets/app.js", 200),
            ("GET", "/console/settings.json", 200),
            ("GET", "/console/assets/none.js", 404),
            ("GET", "/console/assets/../mount.py", 200),  # the client resolves it: a page's address
            ("GET", "/console/assets/%2e%2e/mount.py", 404),
            ("POST", "/console/settings.json", 405),
        ],
    )
    async def test_every_answer_has_the_strict_headers(
        self, api: Any, method: str, path: str, status: int
    ) -> None:
        answer = await api.http.request(method, path)
        assert answer.status_code == status
        assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS
        assert b"ConsoleHeaders" not in answer.content

    async def test_a_browser_at_the_root_is_shown_it(self, api: Any) -> None:
        accepted = {"Accept": "text/html,*/*;q=0.8"}
        answer = await api.http.get("/", headers=accepted, follow_redirects=True)
        assert (str(answer.url), answer.status_code) == ("http://kvrecall/console/", 200)
        assert (await api.http.get("/")).json()["links"]["console"] == "/console/"

    async def test_the_policy_allows_no_inline_script_no_eval_and_no_other_origin(self) -> None:
        policy = HEADERS["Content-Security-Policy"]
        assert "unsafe" not in policy
        assert not re.search(r"https?:|\*", policy)
        directives = dict(each.strip().split(" ", 1) for each in policy.split(";"))
        assert directives["default-src"] == "'none'"
        assert directives["script-src"] == directives["style-src"] == "'self'"
        assert directives["require-trusted-types-for"] == "'script'"

    async def test_other_answers_are_as_they_were(self, api: Any) -> None:
        answer = await api.http.get("/healthz")
        assert "content-security-policy" not in answer.headers
        assert "cache-control" not in answer.headers

    async def test_the_settings_tell_a_page_what_to_hide(self, api: Any) -> None:
        settings = (await api.http.get("/console/settings.json")).json()
        assert settings["read_only"] is True
        assert re.fullmatch(r"\d+\.\d+\.\d+.*", settings["version"])

    async def test_an_unchanged_file_is_not_sent_again(self, api: Any) -> None:
        first = await api.http.get("/console/assets/app.js")
        again = await api.http.get(
            "/console/assets/app.js", headers={"If-None-Match": first.headers["etag"]}
        )
        assert (again.status_code, again.content) == (304, b"")

    async def test_routes_of_the_api_are_not_the_consoles(self, api: Any) -> None:
        openapi = (await api.http.get("/openapi.json")).json()
        assert not [path for path in openapi["paths"] if "console" in path]


class TestWithKeys:
    @pytest.fixture
    def access_policy(self) -> AccessPolicy:
        return AccessPolicy(open=False)

    async def test_the_files_need_no_key_and_the_api_does(self, api: Any) -> None:
        assert (await api.http.get("/console/")).status_code == 200
        assert (await api.http.get("/console/assets/app.js")).status_code == 200
        assert (await api.http.get("/v1/sessions")).status_code == 401


class TestWithoutIt:
    @pytest.fixture
    def gateway_settings(self) -> GatewaySettings:
        return GatewaySettings()

    async def test_there_is_nothing_under_its_address(self, api: Any) -> None:
        answer = await api.http.get("/console/")
        assert (answer.status_code, answer.json()["code"]) == (404, "unknown_route")


@pytest.mark.parametrize(
    ("host", "setting", "served"),
    [
        ("127.0.0.1", None, True),
        ("::1", None, True),
        ("localhost", None, True),
        ("0.0.0.0", None, False),
        ("10.0.0.5", None, False),
        ("0.0.0.0", True, True),
        ("127.0.0.1", False, False),
    ],
)
def test_it_is_served_on_loopback_and_elsewhere_only_if_asked_to(
    host: str, setting: bool | None, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting is not None:
        monkeypatch.setenv("KVRECALL_GATEWAY__CONSOLE", str(setting).lower())
    settings = Settings(host=host)
    assert settings.gateway.for_listener(settings.host).console is served


def test_no_file_names_another_origin_or_evaluates_a_string() -> None:
    own = [path for path in STATIC.rglob("*.js") if "vendor" not in path.parts]
    assert len(own) > 20
    for path in own:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"https?://", text), path
        assert not re.search(r"innerHTML|dangerously|eval\(|new Function|document\.write", text), (
            path
        )


def test_all_files_are_in_the_package() -> None:
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^"gateway\.console" = \[(.*?)\]', project, re.M)
    assert found is not None
    patterns = re.findall(r'"([^"]+)"', found[1])
    packed = {path for pattern in patterns for path in STATIC.parent.glob(pattern)}
    assert {path for path in STATIC.rglob("*") if path.is_file()} <= packed
