"""Streamed turns of a client that reads to the end and of one that disconnects."""

from itertools import islice

from kvrecall.client import ArgumentsDelta, TextDelta, ToolCallEvent, TurnCompleted


def test_events_arrive_in_order_and_add_up(client, new_session, say) -> None:
    session = new_session()
    messages = [say.user(say.chatter(6, 12))]
    events = list(client.stream(session, messages, max_tokens=24))
    texts = [event.text for event in events if isinstance(event, TextDelta)]
    calls = [event.call for event in events if isinstance(event, ToolCallEvent)]
    assert [type(event) for event in events].count(TurnCompleted) == 1
    turn = events[-1].turn
    tokens = len(texts)
    assert "".join(texts).strip() == turn.text.strip()
    assert calls == list(turn.tool_calls)
    for number, call in enumerate(calls):
        pieces = [e for e in events if isinstance(e, ArgumentsDelta) and e.index == number]
        assert "".join(piece.arguments for piece in pieces) == call.function.arguments
    assert tokens <= turn.usage.output_tokens == 24
    assert turn.turn == client.get_session(session).turns == 1


def test_a_streamed_turn_generates_the_same_reply(client, new_session, say) -> None:
    messages = [say.user(say.chatter(7, 12))]
    turn = client.turn(new_session(), messages, max_tokens=16)
    streamed = client.stream(new_session(), messages, max_tokens=16).read()
    assert streamed.message == turn.message
    assert streamed.usage == turn.usage


def test_a_disconnected_client_cancels_its_turn_and_changes_nothing(
    client, new_session, say
) -> None:
    def history() -> str:
        session = new_session()
        client.turn(session, [say.user(say.chatter(8, 20))], max_tokens=4)
        return session

    session = history()
    before = client.get_session(session)
    held = client.memory(session)
    with client.stream(session, "Go on.", max_tokens=500, key="left") as events:
        assert [type(event) for event in islice(events, 5)] == [TextDelta] * 5
    say.until(lambda: say.is_idle(client, session), "the end of the cancelled turn")
    assert client.get_session(session) == before
    # Over the network a cancelled call reaches the worker a moment later.
    say.until(lambda: rows(client.memory(session)) == rows(held), "the committed rows")
    twin = history()
    question = "Which code has Ada's locker?"
    turn = client.turn(session, question, max_tokens=12)
    expected = client.turn(twin, question, max_tokens=12)
    assert (turn.message, turn.usage, turn.turn) == (expected.message, expected.usage, 2)
    assert rows(turn.memory) == rows(expected.memory)


def rows(memory) -> dict[str, int]:
    names = ("length", "active_rows", "evicted_rows", "promoted_rows")
    return {name: getattr(memory, name) for name in names}
