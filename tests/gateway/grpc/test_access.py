"""Keys, scopes and rates of gRPC calls: every call x every kind of wrong key."""

import time
from collections.abc import Awaitable, Callable
from ipaddress import ip_network
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from gateway.grpc.caller import get_rule_of_call, read_credentials
from gateway.grpc.handlers import SERVICE
from kvrecall.domain.errors import InvalidRequest
from kvrecall.protocol.sessions_v1 import sessions_pb2 as pb
from services.access.authenticator import AccessPolicy
from services.access.keys import digest_key, get_pepper_id, make_key
from services.access.principals import Scope
from services.access.settings import AccessSettings
from services.catalog.api_keys import KeyRecord
from tests.gateway.contract.clients import Refused
from tests.gateway.contract.grpc_client import read_status

PEPPER = b"0123456789abcdef"
MakeKey = Callable[..., Awaitable[str]]
Metadata = tuple[tuple[str, str], ...]
USER = [pb.Message(role=pb.ROLE_USER, content="hello")]


@pytest.fixture
def access_policy() -> AccessPolicy:
    return AccessPolicy(open=False, pepper=PEPPER)


@pytest.fixture
def make(rpc: Any) -> MakeKey:
    """make(tenant, *scopes, **fields): store a key and return it."""

    async def make_one(tenant: str, *scopes: Scope, **fields: Any) -> str:
        key = make_key()
        digest = digest_key(key, PEPPER)
        record = KeyRecord(
            key.id, digest, get_pepper_id(PEPPER), tenant, "", scopes, time.time(), **fields
        )
        await rpc.catalog.api_keys.add(record)
        return key.text

    return make_one


def bearer(key: str) -> Metadata:
    return (("authorization", f"Bearer {key}"),)


async def find_refusal(rpc: Any, call: str, metadata: Metadata, **fields: Any) -> Refused | None:
    """Send a call about the session `fields` name; return its refusal."""
    method = SERVICE.methods_by_name[call]
    kind: Any = GetMessageClass(method.input_type)
    known = {
        name: value for name, value in fields.items() if name in kind.DESCRIPTOR.fields_by_name
    }
    sent = getattr(rpc.stub, call)(kind(**known), metadata=metadata)
    try:
        if method.server_streaming:
            async for _ in sent:
                pass
        else:
            await sent
    except grpc.aio.AioRpcError as error:
        return read_status(error)
    return None


async def refuse_all(rpc: Any, metadata: Metadata, code: str) -> None:
    for method in SERVICE.methods:
        refused = await find_refusal(rpc, method.name, metadata, session="s_none")
        assert refused is not None
        assert refused.code == code, method.name


def test_every_call_needs_a_scope() -> None:
    for method in SERVICE.methods:
        assert get_rule_of_call(method.name).scopes
    computing = {m.name for m in SERVICE.methods if get_rule_of_call(m.name).computes}
    assert computing == {"SendTurn", "StreamTurn", "ForkSession"}


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        bearer("wrong"),
        bearer(f"kvr-{'a' * 51}"),
        (("x-api-key", "wrong"),),
        (("x-kvrecall-tenant", "ann"),),
        (("authorization", "Basic abc"),),
    ],
)
async def test_a_call_without_a_valid_key_reaches_nothing(rpc: Any, metadata: Metadata) -> None:
    await refuse_all(rpc, metadata, "invalid_api_key")


async def test_an_expired_revoked_or_forged_key_reaches_nothing(rpc: Any, make: MakeKey) -> None:
    expired = await make("ann", *Scope, expires_at=time.time() - 1)
    revoked, whole = await make("ann", *Scope), await make("ann", *Scope)
    await rpc.catalog.api_keys.revoke(revoked[4:12], time.time())
    for key in (expired, revoked, whole[:12] + make_key().secret):
        await refuse_all(rpc, bearer(key), "invalid_api_key")


async def test_a_key_reaches_the_calls_of_its_scopes_only(rpc: Any, make: MakeKey) -> None:
    await refuse_all(rpc, bearer(await make("ann")), "insufficient_scope")
    for scope in Scope:
        key = bearer(await make("ann", scope))
        for method in SERVICE.methods:
            refused = await find_refusal(rpc, method.name, key, session="s_none")
            allowed = scope in get_rule_of_call(method.name).scopes
            assert (refused is not None and refused.code == "insufficient_scope") != allowed


