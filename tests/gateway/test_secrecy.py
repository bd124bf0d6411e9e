"""Keys and message text, sent in right and in wrong places: no log, metric or error has them."""

import io
import logging
import sys
import time
from typing import Any

import pytest

from kvrecall_server.app.logs import describe_error, format_error, set_up_logs
from kvrecall_server.app.settings import LogFormat
from services.access.authenticator import AccessPolicy
from services.access.keys import digest_key, get_pepper_id, make_key
from services.access.principals import Scope
from services.catalog.api_keys import KeyRecord

PEPPER = b"0123456789abcdef"
TEXT = "zebra quartz falconry"
# A part of the text that would give it away.
WORD = "quartz"
USER = {"role": "user", "content": TEXT}

Headers = dict[str, str]


@pytest.fixture
def access_policy() -> AccessPolicy:
    return AccessPolicy(open=False, pepper=PEPPER)


def capture_log(form: LogFormat, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Begin to collect what a serving process writes to its standard error."""
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    set_up_logs(form)
    return written


async def store_key(catalog: Any, key: Any) -> None:
    """Store a key of the tenant ann, with all scopes."""
    await catalog.api_keys.add(
        KeyRecord(
            key.id,
            digest_key(key, PEPPER),
            get_pepper_id(PEPPER),
            "ann",
            "",
            tuple(Scope),
            time.time(),
        )
    )


async def send_right(served: Any, own: Headers) -> str:
    """Create a session and send it text, through both APIs; returns its path."""
    post = served.http.post
    created = await post(
        "/v1/sessions",
        json={"budget": 64, "metadata": {"note": TEXT}, "cache_salt": TEXT},
        headers=own,
    )
    session = f"/v1/sessions/{created.json()['id']}"
    right = [
        created,
        await post(f"{session}/turns", json={"messages": [USER]}, headers=own),
        await post(
            "/v1/chat/completions",
            json={"model": served.service.info.model, "messages": [USER], "cache_salt": TEXT},
            headers=own,
        ),
    ]
    assert [each.is_success for each in right] == [True] * 3, [each.text for each in right]
    return session


async def send_wrong(served: Any, own: Headers, session: str, key: str, stranger: str) -> list[Any]:
    """Send a key and text in all wrong places; returns the responses."""
    post, get = served.http.post, served.http.get
    return [
        await get("/v1/models", headers={"Authorization": f"Bearer {stranger}"}),
        await get("/v1/models", headers={"x-api-key": stranger}),
        await get("/v1/models", headers={"Authorization": f"Basic {stranger}"}),
        await get(f"/v1/sessions?cursor={key}", headers=own),
        await get(f"/v1/sessions/{key}", headers=own),
        await get(f"/v1/{key}", headers=own),
        await get(f"/{key}/{TEXT}"),
        await get(f"/v1/models/{key}", headers=own),
        await post(f"{session}/turns", json={"messages": [{**USER, "role": key}]}, headers=own),
        await post(
            f"{session}/turns", json={"messages": [{"role": "user"}], "x": TEXT}, headers=own
        ),
        await post(f"{session}/turns", json={"messages": TEXT}, headers=own),
        await post(f"{session}/turns", content=f'{{"messages": "{TEXT}', headers=own),
        await post(f"{session}/events", json={"type": TEXT, "call_id": key}, headers=own),
        await post(
            f"{session}/events",
            json={"type": "tool_call.completed", "call_id": "c", "result": TEXT},
            headers=own,
        ),
        await post(f"{session}/move", json={"worker": key}, headers=own),
        await post("/v1/sessions", json={"cache_salt": TEXT * 20}, headers=own),
        await post(
            "/v1/chat/completions",
            json={"model": key, "messages": [USER], "stream": TEXT},
            headers=own,
        ),
        await get("/v1/models", headers={**own, "X-Request-ID": key, "Idempotency-Key": TEXT}),
    ]


@pytest.mark.parametrize("form", ["json", "console"])
async def test_keys_and_texts_reach_no_log_metric_or_error(
    served: Any, form: LogFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = capture_log(form, monkeypatch)
    key, stranger = make_key(), make_key()
    await store_key(served.catalog, key)
    own = {"Authorization": f"Bearer {key.text}"}
    session = await send_right(served, own)
    errors = await send_wrong(served, own, session, key.text, stranger.text)

    def fail(*_: Any) -> None:
        raise ValueError(f"cannot use {TEXT} of {key.text}")

    monkeypatch.setattr(served.service, "turn", fail)
    errors.append(
        await served.http.post(f"{session}/turns", json={"messages": [USER]}, headers=own)
    )
    assert errors[-1].status_code == 500
    logging.getLogger("library").warning("refused %s", key.text)
    metrics = await served.http.get("/metrics", headers=own)
    assert metrics.status_code == 200
    logged = log.getvalue()
    assert logged.count("/v1/sessions/") > 5
    assert "ValueError" in logged
    for place in (logged, metrics.text, *(each.text for each in errors)):
        for secret in (key.secret, stranger.secret, key.secret[:12], WORD):
            assert secret not in place, place


def test_an_errors_type_and_frames_are_logged_and_its_values_are_not() -> None:
    try:
        try:
            {"": 1}[TEXT]
        except KeyError as error:
            raise RuntimeError("out of memory") from error
    except RuntimeError:
        text = format_error(sys.exc_info())
    assert "RuntimeError: out of memory" in text
    assert "KeyError" in text
    assert "test_secrecy.py" in text
    assert WORD not in text
    group = ExceptionGroup("two", [ValueError(TEXT), OSError("disk")])
    assert describe_error(group).count("\n") == 2
    assert WORD not in describe_error(group)
