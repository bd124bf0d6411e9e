"""Conversations: a whole history finds the session that holds it, and nothing is computed twice."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrecall.domain.errors import WorkerLost
from kvrecall.domain.events import TurnFinished
from kvrecall.domain.messages import Message, Sampling
from kvrecall.domain.page_ids import count_common
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.settings.session import PAUSE_TRIGGERS, RepairTrigger
from kvrecall.domain.turn_request import TurnRequest
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.testing._stub_values import PAGE_TOKENS
from services.catalog.records import IdempotencyKey
from services.conversations.continuation import Conversation

SETTINGS = CreateSession(budget=64, repair_rows=8, seed=1)
TURN = TurnRequest((), sampling=Sampling(50))
SYSTEM = Message("system", "you help people")


def user(text: str) -> Message:
    return Message("user", text)


def answer(text: str) -> Message:
    return Message("assistant", text)


async def ask(harness: Any, *messages: Message, **changes: Any) -> tuple[str, str, Any]:
    """Send a whole history; returns how its session was found, the session, and the outcome."""
    conversation = Conversation(messages, SETTINGS, TURN)
    found = await harness.service.conversations.turn(replace(conversation, **changes))
    async for progress in found.stream:
        if isinstance(progress, TurnFinished):
            return found.match, found.session, progress.outcome
    raise AssertionError("no outcome")


async def said_in(harness: Any, session: str) -> list[Message]:
    """All messages of a session's turns, answers included."""
    turns = await harness.service.turns(session, 0, 1000)
    return [
        message
        for turn in turns
        for message in (*turn.messages, turn.outcome.message)
        if message is not None
    ]


async def test_a_history_goes_on_in_the_session_that_holds_it(harness) -> None:
    harness.worker.script = ["hi there", "fine thanks", "bye"]
    history = [SYSTEM, user("hello")]
    match, session, outcome = await ask(harness, *history)
    assert (match, outcome.message.content) == ("built", "hi there")
    for text in ("how are you", "goodbye"):
        history += [outcome.message, user(text)]
        match, again, outcome = await ask(harness, *history)
        assert (match, again) == ("continued", session)
        assert outcome.prompt_tokens == 1 + len(text.split()), "the role, and what is new"
    assert await harness.catalog.sessions.get_ids() == [session]


async def test_an_edited_history_goes_on_in_a_fork_at_the_place_before(harness) -> None:
    harness.worker.script = ["one", "two", "three", "other"]
    _, session, outcome = await ask(harness, user("a"))
    said = [user("a"), outcome.message]
    for text in ("b", "c"):
        _, _, outcome = await ask(harness, *said, user(text))
        said += [user(text), outcome.message]
    match, fork, outcome = await ask(harness, *said[:4], user("another c"))
    assert (match, outcome.turn, outcome.message.content) == ("forked", 3, "other")
    assert fork != session
    assert (await harness.service.get(session))[0].turns == 3
    match, again, _ = await ask(harness, *said[:4], user("another c"), outcome.message, user("d"))
    assert (match, again) == ("continued", fork)


async def test_a_history_that_no_session_holds_is_appended_up_to_its_last_answer(harness) -> None:
    said = [SYSTEM, user("a"), answer("one"), user("b"), answer("two")]
    match, session, outcome = await ask(harness, *said, user("c"))
    assert (match, outcome.turn) == ("built", 2)
    assert outcome.prompt_tokens == 2
    match, fork, outcome = await ask(harness, *said, user("another c"))
    assert (match, outcome.turn) == ("forked", 2)
    assert fork != session


@pytest.mark.parametrize(
    ("answers", "ends"),
    [
        (1, [1]),
        (100, [100]),
        (1000, [256, 512, 768, 1000]),
    ],
)
async def test_an_unknown_history_is_few_turns(
    harness, monkeypatch: pytest.MonkeyPatch, answers: int, ends: list[int]
) -> None:
    """Each is one claim, one job of a worker and one commit, also of those that one turn does not hold."""
    said = [
        message for turn in range(answers) for message in (user(f"u{turn}"), answer(f"a{turn}"))
    ]
    commits = []
    commit = harness.catalog.turns.commit

    async def count(*args: Any) -> Any:
        commits.append(args[0].turn.number)
        return await commit(*args)

    monkeypatch.setattr(harness.catalog.turns, "commit", count)
    match, session, outcome = await ask(harness, *said, user("next"))
    assert (match, outcome.turn) == ("built", len(ends) + 1)
    assert commits == list(range(1, len(ends) + 2))
    assert await said_in(harness, session) == [*said, user("next"), outcome.message]
    turns = await harness.service.turns(session, 0, 100)
    assert [turn.messages[-1].content for turn in turns[:-1]] == [f"a{end - 1}" for end in ends]


