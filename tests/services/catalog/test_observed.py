"""Calls of the catalog: each is of one kind, is timed, and its failures are its own."""

import inspect
from collections.abc import Callable

import pytest

from kvrecall.domain.errors import StaleEpoch, UnknownSession
from kvrecall.domain.events import ServiceEvent, WriterFenced
from kvrecall.domain.sessions.session import Session
from services.catalog import base
from services.catalog.api_keys import ApiKeys
from services.catalog.encryption.data_keys import DataKeys
from services.catalog.observed import CatalogCall, Kind, ObservedCatalog, get_kind
from services.catalog.responses import Responses, StoredConversations

AGGREGATES = {
    "api_keys": ApiKeys,
    "conversations": StoredConversations,
    "data_keys": DataKeys,
    "episodes": base.Episodes,
    "expiry": base.Expiry,
    "histories": base.Histories,
    "idempotency": base.Idempotency,
    "leases": base.Leases,
    "memories": base.Memories,
    "pages": base.Pages,
    "repairs": base.Repairs,
    "responses": Responses,
    "sessions": base.Sessions,
    "tool_calls": base.ToolCalls,
    "turns": base.Turns,
}
KINDS: dict[Kind, str] = {
    "claim": """
        conversations.claim conversations.release leases.claim leases.release leases.take_over
    """,
    "list": """
        api_keys.get_all conversations.get_all expiry.get_expired expiry.get_next
        memories.get_newest
        pages.get_dead sessions.get_ids sessions.get_page
        tool_calls.get_idle_sessions
    """,
    "commit": """
        api_keys.add api_keys.revoke api_keys.touch conversations.add_items conversations.create
        conversations.delete conversations.delete_item conversations.update data_keys.delete episodes.clear
        episodes.commit_build episodes.commit_segments
        pages.confirm_deleted pages.drop_abandoned repairs.commit responses.delete responses.store
        sessions.create sessions.delete sessions.fork sessions.restore tool_calls.commit
        turns.commit turns.commit_settled
    """,
    "read": """
        api_keys.exist api_keys.get conversations.get conversations.get_item
        conversations.get_items data_keys.get_key episodes.get episodes.get_built episodes.get_segments
        histories.find idempotency.get pages.count_dead pages.find_live
        pages.find_unknown
        repairs.get_latest responses.get sessions.count sessions.count_by_state sessions.get
        sessions.get_page_ids sessions.get_use sessions.get_worker_state
        tool_calls.get tool_calls.get_pieces tool_calls.get_time turns.get_after turns.get_state
        turns.get_token_ids
    """,
}


def test_every_call_of_every_aggregate_is_of_the_kind_that_its_metric_says() -> None:
    found: dict[str, Kind] = {
        f"{name}.{method}": get_kind(name, method)
        for name, aggregate in AGGREGATES.items()
        for method, _ in inspect.getmembers(aggregate, inspect.iscoroutinefunction)
    }
    expected = {call: kind for kind, calls in KINDS.items() for call in calls.split()}
    assert found == expected


def test_the_aggregates_of_a_catalog_are_all_observed() -> None:
    properties = inspect.getmembers(base.Catalog, lambda member: isinstance(member, property))
    assert {name for name, _ in properties} - {"id", "secret"} == {*AGGREGATES}


async def test_a_call_is_reported_once_and_a_refusal_is_not_a_failure(
    catalog: base.Catalog, make_session: Callable[..., Session]
) -> None:
    events: list[ServiceEvent] = []
    calls: list[CatalogCall] = []
    observed = ObservedCatalog(catalog, events.append)
    observed.observe(calls.append)
    await observed.sessions.create(make_session("s"), b"", None)
    with pytest.raises(UnknownSession):
        await observed.sessions.get("another")
    assert [(call.kind, call.failed) for call in calls] == [("commit", False), ("read", False)]
    assert all(call.seconds > 0 for call in calls)
    assert not events


async def test_a_former_writer_is_an_event_and_no_failure_of_the_catalog(
    catalog: base.Catalog, make_session: Callable[..., Session]
) -> None:
    events: list[ServiceEvent] = []
    calls: list[CatalogCall] = []
    await catalog.sessions.create(make_session("s"), b"", None)
    epoch = (await catalog.leases.claim("s", "one", 60)).epoch
    await catalog.leases.take_over("s", "w-2")
    observed = ObservedCatalog(catalog, events.append)
    observed.observe(calls.append)
    with pytest.raises(StaleEpoch):
        await observed.episodes.clear("s", epoch)
    assert events == [WriterFenced("catalog")]
    assert [(call.kind, call.failed) for call in calls] == [("commit", False)]
