"""Agent over the gRPC API: a streamed turn, a tool call with its result, and an error with details.

The stubs come with the package: pip install './kvrecall[grpc]'. The server needs --grpc HOST:PORT.
"""

import argparse
import json
from collections.abc import Sequence

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kvrecall.protocol.sessions_v1 import sessions_pb2 as pb
from kvrecall.protocol.sessions_v1.sessions_pb2_grpc import SessionsStub

ON_CALL = pb.Tool(
    name="on_call",
    description="Who is on call on a day.",
    parameters=json.dumps(
        {"type": "object", "properties": {"day": {"type": "string"}}, "required": ["day"]}
    ),
)
SYSTEM = pb.Message(role=pb.ROLE_SYSTEM, content="Answer shortly and use the latest facts.")
TURN_SECONDS = 300.0


def say(
    stub: SessionsStub, session: str, messages: Sequence[pb.Message], generate: bool = True
) -> pb.Turn:
    """Send messages and print the reply as it is generated; return the committed turn.

    The deadline holds for the whole turn: when it passes, the service cancels the turn.
    """
    request = pb.SendTurnRequest(
        session=session,
        messages=messages,
        generate=generate,
        max_tokens=60,
        wait_for_repairs=True,
    )
    turn = pb.Turn()
    for event in stub.StreamTurn(request, timeout=TURN_SECONDS):
        match event.WhichOneof("event"):
            case "text":
                print(event.text.text, end="", flush=True)
            case "tool_call":
                print(f"the model calls {event.tool_call.name}({event.tool_call.arguments})")
            case "turn":
                turn = event.turn
    print()
    return turn


def answer_calls(stub: SessionsStub, session: str, turn: pb.Turn) -> None:
    """Run the tools of a turn and report their results; a real agent would look them up."""
    for call in turn.message.tool_calls:
        result = json.dumps({"person": "Melnor"})
        stub.SendEvent(
            pb.SendEventRequest(
                session=session,
                call_id=call.id,
                completed=pb.ToolCallResult(result=result),
                idempotency_key=f"result-{call.id}",
            )
        )


def describe_error(error: grpc.RpcError) -> str:
    """Return the code of an error, and the field at fault if there is one."""
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        detail.Unpack(info)
        detail.Unpack(request)
    fields = ", ".join(violation.field for violation in request.field_violations)
    return f"{info.reason} at {fields}" if fields else info.reason


def main() -> None:
    """Hold a conversation with a tool, then ask for what the service refuses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:8430", help="HOST:PORT of the gRPC API")
    with grpc.insecure_channel(parser.parse_args().address) as channel:
        stub = SessionsStub(channel)
        created = stub.CreateSession(
            pb.CreateSessionRequest(
                budget=256, research=pb.Research(repair_rows=64), seed=1, tools=[ON_CALL]
            )
        )
        say(stub, created.id, [SYSTEM], generate=False)
        for text in (
            "Please note that the extension list says Melnor K4821.",
            "Who is on call tonight, and what is their extension?",
        ):
            turn = say(stub, created.id, [pb.Message(role=pb.ROLE_USER, content=text)])
            while turn.message.tool_calls:
                answer_calls(stub, created.id, turn)
                turn = say(stub, created.id, [])
        for repair in turn.memory.repairs:
            print(f"repair on {pb.RepairTrigger.Name(repair.trigger)}: {repair.promoted} rows")
        memory = stub.GetMemory(pb.GetMemoryRequest(session=created.id))
        print(f"{memory.active_rows} of {memory.length} rows active")
        stub.DeleteSession(pb.DeleteSessionRequest(session=created.id))
        try:
            stub.CreateSession(pb.CreateSessionRequest(budget=1))
        except grpc.RpcError as error:
            print(f"refused: {describe_error(error)}")


if __name__ == "__main__":
    main()
