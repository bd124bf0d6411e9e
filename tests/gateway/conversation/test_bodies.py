"""Requests of all APIs for an answer mean the same where they say the same."""

import inspect
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.anthropic.schemas import MessagesBody
from gateway.conversation.bodies import ConversationBody
from gateway.openai.responses.schemas import ResponseBody
from gateway.openai.schemas import ChatCompletionBody
from gateway.rest.schemas.turns import TurnBody
from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Sampling

SAID = [{"role": "user", "content": "Hello."}]
# Each API's own members for the same request; the stop strings' name, if it has them.
REQUESTS: dict[type[ConversationBody], tuple[dict[str, Any], str]] = {
    ChatCompletionBody: ({"messages": SAID, "max_completion_tokens": 9}, "stop"),
    ResponseBody: ({"input": "Hello.", "max_output_tokens": 9}, "stop"),
    MessagesBody: ({"messages": SAID, "max_tokens": 9}, "stop_sequences"),
}
# What a turn has where a request names nothing.
DEFAULT = Sampling(50, 0.25, 0.5, 7, min_p=0.125, repetition_penalty=1.5)
SHARED = {"model": "m", "temperature": 0.5, "top_p": 1, "top_k": 3, "kvrecall": {"budget": 99}}


@pytest.mark.parametrize("api", REQUESTS)
@pytest.mark.parametrize(("tier", "background"), [("flex", True), ("auto", False), (None, False)])
def test_in_the_tier_flex_a_turn_comes_after_others(
    api: type[ConversationBody], tier: str | None, background: bool
) -> None:
    own, _ = REQUESTS[api]
    body = api.model_validate({**SHARED, **own, "service_tier": tier})
    body.require_honoured()
    assert body.turn_to_domain(ServiceLimits(), DEFAULT).background is background


@pytest.mark.parametrize("api", REQUESTS)
def test_the_same_options_are_the_same_turn_in_every_api(api: type[ConversationBody]) -> None:
    own, stop = REQUESTS[api]
    body = api.model_validate({**SHARED, **own, stop: ["a", "b"]})
    body.require_honoured()
    limits = ServiceLimits()
    other = ChatCompletionBody.model_validate(
        {**SHARED, **REQUESTS[ChatCompletionBody][0], "stop": ["a", "b"]}
    )
    assert body.turn_to_domain(limits, DEFAULT) == other.turn_to_domain(limits, DEFAULT)
    sampling = body.turn_to_domain(limits, DEFAULT).sampling
    assert sampling is not None
    assert sampling.stop == ("a", "b")
    assert body.settings_to_domain("t", ()) == other.settings_to_domain("t", ())
    assert body.settings_to_domain("t", ()).budget == 99


@pytest.mark.parametrize("api", [*REQUESTS, TurnBody])
def test_what_a_request_does_not_name_is_the_default_in_every_api(api: Any) -> None:
    own = REQUESTS[api][0] if api in REQUESTS else {"messages": SAID, "max_tokens": 9}
    model = {"model": "m"} if api in REQUESTS else {}

    def read(**named: Any) -> Sampling | None:
        body = api.model_validate({**model, **own, **named})
        if isinstance(body, TurnBody):
            return body.to_domain(DEFAULT).sampling
        sampling: Sampling | None = body.turn_to_domain(ServiceLimits(), DEFAULT).sampling
        return sampling

    assert read() == DEFAULT.with_named(max_tokens=9)
    named = {"temperature": 0.5, "top_p": 1.0, "top_k": 0}
    assert read(**named) == DEFAULT.with_named(max_tokens=9, **named)
    assert read(temperature=0.0) == Sampling(9), "the likeliest tokens: no default changes them"
    greedy = {"temperature": 0.0, "top_k": 3}
    assert read(**greedy) == Sampling(9, top_k=3)
    if api is not MessagesBody:
        penalties = {"min_p": 0.0, "repetition_penalty": 1.0}
        assert read(**penalties) == DEFAULT.with_named(max_tokens=9, **penalties)


@pytest.mark.parametrize("stop", [[""], ["a"] * 129, ["a" * 1025]])
def test_stop_strings_have_the_same_bounds_in_every_api(stop: list[str]) -> None:
    for api, (own, name) in REQUESTS.items():
        with pytest.raises(ValidationError):
            api.model_validate({**SHARED, **own, name: stop})
    with pytest.raises(ValidationError):
        TurnBody.model_validate({"messages": SAID, "stop": stop})


@pytest.mark.parametrize("api", REQUESTS)
def test_what_cannot_be_honoured_is_refused_by_name_in_every_api(
    api: type[ConversationBody],
) -> None:
    own, _ = REQUESTS[api]
    tool = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(InvalidRequest) as refused:
        api.model_validate({**SHARED, **own, "kvrecall": {"tools": [tool]}}).require_honoured()
    assert refused.value.details["field"] == "kvrecall.tools"
    name = next(
        (name for name, honoured in api.honoured.items() if "asked for" not in honoured), ""
    )
    if not name:
        return  # Anthropic's API has no member whose absence would make an answer wrong
    with pytest.raises(InvalidRequest, match=f'{name} "asked for" is not supported'):
        api.model_validate({**SHARED, **own, name: "asked for"}).require_honoured()


def test_a_body_must_say_for_itself_what_apis_write_differently() -> None:
    assert inspect.isabstract(ConversationBody)
    assert not any(inspect.isabstract(api) for api in REQUESTS)

    class Silent(ConversationBody):
        """A body without any of it."""

    with pytest.raises(TypeError, match="stop_strings"):
        Silent.model_validate({"model": "m"}).turn_to_domain(ServiceLimits(), DEFAULT)
