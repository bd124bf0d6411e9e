"""A turn as server-sent events, as it reaches a client that reads it and one that leaves."""

from contextlib import closing
from itertools import islice


def test_the_events_come_in_order_and_add_up(client, new_session, say) -> None:
    session = new_session()
    messages = [say.user(say.chatter(6, 12))]
    events = list(client.turn_stream(session, messages, sampling={"max_tokens": 24}))
    kinds = [event.event for event in events]
    tokens = kinds.count("token")
    assert kinds == ["token"] * tokens + ["tool_call"] * kinds.count("tool_call") + ["done"]
    done = events[-1].data
    assert (
        "".join(event.data["text"] for event in events[:tokens]).strip()
        == (done["message"]["content"] or "").strip()
    )
    assert tokens <= done["usage"]["output_tokens"] == 24
    assert done["turn"] == client.get(session)["turns"] == 1


def test_a_streamed_turn_says_what_a_turn_in_one_piece_says(client, new_session, say) -> None:
    messages = [say.user(say.chatter(7, 12))]
    sampling = {"max_tokens": 16}
    whole = client.turn(new_session(), messages, sampling=sampling)
    *_, done = client.turn_stream(new_session(), messages, sampling=sampling)
    assert done.data["message"] == whole["message"]
    assert done.data["usage"] == whole["usage"]


def test_a_client_that_leaves_cancels_its_turn_and_changes_nothing(
    client, new_session, say
) -> None:
    def history() -> str:
        session = new_session()
        client.turn(session, [say.user(say.chatter(8, 20))], sampling={"max_tokens": 4})
        return session

    session = history()
    before = client.get(session)
    held = client.memory(session)
    with closing(
        client.turn_stream(session, [say.user("Go on.")], sampling={"max_tokens": 500}, key="left")
    ) as events:
        assert [event.event for event in islice(events, 5)] == ["token"] * 5
    say.until(lambda: say.is_idle(client, session), "the end of the cancelled turn")
    assert client.get(session) == before
    # Over the network a worker hears of a cancelled call a moment later.
    say.until(lambda: rows(client.memory(session)) == rows(held), "the rows that were committed")
    twin = history()
    question = {
        "messages": [say.user("Which code has Ada's locker?")],
        "sampling": {"max_tokens": 12},
    }
    answer = client.turn(session, **question)
    other = client.turn(twin, **question)
    assert (answer["message"], answer["usage"], answer["turn"]) == (
        other["message"],
        other["usage"],
        2,
    )
    assert rows(answer["memory"]) == rows(other["memory"])


def rows(memory) -> dict[str, int]:
    return {
        name: memory[name] for name in ("length", "active_rows", "evicted_rows", "promoted_rows")
    }
