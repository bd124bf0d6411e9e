"""Anthropic's own client against a real server: the session of OpenAI's client, nothing twice."""

from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

Json = dict[str, Any]
SETTINGS: Json = {"budget": 128, "research": {"method": "snapkv", "repair_rows": 32}, "seed": 7}
TOKENS = 12


@pytest.fixture
def anthropic(server: Any) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        yield client


def model_of(client: Anthropic) -> str:
    (model,) = client.models.list().data
    return model.id


def ask(client: Anthropic, messages: list[Any], **options: Any) -> Any:
    """Send a conversation, greedily; returns the raw response, with headers."""
    body = {"temperature": 0, **options.pop("body", {"kvrecall": SETTINGS})}
    return client.messages.with_raw_response.create(
        model=model_of(client), max_tokens=TOKENS, messages=messages, extra_body=body, **options
    )


def test_a_conversation_has_the_same_answers_and_session_through_both_apis(
    anthropic: Anthropic, server: Any, say: Any
) -> None:
    first = [say.user(say.chatter(80, 14))]
    mine = ask(anthropic, first)
    message = mine.parse()
    counted = anthropic.messages.count_tokens(model=model_of(anthropic), messages=first)
    assert message.usage.input_tokens == counted.input_tokens
    said = [*first, {"role": "assistant", "content": message.content[0].text}, say.user("And?")]
    with OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        other = client.chat.completions.with_raw_response.create(
            model=model_of(anthropic),
            messages=said,
            temperature=0,
            max_tokens=TOKENS,
            extra_body={"kvrecall": SETTINGS},
        )
    assert other.headers["kvrecall-match"] == "continued"
    assert other.headers["kvrecall-session"] == mine.headers["kvrecall-session"]
    held = counted.input_tokens + message.usage.output_tokens - 1
    usage: Any = other.parse().usage
    assert usage.prompt_tokens_details.cached_tokens == held - held % 64


def test_a_thread_says_what_a_whole_conversation_says(anthropic: Anthropic, say: Any) -> None:
    first, second = say.user(say.chatter(81, 14)), say.user(say.chatter(82, 8))
    opening = ask(anthropic, [first])
    message = opening.parse()
    thread = {"type": "continue", "previous_message_id": message.id}
    followed = ask(anthropic, [second], body={"thread": thread})
    assert followed.headers["kvrecall-session"] == opening.headers["kvrecall-session"]
    whole = ask(anthropic, [first, {"role": "assistant", "content": message.content}, second])
    assert whole.headers["kvrecall-match"] == "forked", "the thread has gone on"
    assert whole.parse().content[0].text == followed.parse().content[0].text


def test_a_stop_sequence_is_met_where_the_answer_has_it(anthropic: Anthropic, say: Any) -> None:
    messages = [say.user(say.chatter(83, 14))]
    text = ask(anthropic, messages).parse().content[0].text
    stop = text[len(text) // 2 :][:3]
    answer = ask(anthropic, messages, stop_sequences=[stop]).parse()
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in answer.content) == text[: text.index(stop)].strip()


def test_a_thread_goes_on_after_the_server_was_killed(new_server: Any, say: Any) -> None:
    server = new_server()
    server.start()
    with Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        message = ask(client, [say.user(say.chatter(84, 14))]).parse()
    server.kill()
    server.start()
    thread = {"type": "continue", "previous_message_id": message.id}
    with Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        answer = ask(client, [say.user("And Ben's?")], body={"thread": thread})
    assert answer.headers["kvrecall-match"] == "continued"
    assert answer.parse().usage.cache_read_input_tokens > 100
