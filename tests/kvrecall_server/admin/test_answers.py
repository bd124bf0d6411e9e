"""Responses and conversations go with their session, and are gone on from where it was imported."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.app import create_app
from gateway.http.settings import GatewaySettings
from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.settings.session import SessionSettings
from kvrecall_server.admin.archive.answers import Answers, from_answer_records
from kvrecall_server.admin.archive.record import Record, RecordKind
from kvrecall_server.app.errors import BadSessionFile
from services.service import SessionService

Json = dict[str, Any]
Command = Callable[..., Any]
KIND = {"instructions": "Be kind.", "max_output_tokens": 8, "kvrecall": {"budget": 128, "seed": 7}}


async def call(service: SessionService, method: str, path: str, **body: Any) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(service, GatewaySettings()))
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        answer = await http.request(method, f"/v1{path}", json=body or None)
        assert answer.status_code == 200, answer.text
        return answer


async def ask(service: SessionService, **body: Any) -> httpx.Response:
    members = {"model": service.info.model, **KIND, **body}
    return await call(service, "POST", "/responses", **members)


@pytest.fixture
def talked(tmp_path: Path, running: Any) -> tuple[Path, str, list[Json]]:
    """A directory, its session, and two responses of a conversation that it gave."""

    async def talk() -> tuple[str, list[Json]]:
        async with running(tmp_path / "talked") as service:
            conversation = (await call(service, "POST", "/conversations")).json()["id"]
            texts = ("Hello.", "And now?")
            found = [await ask(service, input=text, conversation=conversation) for text in texts]
            (session,) = {each.headers["kvrecall-session"] for each in found}
            return session, [each.json() for each in found]

    return tmp_path / "talked", *asyncio.run(talk())


@pytest.mark.parametrize("name", [None, "s_other"])
def test_an_imported_session_goes_on_from_its_responses(
    command: Command, talked: Any, tmp_path: Path, running: Any, name: str | None
) -> None:
    data, session, responses = talked
    file, elsewhere = tmp_path / "a.kvs", tmp_path / "elsewhere"
    exported = command("export", session, file, "--data", data)
    assert exported.exit_code == 0, exported.output
    options = () if name is None else ("--as", name)
    imported = command("import", file, "--data", elsewhere, *options)
    assert imported.exit_code == 0, imported.output
    for found in (exported, imported):
        assert "2 responses, 1 conversation" in " ".join(found.output.split())

    async def go_on(data: Path, expected: str) -> tuple[list[Any], list[Json]]:
        async with running(data) as service:
            first, last = responses
            assert (await call(service, "GET", f"/responses/{last['id']}")).json() == last
            # Long before an answer is needed: all that came before is in the session.
            followed = await ask(service, input="More.", previous_response_id=last["id"])
            assert followed.headers["kvrecall-match"] == "continued"
            assert followed.headers["kvrecall-session"] == expected
            again = await ask(service, input="Other.", previous_response_id=followed.json()["id"])
            assert again.headers["kvrecall-session"] == expected
            branch = await ask(service, input="Else?", previous_response_id=first["id"])
            assert branch.headers["kvrecall-match"] == "forked"
            other = await ask(service, input="a", previous_response_id=last["id"], instructions="b")
            assert other.headers["kvrecall-match"] == "built"
            path = f"/conversations/{last['conversation']['id']}/items"
            items = (await call(service, "GET", path)).json()["data"]
            texts = [each.json()["output"][0] for each in (followed, again)]
            return [text["content"] for text in texts], items

    answers = [asyncio.run(go_on(data, session)), asyncio.run(go_on(elsewhere, name or session))]
    without_ids = [
        ([[part["text"] for part in text] for text in texts], items) for texts, items in answers
    ]
    assert without_ids[0] == without_ids[1]
    assert len(answers[0][1]) == 4


def test_what_a_catalog_has_already_stays_as_it_is(
    command: Command, talked: Any, tmp_path: Path, running: Any
) -> None:
    data, session, responses = talked
    file = tmp_path / "a.kvs"
    command("export", session, file, "--data", data)
    imported = command("import", file, "--data", data, "--as", "s_copy")
    assert imported.exit_code == 0, imported.output
    assert "response" not in imported.output

    async def go_on() -> str:
        async with running(data) as service:
            answer = await ask(service, input="b", previous_response_id=responses[-1]["id"])
            return answer.headers["kvrecall-session"]

    assert asyncio.run(go_on()) == session


def test_a_file_may_have_no_responses_and_ones_of_another_form_are_refused() -> None:
    settings = SessionSettings(budget=64, repair_rows=0, method="snapkv")
    session = Session("s", 1, settings, 1.0, 1.0, 0, MemoryReport())
    assert from_answer_records([Record(RecordKind.HEADER, {})], session) == Answers()
    with pytest.raises(BadSessionFile, match="does not know"):
        from_answer_records([Record(RecordKind.RESPONSE, {"id": 3})], session)
