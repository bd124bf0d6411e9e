"""Sessions of one memory over a real server: what is said in one is known in the others."""

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from reference.chat import TOPICS, small_talk
from reference.conversation import SYSTEM_LINES
from reference.words import draw_names

NAMES = draw_names(random.Random(3), "held_out")[:3]
FACTS = dict(zip(NAMES, ("D2815", "U6043", "K9370"), strict=True))
SYSTEM = {"role": "system", "content": SYSTEM_LINES[0]}
Json = dict[str, Any]


@pytest.fixture(scope="module")
def own_server(new_server: Callable[..., Any]) -> Iterator[Any]:
    """A server of this module, which tests may kill."""
    server = new_server()
    server.start()
    yield server
    server.kill()


def state(name: str) -> list[Json]:
    """Small talk, and in the middle a fact, with a recorded answer that repeats it."""
    rng, said = random.Random(name), list[str]()
    fact = f"the extension list says {name} {FACTS[name]}."
    messages: list[Json] = [SYSTEM]
    for number in range(8):
        user, reply = small_talk(rng, rng.choice(sorted(TOPICS)), said)
        if number == 4:
            user, reply = f"Please note that {fact}", f"Noted, {fact}"
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
    return messages


def hold(server: Any, memory: str) -> dict[str, str]:
    """Hold a session for each fact, turn by turn; returns their ids by the names."""
    ids = {}
    for name in FACTS:
        session = ids[name] = server.own.create_session(remember=memory, seed=7).id
        said = state(name)
        server.own.turn(session, said[:3], generate=False)
        for first in range(3, len(said), 2):
            server.own.turn(session, said[first : first + 2], generate=False)
    return ids


def ask(server: Any, name: str, **settings: Any) -> Any:
    """Ask for a fact in a new session, which is deleted: nothing remembers what it says."""
    session = server.own.create_session(seed=7, **settings).id
    question = {"role": "user", "content": f"What is {name}'s extension?"}
    turn = server.own.turn(session, [SYSTEM, question], max_tokens=24)
    server.own.delete_session(session)
    return turn


def wait_until_known(server: Any, say: SimpleNamespace, memory: str, name: str) -> None:
    """Wait until the exchange that states a fact is embedded: a question brings it back."""
    say.until(
        lambda: FACTS[name] in ask(server, name, remember=memory).text, f"what was said of {name}"
    )


def test_what_was_said_in_one_session_is_known_in_a_new_one(
    own_server: Any, say: SimpleNamespace
) -> None:
    ids = hold(own_server, "ann")
    for name, session in ids.items():
        wait_until_known(own_server, say, "ann", name)
        turn = ask(own_server, name, remember="ann")
        assert session in turn.remembered.sessions
        assert turn.remembered.passages == 5
        # But for the ends of sessions, which have no rows yet, no text of it is prefilled.
        assert turn.remembered.prefilled_tokens < turn.remembered.tokens / 2
        assert turn.usage.prompt_tokens == ask(own_server, name).usage.prompt_tokens
    for name, value in FACTS.items():
        for stranger in ({}, {"remember": "ben"}, {"remember": "ann", "cache_salt": "other"}):
            turn = ask(own_server, name, **stranger)
            assert value not in turn.text
            assert turn.remembered is None


def test_a_deleted_session_is_forgotten_at_once(own_server: Any, say: SimpleNamespace) -> None:
    ids = hold(own_server, "cleo")
    kept, dropped, _ = FACTS
    for name in FACTS:
        wait_until_known(own_server, say, "cleo", name)
    own_server.own.delete_session(ids[dropped])
    own_server.own.delete_session(ids[kept])
    for name in (dropped, kept):
        assert FACTS[name] not in ask(own_server, name, remember="cleo").text


def test_a_memory_outlives_its_server(own_server: Any, say: SimpleNamespace) -> None:
    hold(own_server, "dora")
    for name in FACTS:
        wait_until_known(own_server, say, "dora", name)
    own_server.kill()
    own_server.start()
    for name, value in FACTS.items():
        assert value in ask(own_server, name, remember="dora").text


def test_a_chat_without_a_session_of_its_own_has_a_memory_by_its_request(
    own_server: Any, say: SimpleNamespace
) -> None:
    hold(own_server, "eve")
    for name, value in FACTS.items():
        wait_until_known(own_server, say, "eve", name)
        body = {
            "model": own_server.http.get("/v1/models").json()["data"][0]["id"],
            "messages": [SYSTEM, {"role": "user", "content": f"What is {name}'s extension?"}],
            "max_tokens": 24,
            "temperature": 0,
        }
        for options in (
            {"json": body | {"kvrecall": {"remember": "eve"}}},
            {"json": body, "headers": {"kvrecall-remember": "eve"}},
        ):
            answer = own_server.http.post("/v1/chat/completions", **options)
            assert value in answer.json()["choices"][0]["message"]["content"]
            own_server.own.delete_session(answer.headers["kvrecall-session"])
