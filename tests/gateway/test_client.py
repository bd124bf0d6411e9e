"""The typed client against the real front door."""

import pytest

from kvrecall.client.client import KvrecallClient, KvrecallError, StreamEvent


@pytest.fixture
def client(live_url: str):
    with KvrecallClient(live_url) as client:
        yield client


def test_a_session_lives_and_dies(client: KvrecallClient) -> None:
    session = client.create_session(budget=64, metadata={"a": "b"})
    assert client.get(session["id"]) == session
    assert session in client.list(limit=1)["sessions"]
    assert (
        client.turn(session["id"], [{"role": "user", "content": "hi"}])["message"]["content"]
        == "ok"
    )
    assert client.memory(session["id"])["length"] == 3
    assert client.episodes(session["id"])["episodes"] == []
    assert client.ready()
    assert client.worker()["model"] == "scripted"
    assert [method["name"] for method in client.methods()["methods"]] == [
        "snapkv",
        "full",
        "epicache",
    ]
    assert client.repairs(session["id"], limit=3) == {"session": session["id"], "repairs": []}
    client.delete(session["id"])
    with pytest.raises(KvrecallError) as caught:
        client.get(session["id"])
    assert (caught.value.status, caught.value.code) == (404, "unknown_session")
    assert caught.value.members["session"] == session["id"]


def test_a_turn_can_be_followed(client: KvrecallClient) -> None:
    session = client.create_session()["id"]
    events = list(client.turn_stream(session, [{"role": "user", "content": "hi"}], key="k"))
    assert events[0] == StreamEvent("token", {"text": "ok "})
    assert events[-1].event == "done"
    again = list(client.turn_stream(session, [{"role": "user", "content": "hi"}], key="k"))
    assert again[-1] == events[-1]


def test_a_pause_is_resumed_by_an_event(client: KvrecallClient) -> None:
    session = client.create_session()["id"]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    recorded = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    client.turn(session, recorded, generate=False)
    client.event(session, "tool_call.started", "c1", arguments='{"n": 1}')
    client.event(session, "tool_call.delta", "c1", delta="7", index=0)
    assert client.event(session, "tool_call.completed", "c1", result="7")["outstanding"] == []
    assert client.turn(session, [], wait_for_repairs=True, repair=True)["turn"] == 2
    triggers = [repair["trigger"] for repair in client.repairs(session)["repairs"]]
    assert triggers[:2] == ["turn", "tool_result"]
    assert set(triggers[2:]) == {"tool_call"}


def test_refusals_and_missing_servers_are_errors(client: KvrecallClient) -> None:
    session = client.create_session()["id"]
    with pytest.raises(KvrecallError, match="empty_turn"):
        list(client.turn_stream(session, []))
    with KvrecallClient("http://127.0.0.1:1") as nobody:
        assert not nobody.ready()
        with pytest.raises(KvrecallError) as caught:
            nobody.list()
        assert caught.value.code == "connection_failed"
