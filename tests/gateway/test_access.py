"""Every route x every kind of wrong key, and what a tenant may learn of another's sessions."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from gateway.http.scopes import get_rule, require_rules
from gateway.observation.identity import get_path
from services.access.authenticator import AccessPolicy
from services.access.keys import digest_key, get_pepper_id, make_key
from services.access.principals import Scope
from services.catalog.api_keys import KeyRecord

PEPPER = b"0123456789abcdef"
USER = {"messages": [{"role": "user", "content": "hello"}]}
# Valid bodies, by the path of the route; an empty object for the others.
BODIES: dict[str, Any] = {
    "/v1/sessions/{session}/turns": USER,
    "/v1/sessions/{session}/events": {"type": "tool_call.started", "call_id": "c1"},
    "/v1/chat/completions": {"model": "m", **USER},
    "/v1/conversations/{conversation}": {"metadata": {"topic": "demo"}},
    "/v1/conversations/{conversation}/items": {"items": USER["messages"]},
}
Call = tuple[str, str, str]
NO_IDS: Mapping[str, str] = {}
MakeKey = Callable[..., Awaitable[str]]


@pytest.fixture
def access_policy() -> AccessPolicy:
    return AccessPolicy(open=False, pepper=PEPPER)


@pytest.fixture
def make(api: Any) -> MakeKey:
    """make(tenant, *scopes, **fields): store a key and return it."""

    async def make_one(tenant: str, *scopes: Scope, **fields: Any) -> str:
        key = make_key()
        digest = digest_key(key, PEPPER)
        record = KeyRecord(
            key.id, digest, get_pepper_id(PEPPER), tenant, "", scopes, time.time(), **fields
        )
        await api.catalog.api_keys.add(record)
        return key.text

    return make_one


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def list_calls(app: Any, ids: Mapping[str, str] = NO_IDS) -> list[Call]:
    """List each method of each route, with the path of the route and one with these parameters.

    Others are "s_none".
    """

    def fill(path: str) -> str:
        return re.sub(r"\{(\w+)[^}]*\}", lambda match: ids.get(match[1], "s_none"), path)

    return [
        (method, get_path(route), fill(get_path(route)))
        for route in app.routes
        for method in sorted(getattr(route, "methods", ()))
        if method != "HEAD"
    ]


async def make_one_of_each(api: Any, headers: dict[str, str]) -> dict[str, str]:
    """Make one of each thing that a route names, and return their ids by the parameter's name."""

    async def post(path: str, body: Any) -> Any:
        answer = await api.http.post(path, json=body, headers=headers)
        assert answer.is_success, answer.text
        return answer.json()

    model = (await api.http.get("/v1/models", headers=headers)).json()["data"][0]["id"]
    conversation = (await post("/v1/conversations", {}))["id"]
    items = f"/v1/conversations/{conversation}/items"
    return {
        "session": (await post("/v1/sessions", {"budget": 64}))["id"],
        "conversation": conversation,
        "item": (await post(items, {"items": USER["messages"]}))["data"][0]["id"],
        "response": (await post("/v1/responses", {"model": model, "input": "hello"}))["id"],
    }


async def send(api: Any, call: Call, headers: dict[str, str]) -> Any:
    method, route, path = call
    body = BODIES.get(route, {}) if method in ("POST", "PUT", "PATCH") else None
    request = asyncio.ensure_future(api.http.request(method, path, json=body, headers=headers))
    while route.endswith("/stream") and not request.done():
        for subscription in tuple(api.service.feed.subscriptions):
            subscription.end()  # it would go on for as long as the client reads
        await asyncio.sleep(0)
    return await request


def check_form(answer: Any) -> None:
    """An error is in the form of its API: a problem, or an error object."""
    members = answer.json()
    if "error" in members:
        assert members["error"]["message"]
    else:
        assert members["status"] == answer.status_code
        assert answer.headers["content-type"] == "application/problem+json"


async def refuse_all(api: Any, headers: dict[str, str], status: int) -> None:
    """Check that all routes but the public ones answer `status`, and say how to authenticate."""
    for call in list_calls(api.app):
        answer = await send(api, call, headers)
        if not get_rule(call[2]).scopes:
            assert answer.status_code == 200, call
            continue
        assert answer.status_code == status, (call, answer.text)
        assert ("WWW-Authenticate" in answer.headers) == (status == 401)
        check_form(answer)


async def test_a_request_without_a_key_reaches_no_route(api: Any) -> None:
    await refuse_all(api, {}, 401)


@pytest.mark.parametrize("key", ["wrong", "kvr-", f"kvr-{'a' * 51}", "", "x" * 5000, "\xff\xfe"])
async def test_a_wrong_key_reaches_no_route(api: Any, key: str) -> None:
    text = f"Bearer {key}".encode("latin-1")
    await refuse_all(api, {"Authorization": text}, 401)  # type: ignore[dict-item]


async def test_the_id_of_a_key_with_another_secret_reaches_no_route(
    api: Any, make: MakeKey
) -> None:
    key = await make("ann", *Scope)
    await refuse_all(api, bearer(key[:12] + make_key().secret), 401)


async def test_an_expired_key_reaches_no_route(api: Any, make: MakeKey) -> None:
    await refuse_all(api, bearer(await make("ann", *Scope, expires_at=time.time() - 1)), 401)


async def test_a_revoked_key_reaches_no_route(api: Any, make: MakeKey) -> None:
    key = await make("ann", *Scope)
    await api.catalog.api_keys.revoke(key[4:12], time.time())
    await refuse_all(api, bearer(key), 401)


