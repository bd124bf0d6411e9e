"""A conversation of three windows over a real server, which is killed on the way."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvrecall.client import ServiceProblem
from reference import MODEL_PATH

WINDOW = 1024
FACTS = {"Toreva": "K1010", "Quilby": "K2020", "Sandor": "K3030", "Verity": "K5050"}
Json = dict[str, Any]


@pytest.fixture(scope="module")
def short_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference model with a context of 1,024 tokens."""
    folder = tmp_path_factory.mktemp("model") / "short"
    shutil.copytree(MODEL_PATH, folder)
    config = folder / "config.json"
    changed = json.loads(config.read_text(encoding="utf-8")) | {"max_position_embeddings": WINDOW}
    config.write_text(json.dumps(changed), encoding="utf-8")
    return folder


def state(name: str) -> list[Json]:
    """A fact, and a recorded answer that repeats it."""
    said = f"the extension list says {name} {FACTS[name]}."
    return [
        {"role": "user", "content": f"Please note that {said}"},
        {"role": "assistant", "content": f"Noted, {said}"},
    ]


def test_a_conversation_of_three_windows_goes_on_through_a_crash_and_remembers_its_beginning(
    new_server: Callable[..., Any], short_model: Path, say: Any
) -> None:
    server = new_server(KVRECALL_MODEL=str(short_model))
    server.start()
    served = server.http.get("/v1/worker").json()
    assert (served["max_context"], served["max_session_tokens"]) == (WINDOW, None)
    session = server.own.create_session(seed=7).id
    twin = server.own.create_session(seed=7, cache_salt="another").id
    chat = [say.user(say.chatter(5, 1)), {"role": "assistant", "content": say.chatter(6, 20)}]
    for name in FACTS:
        for each in (session, twin):
            server.own.turn(each, state(name), generate=False)
            server.own.turn(each, chat * 3, generate=False)
        if name == "Sandor":
            server.kill()
            server.start()
    assert server.own.memory(session).length > 3 * WINDOW
    for name, value in FACTS.items():
        question = [say.user(f"What is {name}'s extension?")]
        answers = [server.own.turn(each, question, max_tokens=24) for each in (session, twin)]
        assert answers[0].text == answers[1].text
        assert value in answers[0].text
    fork = server.own.fork(session, 6).id
    again = server.own.turn(fork, [say.user("What is Toreva's extension?")], max_tokens=24)
    assert FACTS["Toreva"] in again.text


def test_sessions_end_where_the_operator_says_and_without_recall_at_the_window(
    new_server: Callable[..., Any], short_model: Path, say: Any
) -> None:
    server = new_server(
        KVRECALL_MODEL=str(short_model), KVRECALL_WORKER__MAX_SESSION_TOKENS=str(2 * WINDOW)
    )
    server.start()
    assert server.http.get("/v1/worker").json()["max_session_tokens"] == 2 * WINDOW
    long = [say.user("hello " * 1200)]
    recalls = server.own.create_session(seed=7).id
    bounded = server.own.create_session(seed=7, research={"method": "snapkv"}).id
    server.own.turn(recalls, long, generate=False)
    for session, said in (
        (recalls, "max_session_tokens of this worker is 2048"),
        (bounded, "recall"),
    ):
        with pytest.raises(ServiceProblem, match=said) as refused:
            server.own.turn(session, long, generate=False)
        assert (refused.value.status, refused.value.code) == (413, "turn_too_long")
