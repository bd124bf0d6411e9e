"""Messages and sampling cross the wire unchanged."""

import pytest

from kvrecall.protocol.v1 import worker_pb2 as wire
from workers.errors import BadSettings
from workers.generation.convert import to_chat, to_sampling, to_wire
from workers.generation.sampling import SamplingSettings


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "héllo"},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "tool", "content": "25", "tool_call_id": "c1"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
            ],
        },
    ],
)
def test_a_message_comes_back_as_it_was(message: dict[str, object]) -> None:
    assert to_chat(wire.Message.FromString(to_wire(message).SerializeToString())) == message


def test_sampling_that_is_not_set_is_the_default() -> None:
    assert to_sampling(wire.Sampling()) == SamplingSettings()


def test_sampling_is_taken_over() -> None:
    sampling = to_sampling(
        wire.Sampling(max_tokens=3, temperature=0.5, top_p=0.25, top_k=7, seed=9, stop=["a", "b"])
    )
    assert sampling == SamplingSettings(3, 0.5, 0.25, 7, 9, ("a", "b"))
    with pytest.raises(BadSettings):
        to_sampling(wire.Sampling(temperature=-1))
