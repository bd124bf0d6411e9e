"""What a turn does not name is sampled as the operator says, else as the model recommends."""

from typing import Any

import pytest

from kvrecall.domain.limits import ServiceLimits
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.testing import StubWorker
from tests.gateway.contract.clients import Client

MESSAGES = {"messages": [{"role": "user", "content": "hello"}]}
CHOSEN = {
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 9,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
}


@pytest.fixture
def service_settings() -> ServiceLimits:
    chosen = {f"default_{name}": value for name, value in CHOSEN.items()}
    return ServiceLimits.model_validate({"default_max_tokens": 50, **chosen})


@pytest.mark.parametrize(
    ("named", "sampled"),
    [
        ({}, {}),
        ({"temperature": 0.0}, dict.fromkeys(CHOSEN, 0)),
        ({"temperature": 0.0, "min_p": 0.5}, dict.fromkeys(CHOSEN, 0) | {"min_p": 0.5}),
        ({"top_p": 1.0, "top_k": 0}, {"top_p": 0.0, "top_k": 0}),
        ({"min_p": 0.0, "repetition_penalty": 1.0}, {"min_p": 0.0, "repetition_penalty": 0.0}),
    ],
)
async def test_values_of_a_request_win_one_by_one(
    client: Client,
    worker: StubWorker,
    monkeypatch: pytest.MonkeyPatch,
    named: dict[str, Any],
    sampled: dict[str, Any],
) -> None:
    seen = []
    worker_turn = worker.turn

    def record_turn(request: pb.TurnRequest) -> Any:
        seen.append(request.sampling)
        return worker_turn(request)

    monkeypatch.setattr(worker, "turn", record_turn)
    session = (await client.create({"budget": 64}))["id"]
    await client.turn(session, {**MESSAGES, "seed": 1, **named})
    default: dict[str, Any] = CHOSEN | {"max_tokens": 50, "seed": 1}
    assert seen == [pb.Sampling(**{**default, **sampled})]