async def test_no_turn_of_an_unknown_history_has_more_bytes_than_one_may(harness) -> None:
    most = harness.service.limits.max_turn_bytes
    said = []
    for turn in range(12):
        said += [user(f"u{turn}"), answer("a" * (most // 3))]
    _, session, outcome = await ask(harness, *said, user("next"))
    turns = await harness.service.turns(session, 0, 100)
    sizes = [sum(message.size for message in turn.messages) for turn in turns]
    assert max(sizes) <= most
    assert len(turns) == 6 + 1, "two answers fit in a turn"
    assert await said_in(harness, session) == [*said, user("next"), outcome.message]


@pytest.mark.parametrize("back", [1, 2, 3, 7, 20, 60])
async def test_an_edit_of_a_built_history_takes_all_whole_pages_before_it(
    harness, back: int
) -> None:
    said = [message for turn in range(100) for message in (user(f"u{turn}"), answer(f"a{turn}"))]
    _, first, _ = await ask(harness, *said, user("next"))
    edited = 2 * (100 - back)
    messages = (*said[:edited], user("other"), *said[edited + 1 :], user("next"))
    match, session, _ = await ask(harness, *messages)
    assert match == "built"
    words = 2 * edited + 1  # each message is its role and a word
    pages = [await harness.get_pages(each) for each in (first, session)]
    assert count_common(*pages) == words // PAGE_TOKENS


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": replace(SETTINGS, tenant="ann")},
        {"settings": replace(SETTINGS, tools=('{"type": "function"}',))},
        {"settings": replace(SETTINGS, budget=65)},
    ],
    ids=["tenant", "tools", "settings"],
)
async def test_no_session_of_another_tenant_or_of_other_settings_is_continued(
    harness, changes: dict[str, Any]
) -> None:
    _, session, outcome = await ask(harness, user("a"))
    match, other, _ = await ask(harness, user("a"), outcome.message, user("b"), **changes)
    assert match == "built"
    assert other != session
    assert (await harness.service.get(session))[0].turns == 1


async def test_tools_are_the_same_in_the_same_order(harness) -> None:
    """A template renders them in their order; members of an object have none."""
    tools = ('{"function": {"name": "f"}, "type": "function"}', '{"function": {"name": "g"}}')
    harness.worker.script = ["one", "two", "three"]
    _, session, outcome = await ask(harness, user("a"), settings=replace(SETTINGS, tools=tools))
    said = [user("a"), outcome.message, user("b")]
    match, other, _ = await ask(harness, *said, settings=replace(SETTINGS, tools=tools[::-1]))
    assert match == "built"
    assert other != session
    rewritten = ('{"type":"function","function":{"name":"f"}}', tools[1])
    match, again, _ = await ask(harness, *said, settings=replace(SETTINGS, tools=rewritten))
    assert (match, again) == ("continued", session)


async def test_results_of_tools_end_the_pause_under_the_ids_of_the_session(harness) -> None:
    calls = [pb.ToolCall(id="s1", name="f", arguments='{"x": 1}'), pb.ToolCall(id="s2", name="g")]
    calls[1].arguments = "{}"
    harness.worker.script = [calls, "done"]
    _, session, outcome = await ask(harness, user("a"))
    asked = outcome.message
    echoed = replace(
        asked, tool_calls=tuple(replace(call, id=f"c-{call.id}") for call in asked.tool_calls)
    )
    results = [
        Message("tool", "two", tool_call_id="c-s2"),
        Message("tool", "one", tool_call_id="c-s1"),
    ]
    match, again, outcome = await ask(harness, user("a"), echoed, *results)
    assert (match, again, outcome.message.content) == ("continued", session, "done")
    (turn,) = await harness.service.turns(session, 1, 1)
    assert [(each.tool_call_id, each.content) for each in turn.messages] == [
        ("s1", "one"),
        ("s2", "two"),
    ]
    _, fork, _ = await ask(harness, user("a"), echoed, results[0], user("b"))
    (turn,) = await harness.service.turns(fork, 1, 1)
    assert [each.tool_call_id for each in turn.messages] == ["s1", "s2", ""]
    assert "no result" in turn.messages[0].content


async def test_branches_that_arrive_at_once_each_get_a_session(harness) -> None:
    _, session, outcome = await ask(harness, user("a"))
    branches = [ask(harness, user("a"), outcome.message, user(f"b{n}")) for n in range(4)]
    found = await asyncio.gather(*branches)
    assert sorted(match for match, _, _ in found) == ["continued", "forked", "forked", "forked"]
    assert len({session for _, session, _ in found}) == 4
    assert all(outcome.turn == 2 for _, _, outcome in found)
    assert (await harness.service.get(session))[0].turns == 2


async def test_a_repeated_request_gets_the_same_answer_and_computes_nothing(harness) -> None:
    harness.worker.script = ["one", "two"]
    key = IdempotencyKey("chat", "key", "body")
    first = await ask(harness, SYSTEM, user("a"), answer("x"), user("b"), key=key)
    log = list(harness.worker.call_log)
    match, session, outcome = await ask(harness, SYSTEM, user("a"), answer("x"), user("b"), key=key)
    assert (match, session, outcome) == ("repeated", *first[1:])
    opening = replace(key, key="another")
    _, session, outcome = await ask(harness, user("hello"), key=opening)
    assert (await ask(harness, user("hello"), key=opening))[1:] == (session, outcome)
    assert len(await harness.catalog.sessions.get_ids()) == 2
    assert harness.worker.call_log[: len(log)] == log


@pytest.mark.parametrize("held", [False, True], ids=["new session", "held session"])
async def test_a_request_repeated_while_it_runs_waits_and_gets_the_same_answer(
    harness, held: bool
) -> None:
    key = IdempotencyKey("chat", "key", "body")
    history = [user("a")]
    if held:
        _, _, outcome = await ask(harness, *history)
        history += [outcome.message, user("b")]
    first, second = await asyncio.gather(*(ask(harness, *history, key=key) for _ in range(2)))
    assert second[1:] == first[1:]
    assert [first[0], second[0]] == ["continued" if held else "built", "repeated"]
    assert len(await harness.catalog.sessions.get_ids()) == 1


async def test_a_history_whose_session_was_deleted_is_built_again(harness) -> None:
    _, session, outcome = await ask(harness, user("a"))
    await harness.service.delete(session)
    match, other, _ = await ask(harness, user("a"), outcome.message, user("b"))
    assert (match, other != session) == ("built", True)


async def test_a_turn_that_fails_changes_nothing_that_the_next_request_finds(harness) -> None:
    _, session, outcome = await ask(harness, user("a"))
    said = [user("a"), outcome.message, user("b")]
    harness.worker.faults["done"] = WorkerLost("gone")
    with pytest.raises(WorkerLost):
        await ask(harness, *said)
    assert (await ask(harness, *said))[:2] == ("continued", session)


@pytest.mark.parametrize("named", [PAUSE_TRIGGERS, frozenset()], ids=["pauses", "none"])
async def test_a_history_does_not_go_on_in_a_session_that_repairs_at_other_times(
    harness, named: frozenset[RepairTrigger]
) -> None:
    _, session, outcome = await ask(harness, user("a"))
    other = replace(SETTINGS, repair_on=named)
    match, found, _ = await ask(harness, user("a"), outcome.message, user("b"), settings=other)
    assert (match, found != session) == ("built", True)


async def test_histories_are_found_after_a_restart(harness) -> None:
    _, session, outcome = await ask(harness, user("a"))
    await harness.crash()
    match, again, _ = await ask(harness, user("a"), outcome.message, user("b"))
    assert (match, again) == ("continued", session)


WORDS = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(" ".join)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
async def test_the_session_of_any_history_holds_it_and_nothing_else(harness, data) -> None:
    """Cut, edited and branched histories, in any order."""
    said: list[Message] = []
    for _ in range(data.draw(st.integers(1, 5))):
        kept = data.draw(st.integers(0, len(said) // 2)) * 2
        asked = [*said[:kept], user(data.draw(WORDS))]
        _, session, outcome = await ask(harness, *asked)
        assert await said_in(harness, session) == [*asked, outcome.message]
        said = [*asked, outcome.message]


async def test_of_a_long_history_only_the_last_places_are_asked_for_where_they_are_held(
    harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.worker.script = [f"a{turn}" for turn in range(60)]
    said: list[Message] = []
    for turn in range(60):
        _, session, outcome = await ask(harness, *said, user(f"u{turn}"))
        said += [user(f"u{turn}"), outcome.message]
    asked = []
    find = harness.catalog.histories.find

    async def count(digests: list[str]) -> Any:
        asked.append(len(digests))
        return await find(digests)

    monkeypatch.setattr(harness.catalog.histories, "find", count)
    conversations = harness.service.conversations
    for edited, expected in ((60, [4]), (57, [4]), (40, [4, 32]), (1, [4, 32, 24])):
        kept = [*said[: 2 * edited], user("other"), answer("other")]
        history = Conversation((*kept, *said[2 * edited + 2 :], user("next")), SETTINGS, TURN)
        held = (await conversations.look_up(history)).place
        assert held is not None
        assert (held.session.id, held.number, held.turn) == (session, 2 * edited, edited)
        assert asked == expected
        asked.clear()
    unknown = Conversation((user("other"), *said[1:], user("next")), SETTINGS, TURN)
    assert (await conversations.look_up(unknown)).place is None
    assert asked == [4, 32, 24]
