"""Messages and REST's schemas: each has what the other has, and values survive the conversion."""

from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.struct_pb2 import Struct
from pydantic import ValidationError

from gateway.grpc.convert import build_message, fill_message, find_field, parse_body, read_message
from gateway.grpc.requests import ListRepairsBody, ListSessionsBody
from gateway.rest.schemas import episodes, events, messages, research, sessions, turns
from kvrecall import client
from kvrecall.protocol.sessions_v1 import sessions_pb2 as pb

OUTSIDE = {"session", "idempotency_key"}
# Bodies and public values with their messages; members of REST, and fields of gRPC, that have no counterpart.
PAIRS: list[tuple[type, Any, set[str], set[str]]] = [
    (sessions.CreateSessionBody, pb.CreateSessionRequest, set(), OUTSIDE),
    (research.ResearchBody, pb.Research, set(), {"no_episodes"}),
    (sessions.ForkBody, pb.ForkSessionRequest, set(), OUTSIDE),
    (sessions.MoveBody, pb.MoveSessionRequest, set(), OUTSIDE),
    (turns.TurnBody, pb.SendTurnRequest, {"stream"}, OUTSIDE),
    (turns.LogprobsBody, pb.Logprobs, set(), set()),
    (messages.MessageBody, pb.Message, set(), set()),
    (messages.ToolCallBody, pb.ToolCall, {"type", "function"}, {"name", "arguments"}),
    (messages.ToolFunctionBody, pb.Tool, set(), set()),
    (episodes.EpisodesBody, pb.EpisodeSettings, set(), {"auto_count"}),
    (events.StartedBody, pb.ToolCallStarted, {"type", "call_id"}, set()),
    (events.DeltaBody, pb.ToolCallDelta, {"type", "call_id"}, set()),
    (events.CompletedBody, pb.ToolCallResult, {"type", "call_id"}, set()),
    (ListSessionsBody, pb.ListSessionsRequest, set(), set()),
    (ListRepairsBody, pb.ListRepairsRequest, set(), OUTSIDE),
    (client.Session, pb.Session, set(), set()),
    (client.Research, pb.Research, set(), {"no_episodes"}),
    (client.SessionPage, pb.ListSessionsResponse, set(), set()),
    (client.SessionMemory, pb.SessionMemory, set(), set()),
    (client.PendingCall, pb.PendingCall, set(), set()),
    (client.ForkOrigin, pb.ForkOrigin, set(), set()),
    (client.EpisodeSettings, pb.EpisodeSettings, set(), {"auto_count"}),
    (client.Episodes, pb.ListEpisodesResponse, set(), set()),
    (client.Episode, pb.Episode, set(), set()),
    (client.Turn, pb.Turn, set(), set()),
    (client.TokenLogprob, pb.TokenLogprob, {"bytes"}, {"utf8"}),
    (client.Usage, pb.Usage, set(), set()),
    (client.Fidelity, pb.Fidelity, set(), set()),
    (client.TurnEpisode, pb.TurnEpisode, set(), set()),
    (client.TurnPrefill, pb.TurnPrefill, set(), set()),
    (client.TurnMemory, pb.TurnMemory, set(), set()),
    (client.Memory, pb.Memory, set(), set()),
    (client.Repair, pb.Repair, set(), set()),
    (client.RepairTotals, pb.RepairTotals, set(), set()),
    (client.Passage, pb.Passage, set(), set()),
    (client.PastRepair, pb.PastRepair, {field.name for field in fields(client.Repair)}, {"repair"}),
    (client.Repairs, pb.ListRepairsResponse, set(), set()),
    (client.EventReceipt, pb.EventReceipt, set(), set()),
    (client.Worker, pb.Model, set(), set()),
    (client.LayerKind, pb.LayerKind, set(), set()),
    (client.Workers, pb.ListWorkersResponse, set(), set()),
    (client.WorkerLoad, pb.Worker, set(), set()),
    (client.WorkerStats, pb.WorkerStats, set(), set()),
    (client.TierStats, pb.TierStats, set(), set()),
    (client.Methods, pb.ListMethodsResponse, set(), set()),
    (client.Method, pb.Method, set(), set()),
]


