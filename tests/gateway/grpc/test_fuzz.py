"""Random bytes and random messages to every call: a refusal of the API, never a failure of it."""

from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrecall.protocol.sessions_v1 import sessions_pb2 as pb
from kvrecall.protocol.v1 import worker_pb2
from services.reading.search import SessionQuery
from tests.gateway.contract.grpc_client import read_status

SERVICE = pb.DESCRIPTOR.services_by_name["Sessions"]
METHODS = list(SERVICE.methods)
FAILURES = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED}
EXAMPLES = 100
SESSION = "s_fuzz"
# Words that lead further into the service than random text does.
WORDS = [
    SESSION,
    SESSION,
    "s_none",
    "user",
    "full",
    "epicache",
    "scripted",
    "c1",
    "{}",
    '{"a": NaN}',
    "\0",
    "",
]
INTEGERS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
}
TEXT = st.one_of(
    st.sampled_from(WORDS), st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
)


def messages(descriptor: Descriptor, depth: int = 3) -> st.SearchStrategy[Any]:
    """Random messages of a type: any subset of its fields, with values of any kind."""
    fields = {
        field.name: values(field, depth)
        for field in descriptor.fields
        if depth or field.message_type is None
    }
    kind: Any = GetMessageClass(descriptor)
    return st.fixed_dictionaries({}, optional=fields).map(lambda chosen: kind(**chosen))


def values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    """Random values of a field."""
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        of = kind.fields_by_name["value"]
        keys = single(kind.fields_by_name["key"], depth)
        return st.dictionaries(keys, single(of, depth - 1), max_size=3)
    if field.is_repeated:
        return st.lists(single(field, depth), max_size=3)
    return single(field, depth)


def single(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    """Random values of a field that is not repeated."""
    if field.message_type is not None:
        return messages(field.message_type, max(0, depth - 1))
    if field.enum_type is not None:
        return st.one_of(st.sampled_from(list(field.enum_type.values_by_number)), st.just(77))
    if field.type in INTEGERS:
        low, high = INTEGERS[field.type]
        return st.one_of(st.integers(0, 300), st.integers(low, high))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return st.one_of(st.floats(0, 2), st.floats())
    return TEXT


async def find_session(rpc: Any) -> str:
    """Return the session that requests may name; one that waits for the result of `c1`."""
    found = await rpc.service.reading.search(SessionQuery(1), "")
    if found.sessions:
        return str(found.sessions[0][0].id)
    session = (
        await rpc.stub.CreateSession(
            pb.CreateSessionRequest(budget=64, research=pb.Research(repair_rows=0))
        )
    ).id
    rpc.worker.script = [[worker_pb2.ToolCall(id="c1", name="f", arguments="{}")]]
    user = [pb.Message(role=pb.ROLE_USER, content="hello")]
    await rpc.stub.SendTurn(pb.SendTurnRequest(session=session, messages=user))
    return str(session)


async def describe_state(rpc: Any) -> list[Any]:
    """Everything that requests may change: settings, turns and calls of all sessions."""
    page = await rpc.service.reading.search(SessionQuery(200), "")
    return [(each.id, each.settings, each.turns, each.calls) for each, _ in page.sessions]


async def find_refusal(
    rpc: Any, method: MethodDescriptor, request: bytes
) -> grpc.aio.AioRpcError | None:
    """Send a request and read the answer to its end; return the error, if it is one."""
    path = f"/{SERVICE.full_name}/{method.name}"
    try:
        if method.server_streaming:
            async for _ in rpc.channel.unary_stream(path)(request):
                pass
        else:
            await rpc.channel.unary_unary(path)(request)
    except grpc.aio.AioRpcError as error:
        return error
    return None


async def send(rpc: Any, method: MethodDescriptor, request: bytes) -> None:
    """Send a request; a refusal is one of the API's own and changes nothing."""
    before = await describe_state(rpc)
    refusal = await find_refusal(rpc, method, request)
    if refusal is not None:
        assert refusal.code() not in FAILURES, refusal
        assert read_status(refusal).code
        assert await describe_state(rpc) == before
    for id, *_ in (await describe_state(rpc))[:-1]:  # but one: the next request needs it
        await rpc.service.delete(id)


FUZZED = settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@FUZZED
@given(method=st.sampled_from(METHODS), request=st.binary(max_size=120))
async def test_random_bytes_are_answered_or_refused(
    rpc: Any, method: MethodDescriptor, request: bytes
) -> None:
    await find_session(rpc)
    await send(rpc, method, request)


@pytest.mark.parametrize("method", METHODS, ids=[method.name for method in METHODS])
@FUZZED
@given(data=st.data())
async def test_random_messages_are_answered_or_refused(
    rpc: Any, method: MethodDescriptor, data: st.DataObject
) -> None:
    session = await find_session(rpc)
    request = data.draw(messages(method.input_type))
    if "session" in method.input_type.fields_by_name and request.session == SESSION:
        request.session = session
    await send(rpc, method, request.SerializeToString())


@FUZZED
@given(data=st.data())
async def test_damaged_messages_are_answered_or_refused(rpc: Any, data: st.DataObject) -> None:
    session = await find_session(rpc)
    whole = pb.SendTurnRequest(
        session=session,
        messages=[pb.Message(role=pb.ROLE_TOOL, content="rain", tool_call_id="c1")],
        max_tokens=5,
        stop=["\n"],
    ).SerializeToString()
    request = bytearray(whole)
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=3)):
        request[at] = data.draw(st.integers(0, 255))
    method = SERVICE.methods_by_name[data.draw(st.sampled_from(["SendTurn", "StreamTurn"]))]
    await send(rpc, method, bytes(request[: data.draw(st.integers(0, len(whole)))]))
