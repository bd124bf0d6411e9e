"""OpenAI's own client against a real server: the same answers as the session API, nothing twice."""

import json
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

Json = dict[str, Any]
SETTINGS: Json = {"budget": 128, "research": {"method": "snapkv", "repair_rows": 32}, "seed": 7}
TURNS = 3
PAGE = 64
TOKENS = 12


def model_of(client: OpenAI) -> str:
    (model,) = client.models.list().data
    return model.id


def ask(client: OpenAI, messages: list[Any], **options: Any) -> Any:
    """Send a whole conversation; returns the raw response, with headers."""
    options = {"temperature": 0, "max_tokens": TOKENS, **options}
    return client.chat.completions.with_raw_response.create(
        model=model_of(client), messages=messages, extra_body={"kvrecall": SETTINGS}, **options
    )


def test_a_conversation_has_the_answers_and_the_rows_of_the_session_api(
    openai: OpenAI, server: Any, client: Any, say: Any
) -> None:
    # Under another salt, so that it shares no page with the conversation.
    session = client.create_session(**SETTINGS, cache_salt="session").id
    messages: list[Any] = []
    held = 0
    for seed in range(TURNS):
        messages.append(say.user(say.chatter(seed, 14)))
        expected = client.turn(session, [messages[-1]], max_tokens=TOKENS)
        response = ask(openai, messages)
        answer = response.parse()
        assert answer.choices[0].message.content == expected.text
        assert response.headers["kvrecall-match"] == ("continued" if seed else "built")
        usage = answer.usage
        assert usage.completion_tokens == expected.usage.output_tokens
        assert usage.prompt_tokens_details.cached_tokens == held - held % PAGE
        held = client.memory(session).length
        assert usage.total_tokens == held + 1, "the last token has no row yet"
        messages.append(answer.choices[0].message)
    found = response.headers["kvrecall-session"]
    mine, theirs = client.memory(found), client.memory(session)
    assert (mine.length, mine.active_rows) == (theirs.length, theirs.active_rows)
    client.delete_session(found)
    client.delete_session(session)


def test_a_system_prompt_is_cached_for_requests_of_the_same_salt_alone(
    openai: OpenAI, say: Any
) -> None:
    system: Any = {"role": "system", "content": say.chatter(72, 120)}
    counts = []
    for salt in ("ada", "ben", None, "ada"):
        answer: Any = openai.chat.completions.create(
            model=model_of(openai),
            messages=[system, say.user("Hello.")],
            max_tokens=4,
            extra_body={} if salt is None else {"cache_salt": salt},
        )
        counts.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert counts[:3] == [0, 0, 0]
    assert counts[3] > 0.9 * answer.usage.prompt_tokens - PAGE


def test_a_streamed_answer_is_that_of_a_whole_one(openai: OpenAI, say: Any) -> None:
    messages = [say.user(say.chatter(50, 14))]
    whole = ask(openai, messages).parse()
    stream = openai.chat.completions.create(
        model=model_of(openai),
        messages=messages,
        temperature=0,
        max_tokens=TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"kvrecall": SETTINGS},
    )
    chunks: list[Any] = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.strip() == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_history_with_a_call_is_cut_into_turns_at_its_pause(
    openai: OpenAI, client: Any, say: Any
) -> None:
    opening = say.user(say.chatter(60, 30))
    call = {
        "id": "mine",
        "type": "function",
        "function": {"name": "look_up", "arguments": json.dumps({"name": "Ada"})},
    }
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    found = {"role": "tool", "tool_call_id": "mine", "content": "Ada's locker has number 1234."}
    response = ask(openai, [opening, asked, found])
    assert response.headers["kvrecall-match"] == "built"
    session = response.headers["kvrecall-session"]
    assert client.get_session(session).turns == 2
    other = {**found, "content": "Ada's locker has number 4321."}
    again = ask(openai, [opening, asked, other])
    assert again.headers["kvrecall-match"] == "forked", "at the call, with another result"
    assert client.get_session(session).turns == 2


def test_a_system_prompt_far_longer_than_the_budget_is_cached_for_the_next_conversation(
    openai: OpenAI, say: Any
) -> None:
    rules: Any = {"role": "system", "content": say.chatter(81, 120)}
    settings: Json = {"research": {"method": "icecache"}, "budget": 128}
    counts = []
    for text in ("Hello.", "Who called?"):
        answer: Any = openai.chat.completions.create(
            model=model_of(openai),
            messages=[rules, say.user(text)],
            max_tokens=6,
            extra_body={"kvrecall": settings},
        )
        counts.append(
            (answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens)
        )
    assert counts[0][1] == 0
    assert counts[1][1] > 0.9 * counts[1][0] > 10 * settings["budget"]


def test_what_cannot_be_served_is_refused_in_the_clients_own_errors(
    openai: OpenAI, say: Any
) -> None:
    hello = [say.user("hello")]
    with pytest.raises(BadRequestError) as refused:
        ask(openai, hello, n=9)
    assert (refused.value.param, refused.value.code) == ("n", "invalid_value")
    with pytest.raises(NotFoundError) as missing:
        openai.chat.completions.create(model="gpt-9", messages=hello)
    assert missing.value.code == "model_not_found"


def test_a_conversation_goes_on_after_the_server_was_killed(new_server: Any, say: Any) -> None:
    server = new_server()
    server.start()
    messages = [say.user(say.chatter(70, 14))]
    with OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        first = ask(client, messages)
    messages += [first.parse().choices[0].message, say.user("And Ben's?")]
    server.kill()
    server.start()
    with OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        second = ask(client, messages)
    assert second.headers["kvrecall-match"] == "continued"
    assert second.headers["kvrecall-session"] == first.headers["kvrecall-session"]
    assert second.parse().usage.prompt_tokens_details.cached_tokens > 100