async def test_a_key_without_a_scope_reaches_no_route(api: Any, make: MakeKey) -> None:
    await refuse_all(api, bearer(await make("ann")), 403)


async def test_a_key_reaches_the_routes_of_its_scopes_only(api: Any, make: MakeKey) -> None:
    for scope in Scope:
        key = bearer(await make("ann", scope))
        for call in list_calls(api.app):
            rule = get_rule(call[2])
            if rule.scopes:
                answer = await send(api, call, key)
                refused = answer.status_code == 403
                assert refused == (scope not in rule.scopes), (scope, call, answer.text)
                assert answer.status_code != 401
                if refused:
                    assert "lacks the scope" in answer.text


async def test_what_is_another_tenants_is_as_unknown_as_what_is_missing_on_every_route(
    api: Any, make: MakeKey
) -> None:
    own, foreign = bearer(await make("ann", *Scope)), bearer(await make("ben", *Scope))
    ids = await make_one_of_each(api, own)
    missing = {
        name: re.sub(r"(?<=_)\w+", lambda rest: "0" * len(rest[0]), ids[name]) for name in ids
    }
    calls = [
        pair
        for pair in zip(list_calls(api.app, ids), list_calls(api.app, missing), strict=True)
        if "{" in pair[0][1]
    ]
    assert len(calls) >= 20
    for call, other in calls:
        for extra in ({}, {"Idempotency-Key": "k"}, {"X-Kvrecall-Tenant": "ann"}):
            answer = await send(api, call, {**foreign, **extra})
            assert answer.status_code == 404, (call, answer.text)
            unknown = await send(api, other, {**foreign, **extra})
            assert unknown.status_code == 404
            expected = unknown.text
            for name, id in ids.items():
                expected = expected.replace(missing[name], id)
            assert answer.text == expected
            assert set(answer.headers) == set(unknown.headers)
    listed = await api.http.get("/v1/sessions", headers=foreign)
    assert listed.json()["sessions"] == []
    for call, _ in calls:
        if call[0] == "GET" and "{model" not in call[1]:
            assert (await send(api, call, own)).is_success, call


class Recorder:
    """Passes calls on to a part of the catalog and lists them."""

    def __init__(self, part: Any, name: str, calls: list[Any]) -> None:
        self._part = part
        self._name = name
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        called = getattr(self._part, name)

        async def call(*arguments: Any) -> Any:
            self._calls.append((self._name, name, arguments))
            return await called(*arguments)

        return call if callable(called) else called


async def test_another_tenants_session_and_a_missing_one_take_the_same_catalog_calls(
    api: Any, make: MakeKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, foreign = bearer(await make("ann", *Scope)), bearer(await make("ben", *Scope))
    created = await api.http.post("/v1/sessions", json={"budget": 64}, headers=own)
    session, missing = created.json()["id"], f"s_{'0' * 24}"
    await api.http.get("/v1/models", headers=foreign)  # the key is read, and its use is written
    calls: list[Any] = []
    catalog = api.service._catalog  # as the service calls it
    for name in ("sessions", "leases", "turns", "tool_calls", "repairs", "episodes", "idempotency"):
        part = Recorder(getattr(catalog, name), name, calls)
        monkeypatch.setattr(catalog, name, part)
    for call in list_calls(api.app, {"session": session}):
        if "{session}" not in call[1]:
            continue
        for extra in ({}, {"Idempotency-Key": "k"}):
            await send(api, call, {**foreign, **extra})
            first, calls[:] = list(calls), []
            method, route, path = call
            await send(api, (method, route, path.replace(session, missing)), {**foreign, **extra})
            second, calls[:] = list(calls), []
            assert first, call
            assert repr(first) == repr(second).replace(missing, session), call


def test_a_route_without_a_rule_is_no_application(assembled: Any) -> None:
    require_rules(assembled.app.routes)
    assembled.app.add_api_route("/v1/new", lambda: None)
    with pytest.raises(ValueError, match="/v1/new"):
        require_rules(assembled.app.routes)


async def test_a_key_may_be_sent_in_either_header_and_decides_the_tenant(
    api: Any, make: MakeKey
) -> None:
    key = await make("ann", *Scope)
    for headers in (bearer(key), {"x-api-key": key}, {"authorization": f"bearer  {key}"}):
        answer = await api.http.post(
            "/v1/sessions", json={"budget": 64}, headers={**headers, "X-Kvrecall-Tenant": "ben"}
        )
        assert answer.status_code == 201
        session = await api.catalog.sessions.get(answer.json()["id"])
        assert session.settings.tenant == "ann"
    unknown = await api.http.get("/v1/nowhere", headers=bearer(key))
    assert (unknown.status_code, unknown.json()["code"]) == (404, "unknown_route")


class TestSingleKey:
    @pytest.fixture
    def access_policy(self) -> AccessPolicy:
        return AccessPolicy(api_key="one key for all", pepper=PEPPER)

    async def test_it_opens_all_routes_for_the_default_tenant(
        self, api: Any, make: MakeKey
    ) -> None:
        await refuse_all(api, {}, 401)
        await refuse_all(api, bearer("one key for al"), 401)
        headers = {**bearer("one key for all"), "X-Kvrecall-Tenant": "ann"}
        for path in ("/metrics", "/v1/models", "/v1/workers", "/v1/sessions"):
            assert (await api.http.get(path, headers=headers)).status_code == 200
        other = bearer(await make("ann", Scope.INFER))
        assert (await api.http.get("/v1/models", headers=other)).status_code == 200
