"""Whole conversations as clients repeat them: what is the same conversation, and what is not."""

import pytest

from kvrecall.domain.errors import CallsOutstanding, DuplicateCall, ToolResultWithoutCall
from kvrecall.domain.messages import Message, ToolCall
from services.conversations.histories import History, build_history, extend, rename_calls

SCOPE = b"scope"
CALLS = (ToolCall("c1", "look_up", '{"name": "Ada"}'), ToolCall("c2", "count", "{}"))
ASKS = Message("assistant", "", CALLS)
SAID = (
    Message("system", "You help."),
    Message("user", "hello"),
    ASKS,
    Message("tool", "4711", tool_call_id="c1"),
    Message("tool", "2", tool_call_id="c2"),
    Message("assistant", "It is 4711."),
    Message("user", "thanks"),
)


def last(*messages: Message, scope: bytes = SCOPE) -> bytes:
    return build_history(scope, messages).digests[-1]


def test_clients_that_repeat_a_conversation_in_other_clothes_mean_the_same() -> None:
    calls = (
        ToolCall("x", "look_up", '{"name":"Ada"}'),
        ToolCall("y", "count", " {  } "),
    )
    echoed = (
        *SAID[:2],
        Message("assistant", "", calls, name="helper"),
        Message("tool", "2", tool_call_id="y", name="count"),
        Message("tool", "4711", tool_call_id="x"),
        Message("assistant", "It is 4711. \n"),
        SAID[-1],
    )
    assert last(*echoed) == last(*SAID)
    assert [each.tool_call_id for each in build_history(SCOPE, echoed).messages[3:5]] == ["x", "y"]


@pytest.mark.parametrize("number", range(len(SAID)))
def test_no_other_conversation_has_the_same_digest(number: int) -> None:
    message = SAID[number]
    others = [
        Message(message.role, message.content + "!", message.tool_calls, message.tool_call_id),
        Message(message.role, message.content, (), message.tool_call_id),
        Message("user", message.content, name="Bob"),
    ]
    digests = set()
    for other in others:
        if other != message:
            digest = History(SCOPE, (*SAID[:number], other, *SAID[number + 1 :])).digests[-1]
            digests.add(digest)
    assert last(*SAID) not in digests
    assert last(*SAID, scope=b"another tenant's") != last(*SAID)


def test_results_that_change_places_are_another_conversation() -> None:
    first, second = SAID[3], SAID[4]
    swapped = (
        *SAID[:3],
        Message("tool", second.content, tool_call_id="c1"),
        Message("tool", first.content, tool_call_id="c2"),
        *SAID[5:],
    )
    assert last(*swapped) != last(*SAID)


def test_each_digest_extends_the_one_before() -> None:
    history = build_history(SCOPE, SAID)
    assert len(history.digests) == len(SAID) + 1
    assert extend(history.digests[5], SAID[5]) == history.digests[6]
    assert history.ends == [6, 3]
    assert build_history(SCOPE, SAID[:3] + SAID[3:5]).ends == [3]


def test_each_call_is_answered_once_before_the_next_message() -> None:
    with pytest.raises(CallsOutstanding, match="c2"):
        last(*SAID[:4], SAID[5])
    with pytest.raises(CallsOutstanding, match="c1, c2"):
        last(*SAID[:3])
    with pytest.raises(ToolResultWithoutCall, match="c1"):
        last(*SAID[:5], SAID[3])
    with pytest.raises(ToolResultWithoutCall):
        last(SAID[3])
    with pytest.raises(DuplicateCall):
        last(Message("assistant", "", (CALLS[0], CALLS[0])))


def test_results_get_the_ids_that_the_session_gave_its_calls() -> None:
    results = (Message("tool", "a", tool_call_id="x"), Message("tool", "b", tool_call_id="y"))
    renamed = rename_calls((*results, SAID[-1]), CALLS)
    assert [message.tool_call_id for message in renamed] == ["c1", "c2", ""]
    assert rename_calls(SAID[:2], ()) == SAID[:2]


def test_digests_are_those_that_catalogs_have_stored() -> None:
    call = ToolCall("c", "look", '{"b": "\\u00e9 \\"x\\"",  "a": [1, null]}')
    history = build_history(
        SCOPE,
        [
            Message("system", 'quotes " and \\ and é and \ud800'),
            Message("user", "two\nlines", name="ann"),
            Message("assistant", "ok ", (call,)),
            Message("tool", "found", tool_call_id="c"),
            Message("assistant", ""),
        ],
    )
    assert (
        history.digests[-1].hex()
        == "594ad8186d2e68ef2ceb579324df956017d111e0595fc35880d125901687ced0"
    )
