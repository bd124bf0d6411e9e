"""Responses in the background with OpenAI's own client: they outlive connections, not for ever."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

Json = dict[str, Any]
OPTIONS: Json = {
    "temperature": 0,
    "background": True,
    "extra_body": {
        "kvrecall": {"budget": 128, "research": {"method": "snapkv", "repair_rows": 32}, "seed": 7}
    },
}
LONG = 1500
RUNNING = ("queued", "in_progress")


def connect(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


@pytest.fixture
def openai(server: Any) -> Iterator[OpenAI]:
    with connect(server.url) as client:
        yield client


def begin(client: OpenAI, text: str, tokens: int, **options: Any) -> Any:
    (model,) = client.models.list().data
    return client.responses.create(
        model=model.id, input=text, max_output_tokens=tokens, **OPTIONS, **options
    )


def get_ended(client: OpenAI, id: str, say: Any) -> Any:
    """Poll a response to its end."""
    say.until(lambda: client.responses.retrieve(id).status not in RUNNING, f"the end of {id}")
    return client.responses.retrieve(id)


def test_a_polled_response_is_that_of_a_plain_request(openai: OpenAI, say: Any) -> None:
    text = say.chatter(300, 14)
    begun = begin(openai, text, 12)
    assert begun.status in RUNNING
    ended = get_ended(openai, begun.id, say)
    (model,) = openai.models.list().data
    plain = openai.responses.create(
        model=model.id, input=text, max_output_tokens=12, **OPTIONS | {"background": False}
    )
    assert (ended.status, ended.output_text) == (plain.status, plain.output_text)
    assert ended.usage is not None
    assert plain.usage is not None
    assert ended.usage.output_tokens == plain.usage.output_tokens
    assert ended.background is True


def test_a_client_that_leaves_reads_the_rest_of_the_events_later(openai: OpenAI, say: Any) -> None:
    stream = begin(openai, say.chatter(301, 14), 60, stream=True)
    first = []
    for event in stream:
        first.append(event)
        if event.type == "response.output_text.delta":
            break
    stream.close()
    id = first[0].response.id
    rest: list[Any] = list(
        openai.responses.retrieve(id, stream=True, starting_after=first[-1].sequence_number)
    )
    numbers = [event.sequence_number for event in (*first, *rest)]
    assert numbers == list(range(len(numbers)))
    deltas = [event.delta for event in (*first, *rest) if event.type.endswith("text.delta")]
    ended = get_ended(openai, id, say)
    assert "".join(deltas) == ended.output_text
    assert rest[-1].response.output_text == ended.output_text
    assert ended.usage is not None
    assert ended.usage.output_tokens == 60


def test_a_cancelled_response_says_no_more(openai: OpenAI, say: Any) -> None:
    begun = begin(openai, say.chatter(302, 14), LONG)
    assert openai.responses.cancel(begun.id).status == "cancelled"
    assert openai.responses.retrieve(begun.id).status == "cancelled"


def test_after_a_kill_it_has_failed_and_can_be_asked_again(new_server: Any, say: Any) -> None:
    server = new_server(KVRECALL_SERVICE__MAX_OUTPUT_TOKENS="2000")
    server.start()
    with connect(server.url) as client:
        done = begin(client, say.chatter(303, 14), 12)
        text = get_ended(client, done.id, say).output_text
        begun = begin(client, say.chatter(304, 14), LONG)
    server.kill()
    server.start()
    with connect(server.url) as client:
        ended = client.responses.retrieve(begun.id)
        assert ended.error is not None
        assert (ended.status, ended.error.code) == ("failed", "server_error")
        assert client.responses.retrieve(done.id).output_text == text
        again = begin(client, "And Ben's?", 12, previous_response_id=done.id)
        assert get_ended(client, again.id, say).usage.input_tokens_details.cached_tokens > 100


def test_another_gateway_reads_cancels_and_buries_it(new_cluster: Any, say: Any) -> None:
    cluster = new_cluster(KVRECALL_SERVICE__MAX_OUTPUT_TOKENS="2000")
    cluster.start(gateways=2)
    one, other = (gateway.address for gateway in cluster.gateways)
    with connect(one) as client, connect(other) as elsewhere:
        begun = begin(client, say.chatter(305, 14), 40)
        assert get_ended(elsewhere, begun.id, say).usage.output_tokens == 40
        long = begin(client, say.chatter(306, 14), LONG)
        assert elsewhere.responses.retrieve(long.id).status == "in_progress"
        elsewhere.responses.cancel(long.id)
        session = long.id.removeprefix("resp_").rpartition("_")[0]
        say.until(lambda: say.is_idle(cluster.own, f"s_{session}"), "the turn is cancelled")
        assert client.responses.retrieve(long.id).status == "cancelled"
        lost = begin(client, say.chatter(307, 14), LONG)
        cluster.gateways[0].end(signal.SIGKILL)
        ended = get_ended(elsewhere, lost.id, say)
        assert ended.error is not None
        assert (ended.status, ended.error.code) == ("failed", "server_error")
