"""Bodies are parsed once; large ones on a thread, in turns of their tenants; none has endless values."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from starlette.types import Scope

from gateway.http.bodies import parsing
from gateway.http.bodies.parsing import BodyParser, ParsedRequest, parse_strictly
from gateway.http.settings import GatewaySettings
from kvrecall.sandbox.tenant_threads import TenantThreads
from tests.gateway.conftest import Api

LARGE = 65 << 10
JSON = {"content-type": "application/json"}


def write_chat(**members: Any) -> bytes:
    body = {"model": "stub", "messages": [{"role": "user", "content": "hello"}], **members}
    return json.dumps(body).encode()


def make_scope(kind: str = "application/json") -> Scope:
    return {"type": "http", "headers": [(b"content-type", kind.encode())]}


@pytest.fixture
def threads() -> Iterator[TenantThreads]:
    made = TenantThreads(1, 4, "bodies")
    yield made
    made.close()


async def test_a_large_body_is_parsed_on_a_thread_and_a_small_one_at_once(
    threads: TenantThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = []

    def parse(content: bytes, mends: bool) -> parsing.ParsedBody:
        places.append(threading.current_thread().name)
        return parse_strictly(content, mends)

    monkeypatch.setattr(parsing, "parse_strictly", parse)
    parser = BodyParser(False, threads)
    await parser.parse(make_scope(), "ann", b"{}")
    await parser.parse(make_scope(), "ann", json.dumps("x" * LARGE).encode())
    assert places == [threading.current_thread().name, "bodies-0"]


async def test_a_tenants_large_bodies_let_anothers_through(threads: TenantThreads) -> None:
    parser = BodyParser(False, threads)
    gate = threading.Event()
    ended: list[str] = []
    held = threads.submit("mallory", gate.wait)

    async def parse(tenant: str) -> None:
        await parser.parse(make_scope(), tenant, json.dumps(["x"] * LARGE).encode())
        ended.append(tenant)

    flood = [asyncio.create_task(parse("mallory")) for _ in range(3)]
    await asyncio.sleep(0)
    other = asyncio.create_task(parse("ann"))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(other, *flood)
    assert held.result()
    assert ended.index("ann") <= 1, "behind one of mallory's at most"


async def test_a_body_is_parsed_once() -> None:
    scope = make_scope()
    await BodyParser(False, TenantThreads(1, 1, "bodies")).parse(scope, "", b'{"a": 1}')

    async def receive() -> Any:
        raise AssertionError("what was parsed is not read again")

    assert await ParsedRequest(scope, receive).json() == {"a": 1}


class TestRoutes:
    """Routes take the value that was parsed when the body was received."""

    @pytest.fixture
    def gateway_settings(self) -> GatewaySettings:
        return GatewaySettings()

    @pytest.mark.parametrize(
        "path",
        ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/v1/sessions"],
    )
    async def test_no_route_parses_its_body_again(
        self, api: Api, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(text: str) -> None:
            raise AssertionError("it was parsed when it was received")

        monkeypatch.setattr("starlette.requests.json.loads", refuse)
        body = write_chat(padding="x" * LARGE)
        response = await api.http.post(path, content=body, headers=JSON)
        assert response.status_code not in (413, 500), "it was read"
        assert "parsing the body" not in response.text

    async def test_what_is_no_json_by_its_type_is_not_parsed(
        self, api: Api, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(content: bytes, mends: bool) -> None:
            raise AssertionError("no route reads it")

        monkeypatch.setattr(parsing, "parse_strictly", refuse)
        response = await api.http.post("/v1/sessions", content=b'{"budget": 64}')
        assert response.status_code == 422
        assert "content-type ''" in response.json()["detail"]


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '"\\ud800"', "{"])
def test_what_nothing_can_represent_is_no_json(text: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        parse_strictly(text.encode(), mends=False)


@pytest.mark.parametrize("number", ["1e400", "-2E+309", "9" * 310 + ".0", "0.1e0000400"])
@pytest.mark.parametrize("mends", [True, False])
def test_a_number_beyond_a_double_is_refused(number: str, mends: bool) -> None:
    body = f'{{"tools": [{{"maximum": {number}}}]}}'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        parse_strictly(body, mends)
    assert parse_strictly(body.replace(number.encode(), b'"1e400"'), mends).value
    for bare in (number, f" {number}", f"[1,{number}]"):
        with pytest.raises(ValueError, match="not JSON compliant"):
            parse_strictly(bare.encode(), mends)
    assert parse_strictly(b"[1e300, 1e-400, " + b"9" * 310 + b"]", mends).value[0] == 1e300


def test_lone_surrogates_are_replaced_where_the_operator_wants_it() -> None:
    parsed = parse_strictly(b'["\\ud800"]', mends=True)
    assert parsed.value == ["\ufffd"]
    assert parsed.mended


class TestValues:
    """A body of more values than may be is refused while it is received."""

    @pytest.fixture
    def gateway_settings(self) -> GatewaySettings:
        return GatewaySettings(max_body_values=1000)

    @pytest.mark.parametrize("value", ["1", "{}", "[]", '""'])
    async def test_a_body_of_too_many_values_is_refused(self, api: Api, value: str) -> None:
        values = f"[{','.join([value] * 1001)}]"
        body = b'{"z": ' + values.encode() + b"}"
        response = await api.http.post("/v1/sessions", content=body)
        assert response.status_code == 413
        assert "1000 values" in response.json()["detail"]

    async def test_most_of_a_body_that_is_refused_is_not_received(self, served: Api) -> None:
        sent = 0

        async def send() -> Any:
            nonlocal sent
            for _ in range(1000):
                sent += 1
                yield b"[],[]," * 2000
                await asyncio.sleep(0)

        with suppress(httpx.TransportError):  # the connection is cut under the client
            response = await served.http.post("/v1/sessions", content=send())
            assert response.status_code == 413
        assert sent < 1000

    async def test_a_long_text_is_one_value(self, api: Api) -> None:
        response = await api.http.post("/v1/sessions", json={"note": "x" * (1 << 20)})
        assert response.status_code == 422, "it was read: there is no such member"
