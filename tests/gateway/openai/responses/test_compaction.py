"""Compaction: a conversation goes on from the model's summary of it."""

from typing import Any

import pytest
from openai.types.responses.compacted_response import CompactedResponse

from gateway.openai.responses.compaction import INSTRUCTION, tell_compaction

Json = dict[str, Any]
PATH = "/v1/responses/compact"


def user(text: str) -> Json:
    return {"role": "user", "content": text}


async def test_a_conversation_goes_on_from_its_summary(api, ask, turns) -> None:
    api.worker.script = ["one", "they said hello", "two"]
    first = await ask("hello", instructions="be kind")
    body = {"model": api.service.info.model, "previous_response_id": first.json()["id"]}
    asked = {**body, "input": "bye", "instructions": "be kind"}
    answer = await api.http.post(PATH, json=asked)
    compacted = answer.json()
    # OpenAI gives users' messages back as they were sent, for which its SDK has no type.
    CompactedResponse.model_validate({**compacted, "output": compacted["output"][-1:]})
    assert compacted["object"] == "response.compaction"
    assert [item["type"] for item in compacted["output"]] == ["message", "message", "compaction"]
    assert [item["content"][0]["text"] for item in compacted["output"][:2]] == ["hello", "bye"]
    assert compacted["usage"]["output_tokens"] == 3
    assert turns[-1].messages[-1].content == INSTRUCTION
    await ask([*compacted["output"], user("more")])
    told = [message.content for message in turns[-1].messages]
    assert told == ["hello", "bye", "Summary of the conversation so far:\nthey said hello", "more"]


async def test_a_compaction_leaves_no_session(api) -> None:
    body = {"model": api.service.info.model, "input": [user("hello")]}
    assert (await api.http.post(PATH, json=body)).status_code == 200
    assert await api.catalog.sessions.get_ids() == []
    empty = await api.http.post(PATH, json={"model": api.service.info.model})
    assert empty.json()["error"]["param"] == "input"


@pytest.mark.parametrize(
    "content", [None, "gAAA", "kvrecall.summary.1.%", "kvrecall.summary.1._w=="]
)
def test_what_cannot_be_read_is_told_as_such(content: Any) -> None:
    assert "cannot read" in tell_compaction(content).content
