"""A conversation of three windows over a real server, which is killed on the way."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvrecall.client import ServiceProblem
from reference import MODEL_PATH
from reference.chat import TOPICS, small_talk
from reference.conversation import SYSTEM_LINES
from reference.words import draw_names

WINDOW = 1024
NAMES = draw_names(random.Random(1), "held_out")[:4]
FACTS = dict(zip(NAMES, ("D2815", "U6043", "K9370", "V5126"), strict=True))
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


def chat(seed: int) -> list[Json]:
    """Some 900 tokens of small talk, recorded."""
    rng, said = random.Random(seed), list[str]()
    messages: list[Json] = []
    for _ in range(24):
        user, reply = small_talk(rng, rng.choice(sorted(TOPICS)), said)
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
    return messages


def test_a_conversation_of_three_windows_goes_on_through_a_crash_and_remembers_its_beginning(
    new_server: Callable[..., Any], short_model: Path, say: Any
) -> None:
    server = new_server(KVRECALL_MODEL=str(short_model))
    server.start()
    served = server.http.get("/v1/worker").json()
    assert (served["max_context"], served["max_session_tokens"]) == (WINDOW, None)
    session = server.own.create_session(seed=7).id
    twin = server.own.create_session(seed=7, cache_salt="another").id
    for each in (session, twin):
        server.own.turn(each, [{"role": "system", "content": SYSTEM_LINES[0]}], generate=False)
    for number, name in enumerate(FACTS):
        for each in (session, twin):
            server.own.turn(each, state(name), generate=False)
            server.own.turn(each, chat(number), generate=False)
        if number == 2:
            server.kill()
            server.start()
    assert server.own.memory(session).length > 3 * WINDOW
    right = []
    for name, value in FACTS.items():
        question = [say.user(f"What is {name}'s extension?")]
        answers = [server.own.turn(each, question, max_tokens=24) for each in (session, twin)]
        assert answers[0].text == answers[1].text
        right.append(value in answers[0].text)
    assert right[0]
    assert sum(right) >= 3
    question = [say.user(f"What is {NAMES[0]}'s extension?")]
    again = server.own.turn(server.own.fork(session, 9).id, question, max_tokens=24)
    assert FACTS[NAMES[0]] in again.text


def test_sessions_end_where_the_operator_says_and_without_recall_at_the_window(
    new_server: Callable[..., Any], short_model: Path, say: Any
) -> None:
    server = new_server(
        KVRECALL_MODEL=str(short_model), KVRECALL_WORKER__MAX_SESSION_TOKENS=str(2 * WINDOW)
    )
    server.start()
    assert server.http.get("/v1/worker").json()["max_session_tokens"] == 2 * WINDOW
    long = [say.user("hello " * 500)]
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