@pytest.mark.parametrize(
    ("model", "message", "rest", "rpc"), PAIRS, ids=[pair[1].__name__ for pair in PAIRS]
)
def test_rest_and_grpc_have_the_same_members(
    model: Any, message: Any, rest: set[str], rpc: set[str]
) -> None:
    descriptor: Descriptor = message.DESCRIPTOR
    known = {field.name for field in descriptor.fields} - rpc
    named = {each.name for each in fields(model)} if is_dataclass(model) else {*model.model_fields}
    assert {find_field(descriptor, name) for name in named - rest} == known
    if rpc == OUTSIDE:  # a member that is not there stays as it is
        assert all(name in descriptor.fields_by_name for name in known)


@pytest.mark.parametrize(
    "number", [float("nan"), float("inf"), -float("inf")], ids=["nan", "inf", "-inf"]
)
def test_numbers_that_json_has_not_are_refused(number: float) -> None:
    settings = Struct()
    settings.fields["a"].list_value.values.add().number_value = number
    for request, field in (
        (
            pb.CreateSessionRequest(research=pb.Research(method_settings=settings)),
            "research.method_settings",
        ),
        (
            pb.CreateSessionRequest(tools=[pb.Tool(name="f", parameters='{"a": NaN}')]),
            "tools.0.function.parameters",
        ),
    ):
        with pytest.raises(ValidationError) as refused:
            parse_body(sessions.CreateSessionBody, request)
        assert ".".join(map(str, refused.value.errors()[0]["loc"])) == field


def test_whole_numbers_of_settings_stay_integers_and_unset_values_are_null() -> None:
    settings = Struct()
    settings.update({"a": 8, "b": 0.5, "c": [1, "x", True, None], "d": {"e": -2}, "f": 1e300})
    settings.fields["g"].SetInParent()
    read = read_message(pb.Research(method_settings=settings))["method_settings"]
    expected = {"a": 8, "b": 0.5, "c": [1, "x", True, None], "d": {"e": -2}, "f": 1e300, "g": None}
    assert read == expected
    assert [type(value) for value in (read["a"], read["c"][0], read["f"])] == [int, int, float]


def test_enums_that_nobody_knows_are_refused_by_their_number() -> None:
    request = pb.SendTurnRequest(messages=[pb.Message(content="x")])
    request.messages[0].role = 99  # type: ignore[assignment]
    assert read_message(request)["messages"] == [{"role": "99", "content": "x"}]
    assert fill_message(pb.Turn(), {"finish_reason": "new"}).finish_reason == 0


def test_times_and_durations_have_protobufs_types() -> None:
    totals = client.RepairTotals(
        repairs=1,
        signals=("turn",),
        scored_rows=2,
        promoted=3,
        demoted=4,
        seconds=1.25,
        truncated=0,
        skipped=0,
    )
    built = build_message(pb.RepairTotals, totals)
    assert (built.duration.seconds, built.duration.nanos) == (1, 250_000_000)
    assert list(built.signals) == [pb.REPAIR_TRIGGER_TURN]
    at = datetime(2026, 1, 2, 3, 4, 5, 678000, UTC)
    filled = fill_message(pb.PastRepair(), {"at": at})
    assert filled.at.ToDatetime(UTC) == at
    request = pb.Research()
    request.repair_timeout.FromMilliseconds(1500)
    assert read_message(request) == {"repair_seconds": 1.5}


def test_log_probabilities_have_the_bytes_of_their_tokens() -> None:
    token = {"token": "é", "bytes": [195, 169], "logprob": -0.5}
    built = fill_message(pb.TextDelta(), {"text": "é", "logprobs": [{**token, "top": [token]}]})
    (first,) = built.logprobs
    assert (first.utf8, first.logprob, first.top[0].utf8) == ("é".encode(), -0.5, "é".encode())


@pytest.mark.parametrize(
    ("kind", "path", "field"),
    [
        (pb.CreateSessionRequest, "research.repair_seconds", "research.repair_timeout"),
        (pb.CreateSessionRequest, "tools[1].function.name", "tools[1].name"),
        (pb.CreateSessionRequest, "metadata.a.b", "metadata.a.b"),
        (
            pb.SendTurnRequest,
            "messages[0].tool_calls[2].function.arguments",
            "messages[0].tool_calls[2].arguments",
        ),
        (pb.SendEventRequest, "delta", "delta"),
        (pb.SendEventRequest, "x-kvrecall-tenant", "x-kvrecall-tenant"),
    ],
)
def test_paths_of_fields_are_those_of_the_message(kind: Any, path: str, field: str) -> None:
    assert find_field(kind.DESCRIPTOR, path) == field
