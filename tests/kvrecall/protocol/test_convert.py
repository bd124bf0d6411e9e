"""Messages, sampling and episodes cross the wire unchanged."""

import pytest

from kvrecall.domain.answer.sampling_defaults import GREEDY, SamplingDefaults
from kvrecall.domain.episodes import NO_EPISODE, ActiveEpisode, EpisodeSegment
from kvrecall.domain.messages import Sampling
from kvrecall.protocol import convert
from kvrecall.protocol.v1 import worker_pb2 as pb


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
def test_a_chat_message_survives_the_wire(message: dict[str, object]) -> None:
    sent = convert.chat_to_wire(message).SerializeToString()
    assert convert.to_chat(pb.Message.FromString(sent)) == message


def test_sampling_that_is_not_set_is_the_default() -> None:
    assert convert.sampling_from_wire(pb.Sampling()) == Sampling()


@pytest.mark.parametrize(
    "sampling",
    [Sampling(3, 0.5, 0.25, 7, 9, ("a", "b")), Sampling(1), Sampling(1, top_p=1.0)],
)
def test_sampling_survives_the_wire(sampling: Sampling) -> None:
    sent = convert.sampling_to_wire(sampling).SerializeToString()
    assert convert.sampling_from_wire(pb.Sampling.FromString(sent)) == sampling


@pytest.mark.parametrize(
    "episode",
    [
        NO_EPISODE,
        ActiveEpisode("e", (5, 6), (EpisodeSegment(0, 4, 1.0), EpisodeSegment(4, 9, 0.25))),
    ],
)
def test_an_episode_survives_the_wire(episode: ActiveEpisode) -> None:
    spans = convert.segments_to_wire(episode.segments)
    found = convert.active_episode_from_wire(episode.id, episode.patched_prompt, spans)
    assert found == episode


@pytest.mark.parametrize("sampling", [GREEDY, SamplingDefaults(0.7, 0.9, 20, 0.05, 1.1)])
def test_a_model_s_sampling_survives_the_wire(sampling: SamplingDefaults) -> None:
    info = pb.WorkerInfo(sampling=convert.sampling_defaults_to_wire(sampling))
    sent = info.SerializeToString()
    assert convert.worker_info_from_wire(pb.WorkerInfo.FromString(sent)).sampling == sampling


def test_a_worker_that_says_nothing_of_sampling_is_greedy() -> None:
    assert convert.worker_info_from_wire(pb.WorkerInfo()).sampling == GREEDY
