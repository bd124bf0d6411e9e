"""`kvrecall sessions`: what a running service has."""

import json
from collections.abc import Callable
from typing import Any

from kvrecall.client import KvrecallClient


def test_sessions_are_listed_with_what_they_hold(
    command: Callable[..., Any], client: KvrecallClient, server: str
) -> None:
    with client.session(
        budget=64, research={"repair_rows": 0}, metadata={"name": "holiday"}
    ) as session:
        session.say("Hello.", max_tokens=4)
        listed = json.loads(command("sessions", "--url", server, "--json").output)
        row = next(each for each in listed if each["id"] == session.id)
        found = session.get()
        assert found.memory is not None
        assert (row["tokens"], row["active_rows"]) == (found.length, found.memory.active_rows)
        assert (row["turns"], row["state"], row["name"]) == (1, found.state, "holiday")
        text = command("sessions", "--url", server).output
    (line,) = (each for each in text.splitlines() if session.id in each)
    assert line.endswith("holiday")
    assert " ago " in line


def test_the_limit_holds_over_pages(
    command: Callable[..., Any], client: KvrecallClient, server: str
) -> None:
    made = [client.create_session(budget=64, research={"repair_rows": 0}).id for _ in range(3)]
    listed = json.loads(command("sessions", "--url", server, "--limit", 2, "--json").output)
    assert len(listed) == 2
    for each in made:
        client.delete_session(each)


def test_the_environment_names_the_server(
    command: Callable[..., Any], server: str, monkeypatch: Any
) -> None:
    monkeypatch.setenv("KVRECALL_URL", server)
    assert command("sessions").exit_code == 0
    monkeypatch.setenv("KVRECALL_URL", "http://127.0.0.1:1")
    refused = command("sessions")
    assert (refused.exit_code, "start one with `kvrecall serve`" in refused.output) == (2, True)
