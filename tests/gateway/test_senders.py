"""The log names who sent a turn: the API, the key's id and the program, never the key."""

from typing import Any

import pytest

from services.access.authenticator import AccessPolicy

SECRET = "a-secret-that-opens-everything"
USER = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
HEADERS = {"Authorization": f"Bearer {SECRET}", "User-Agent": "claude-cli/2.0.1 (external, cli)"}
SENT = [
    ("rest", "/v1/sessions/{session}/turns", USER),
    ("openai", "/v1/chat/completions", {"model": "scripted", **USER}),
    ("openai", "/v1/responses", {"model": "scripted", "input": "hello"}),
    ("anthropic", "/v1/messages", {"model": "scripted", **USER}),
]


@pytest.fixture
def access_policy() -> AccessPolicy:
    return AccessPolicy(open=False, api_key=SECRET)


@pytest.mark.parametrize(("api_name", "path", "body"), SENT)
async def test_a_turn_says_through_which_api_who_sent_it(
    api: Any, api_name: str, path: str, body: dict[str, Any]
) -> None:
    api.http.headers.update(HEADERS)
    session = await api.session() if "{session}" in path else ""
    answer = await api.http.post(path.format(session=session), json=body)
    assert answer.status_code == 200, answer.text
    (found,) = (await api.http.get("/v1/sessions")).json()["sessions"]
    log = await api.http.get(f"/v1/sessions/{found['id']}/turns")
    (turn,) = log.json()["turns"]
    assert turn["sender"] == {"api": api_name, "key": "api-key", "client": "claude-cli/2.0.1"}
    assert SECRET not in log.text


async def test_what_is_not_known_of_a_sender_is_null(api: Any) -> None:
    api.http.headers.update({"Authorization": f"Bearer {SECRET}", "User-Agent": "<script>"})
    session = await api.session()
    await api.turn(session)
    (turn,) = (await api.http.get(f"/v1/sessions/{session}/turns")).json()["turns"]
    assert turn["sender"] == {"api": "rest", "key": "api-key", "client": None}
