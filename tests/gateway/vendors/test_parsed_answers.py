"""Answers with a form become the objects that the vendors' clients parse them to."""

from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, LengthFinishReasonError
from pydantic import BaseModel, ConfigDict

from tests.gateway.vendors.answers import ANSWERS, answer_with

ANSWER = ANSWERS["schema"]
CUT = ANSWERS["cut schema"]


class Place(BaseModel):
    """What `SCHEMA` describes."""

    model_config = ConfigDict(extra="forbid")

    city: str


PLACE = Place(city="Zürich 🧀")
HELLO: list[Any] = [{"role": "user", "content": "hello there"}]


async def test_a_completion_is_parsed_plain_and_streamed(api: Any, openai: AsyncOpenAI) -> None:
    answer_with(api.worker, ANSWER)
    asked: Any = {"model": api.service.info.model, "messages": HELLO, "response_format": Place}
    plain = await openai.chat.completions.parse(**asked)
    assert plain.choices[0].message.parsed == PLACE
    async with openai.chat.completions.stream(**asked) as stream:
        done = [event async for event in stream if event.type == "content.done"]
        final = await stream.get_final_completion()
    assert [event.parsed for event in done] == [PLACE]
    assert final.choices[0].message.parsed == PLACE


async def test_a_completion_that_was_cut_is_told_as_one(api: Any, openai: AsyncOpenAI) -> None:
    answer_with(api.worker, CUT)
    with pytest.raises(LengthFinishReasonError):
        await openai.chat.completions.parse(
            model=api.service.info.model, messages=HELLO, response_format=Place
        )


async def test_a_response_is_parsed_plain_and_streamed(api: Any, openai: AsyncOpenAI) -> None:
    answer_with(api.worker, ANSWER)
    asked: Any = {"model": api.service.info.model, "input": "hello there", "text_format": Place}
    plain = await openai.responses.parse(**asked)
    assert plain.output_parsed == PLACE
    async with openai.responses.stream(**asked) as stream:
        done = [event async for event in stream if event.type == "response.output_text.done"]
        final = await stream.get_final_response()
    assert [event.parsed for event in done] == [PLACE]
    assert final.output_parsed == PLACE


@pytest.mark.parametrize("beta", [False, True])
async def test_a_message_is_parsed_plain_and_streamed(
    served: Any, anthropic: AsyncAnthropic, beta: bool
) -> None:
    answer_with(served.worker, ANSWER)
    messages: Any = anthropic.beta.messages if beta else anthropic.messages
    model = served.service.info.model
    asked: Any = {"model": model, "max_tokens": 50, "messages": HELLO, "output_format": Place}
    plain = await messages.parse(**asked)
    assert plain.parsed_output == PLACE
    async with messages.stream(**asked) as stream:
        final = await stream.get_final_message()
    assert final.parsed_output == PLACE
