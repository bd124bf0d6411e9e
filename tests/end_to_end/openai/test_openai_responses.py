"""OpenAI's own client on responses and conversations, against a real server and a real worker."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

Json = dict[str, Any]
SETTINGS: Json = {"budget": 128, "research": {"method": "snapkv", "repair_rows": 32}, "seed": 7}
OPTIONS: Json = {
    "temperature": 0,
    "max_output_tokens": 12,
    "extra_body": {"kvrecall": SETTINGS},
}
TURNS = 3
PAGE = 64
CALL = {
    "type": "function_call",
    "call_id": "mine",
    "name": "look_up",
    "arguments": '{"name":"Ada"}',
}
RESULT = {
    "type": "function_call_output",
    "call_id": "mine",
    "output": "Ada's locker has number 1234.",
}


def connect(server: Any) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


@pytest.fixture
def openai(server: Any) -> Iterator[OpenAI]:
    with connect(server) as client:
        yield client


def get_model(client: OpenAI) -> str:
    (model,) = client.models.list().data
    return model.id


def ask(client: OpenAI, input: Any, **options: Any) -> Any:
    """Ask for a response; returns it raw, with headers. Its members have the types of the client."""
    raw = client.responses.with_raw_response.create(
        model=get_model(client), input=input, **{**OPTIONS, **options}
    )
    response = raw.parse()
    type(response).model_validate(response.model_dump(), strict=False)
    return raw


def test_a_chain_of_responses_has_the_answers_of_the_session_api(
    openai: OpenAI, client: Any, say: Any
) -> None:
    # Under another salt, so that it shares no page with the conversation.
    session = client.create_session(**SETTINGS, cache_salt="session").id
    previous: Json = {}
    held = 0
    for seed in range(TURNS):
        # In the model's language, so that its replies are encoded again as they were generated.
        statement = f"Please note that the badge list says Melnor K482{seed}."
        message = say.user(f"{say.chatter(seed, 14)} {statement}")
        expected = client.turn(session, [message], max_tokens=12)
        raw = ask(openai, message["content"], **previous)
        response = raw.parse()
        assert response.output_text == expected.text
        assert raw.headers["kvrecall-match"] == ("continued" if seed else "built")
        usage = response.usage
        assert usage.total_tokens == client.memory(session).length + 1
        cached = held - held % PAGE
        assert usage.input_tokens_details.cached_tokens == cached
        assert usage.input_tokens_details.cache_write_tokens == usage.input_tokens - cached
        held = usage.total_tokens - 1  # the last token has no row yet
        previous = {"previous_response_id": response.id}
    read = openai.responses.retrieve(response.id)
    assert (read.output_text, read.usage) == (response.output_text, usage)
    items: Any = list(openai.responses.input_items.list(response.id, limit=2, order="asc"))
    assert [item.role for item in items] == ["user", "assistant"] * (TURNS - 1) + ["user"]
    counted = openai.responses.input_tokens.count(
        model=get_model(openai), input=[item.model_dump() for item in items]
    )
    assert counted.input_tokens == usage.input_tokens
    openai.responses.delete(response.id)
    with pytest.raises(NotFoundError):
        openai.responses.retrieve(response.id)


def test_the_clients_own_state_machine_takes_the_stream(openai: OpenAI, say: Any) -> None:
    message = say.user(say.chatter(40, 14))["content"]
    last = ask(openai, message).parse().output_text.split()[-1]
    options = {**OPTIONS, "extra_body": {"kvrecall": SETTINGS, "stop": [last]}}
    whole = ask(openai, message, **options).parse()
    assert whole.status == "completed"
    kinds = []
    with openai.responses.stream(model=get_model(openai), input=message, **options) as stream:
        for number, event in enumerate(stream):
            kinds.append(event.type)
            assert event.sequence_number == number
        response: Any = stream.get_final_response()
    assert response.output_text == whole.output_text
    assert response.usage.output_tokens == whole.usage.output_tokens
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"


def test_calls_and_results_as_items_are_those_of_chat_completions(
    openai: OpenAI, client: Any, say: Any
) -> None:
    opening = say.user(say.chatter(41, 30))
    raw = ask(openai, [opening, CALL, RESULT])
    function = {"name": CALL["name"], "arguments": CALL["arguments"]}
    asked = {
        "role": "assistant",
        "tool_calls": [{"id": "other", "type": "function", "function": function}],
    }
    found = {"role": "tool", "tool_call_id": "other", "content": RESULT["output"]}
    answer = {"role": "assistant", "content": raw.parse().output_text}
    chat: Any = [opening, asked, found, answer, say.user("Thank you.")]
    again = openai.chat.completions.with_raw_response.create(
        model=get_model(openai), messages=chat, max_tokens=12, extra_body=OPTIONS["extra_body"]
    )
    assert again.headers["kvrecall-match"] == "continued"
    assert again.headers["kvrecall-session"] == raw.headers["kvrecall-session"]


def test_a_conversation_gets_what_was_asked_and_answered(openai: OpenAI, say: Any) -> None:
    conversation = openai.conversations.create(metadata={"a": "b"}).id
    first = ask(openai, say.chatter(42, 14), conversation=conversation)
    openai.conversations.items.create(conversation, items=[say.user("By the way.")])
    second = ask(openai, "And now?", conversation=conversation)
    assert second.headers["kvrecall-match"] == "continued"
    items: Any = list(openai.conversations.items.list(conversation, limit=2, order="asc"))
    roles = ["user", "assistant", "user", "user", "assistant"]
    assert [item.role for item in items] == roles
    assert items[1].id == first.parse().output[0].id
    item: Any = openai.conversations.items.retrieve(items[2].id, conversation_id=conversation)
    assert item.content[0].text == "By the way."
    openai.conversations.items.delete(items[2].id, conversation_id=conversation)
    assert openai.conversations.update(conversation, metadata={"a": "c"}).metadata == {"a": "c"}
    assert openai.conversations.delete(conversation).deleted
    with pytest.raises(NotFoundError) as missing:
        ask(openai, "Hello?", conversation=conversation)
    assert missing.value.code == "conversation_not_found"


def test_what_cannot_be_served_is_refused_in_the_clients_own_errors(openai: OpenAI) -> None:
    for options, param in (
        ({"background": True, "store": False}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ):
        with pytest.raises(BadRequestError) as refused:
            ask(openai, "Hello.", **options)
        assert refused.value.param == param


def test_responses_and_conversations_go_on_after_the_server_was_killed(
    new_server: Any, say: Any
) -> None:
    """It is killed between the last event of a stream and the next request."""
    server = new_server()
    server.start()
    with connect(server) as client:
        conversation = client.conversations.create().id
        first = ask(client, say.chatter(43, 14), conversation=conversation)
        with client.responses.stream(
            model=get_model(client), input=say.chatter(44, 14), instructions="Be kind.", **OPTIONS
        ) as stream:
            for event in stream:
                last: Any = event
                if event.type in ("response.completed", "response.incomplete"):
                    server.kill()
                    break
    server.start()
    with connect(server) as client:
        read = client.responses.retrieve(last.response.id)
        assert read.output_text == last.response.output_text
        second = ask(
            client,
            "And Ben's?",
            previous_response_id=last.response.id,
            instructions="Be kind.",
        )
        assert second.headers["kvrecall-match"] == "continued"
        cached = second.parse().usage.input_tokens_details.cached_tokens
        assert 0 <= last.response.usage.total_tokens - 1 - cached < PAGE
        third = ask(client, "And Ben's?", conversation=conversation)
        assert third.headers["kvrecall-match"] == "continued"
        assert third.headers["kvrecall-session"] == first.headers["kvrecall-session"]