async def test_another_tenants_session_is_as_unknown_as_a_missing_one(
    rpc: Any, make: MakeKey
) -> None:
    own, foreign = bearer(await make("ann", *Scope)), (("x-api-key", await make("ben", *Scope)),)
    session = (await rpc.stub.CreateSession(pb.CreateSessionRequest(), metadata=own)).id
    turn = {"messages": USER, "started": pb.ToolCallStarted(), "call_id": "c1"}
    for method in SERVICE.methods:
        if "session" not in method.input_type.fields_by_name:
            continue
        claimed = (*foreign, ("x-kvrecall-tenant", "ann"))  # not believed from a client
        refused = await find_refusal(rpc, method.name, claimed, session=session, **turn)
        missing = await find_refusal(rpc, method.name, claimed, session="s_none", **turn)
        assert refused is not None
        assert missing is not None
        assert refused.code == missing.code == "unknown_session", method.name
    listed = await rpc.stub.ListSessions(pb.ListSessionsRequest(), metadata=foreign)
    assert not listed.sessions
    await rpc.stub.DeleteSession(pb.DeleteSessionRequest(session=session), metadata=own)


async def test_a_key_in_the_wrong_place_is_not_repeated(rpc: Any, make: MakeKey) -> None:
    key = await make("ann", *Scope)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await rpc.stub.GetSession(pb.GetSessionRequest(session=key), metadata=bearer(key))
    assert key[12:] not in str(refused.value)
    assert key[12:] not in str(refused.value.trailing_metadata())


async def test_the_log_names_the_sender_of_a_turn(rpc: Any, make: MakeKey) -> None:
    key = await make("ann", *Scope)
    session = (await rpc.stub.CreateSession(pb.CreateSessionRequest(), metadata=bearer(key))).id
    sent = pb.SendTurnRequest(session=session, messages=USER)
    await rpc.stub.SendTurn(sent, metadata=bearer(key))
    (turn,) = await rpc.catalog.turns.get_after(session, 0, 1)
    sender = turn.outcome.sender
    assert sender is not None
    assert (sender.api, sender.key) == ("grpc", key[4:12])
    assert sender.client.startswith("grpc-python-asyncio/")


class TestRates:
    @pytest.fixture
    def access_settings(self) -> AccessSettings:
        return AccessSettings(key_requests_per_minute=4, key_tokens_per_minute=3)

    async def test_calls_and_tokens_over_a_rate_are_refused_for_a_while(
        self, rpc: Any, make: MakeKey
    ) -> None:
        key = bearer(await make("ann", *Scope))
        session = (await rpc.stub.CreateSession(pb.CreateSessionRequest(), metadata=key)).id
        call = rpc.stub.SendTurn(pb.SendTurnRequest(session=session, messages=USER), metadata=key)
        await call
        left = dict(await call.trailing_metadata())
        assert (left["x-ratelimit-limit-requests"], left["x-ratelimit-remaining-requests"]) == (
            "4",
            "2",
        )
        codes = []
        for name in ("SendTurn", "GetModel", "GetModel", "GetModel"):
            refused = await find_refusal(rpc, name, key, session=session, messages=USER)
            codes.append(refused and (refused.code, refused.retry))
        assert codes == [
            ("rate_limit_exceeded", True),  # of tokens: it counts for no request
            None,
            None,
            ("rate_limit_exceeded", True),
        ]


class TestProxies:
    @pytest.fixture
    def access_policy(self) -> AccessPolicy:
        return AccessPolicy(open=False, trusted_proxies=(ip_network("127.0.0.0/8"),))

    async def test_a_trusted_proxy_names_the_tenant(self, rpc: Any) -> None:
        ann: Metadata = (("x-kvrecall-tenant", "ann"),)
        await rpc.stub.CreateSession(pb.CreateSessionRequest(), metadata=ann)
        for tenant, count in (("ann", 1), ("ben", 0)):
            listed = await rpc.stub.ListSessions(
                pb.ListSessionsRequest(), metadata=(("x-kvrecall-tenant", tenant),)
            )
            assert len(listed.sessions) == count
        twice = await find_refusal(rpc, "ListSessions", (*ann, ("x-kvrecall-tenant", "ben")))
        assert twice is not None
        assert twice.code == "invalid_request"


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.1.2.3:5000", "10.1.2.3"),
        ("ipv6:%5B::1%5D:5000", "::1"),
        ("ipv6:[2001:db8::1]:5000", "2001:db8::1"),
        ("unix:", ""),
    ],
)
def test_the_peers_address_is_read_from_grpcs_name_of_it(peer: str, address: str) -> None:
    assert read_credentials((), peer).peer == address


def test_credentials_are_read_from_metadata() -> None:
    assert read_credentials((("authorization", "bearer  k1 "),), "").key == "k1"
    both = (("x-api-key", "k2"), ("authorization", "Bearer k1"))
    assert read_credentials(both, "").key == "k1"
    assert read_credentials((("authorization", "Basic k1"), ("x-api-key", "k2")), "").key == "k2"
    with pytest.raises(InvalidRequest):
        read_credentials((("x-kvrecall-tenant", "a"), ("x-kvrecall-tenant", "a")), "")
