"""The table of calls agrees with the service in worker.proto."""

from typing import Any

import pytest

from kvrecall.protocol.calls import CALLS, SERVICE, Call
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.cluster.settings import WireSettings
from services.cluster.worker_client import Worker, WorkerCalls

METHODS = pb.DESCRIPTOR.services_by_name["Worker"].methods_by_name


def test_every_rpc_of_the_service_is_in_the_table_in_its_order() -> None:
    assert SERVICE == "kvrecall.v1.Worker"
    assert [call.name for call in CALLS] == list(METHODS)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_a_call_has_the_messages_of_its_rpc(call: Call[Any, Any]) -> None:
    rpc = METHODS[call.name]
    assert call.request.DESCRIPTOR is rpc.input_type
    assert call.response.DESCRIPTOR is rpc.output_type
    assert call.streaming == rpc.server_streaming


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_a_call_is_a_method_of_the_protocol_with_a_time_limit(call: Call[Any, Any]) -> None:
    assert hasattr(Worker, call.method)
    assert call.method == "stats" or hasattr(WorkerCalls, call.method)
    assert getattr(WireSettings(), call.timeout) > 0


def test_method_names_are_in_snake_case() -> None:
    names = {call.name: call.method for call in CALLS}
    assert names["Open"] == "open"
    assert names["BuildEpisodes"] == "build_episodes"


def test_a_call_bound_to_a_session_knows_it_from_its_request() -> None:
    for call in CALLS:
        if call.session is not None:
            assert call.session(call.request(session="s")) == "s"
            assert not call.any_worker
