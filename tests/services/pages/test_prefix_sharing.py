"""Sessions of a tenant that begin in the same words share the rows of these.

Nothing else is ever shared.
"""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvrecall.domain.errors import WorkerLost
from kvrecall.domain.messages import Message
from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.session import Session
from kvrecall.domain.session_settings import RepairTrigger, SessionSettings
from kvrecall.domain.settings.prefill import Prefill
from kvrecall.domain.settings.repair import RepairSettings
from kvrecall.domain.settings.reselection import Reselection
from kvrecall.domain.settings.retrieval import Retrieval
from kvrecall.domain.worker_info import WorkerInfo
from kvrecall.protocol.convert import worker_info_from_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.forks import ForkRequest
from services.pages.prefix_sharing import prefix_digest

SYSTEM = Message("system", "you help people with everything they want")
ANN = Message("user", "my name is ann")
BEN = Message("user", "my name is ben")
TOOL = '{"type": "function", "function": {"name": "weather"}}'
SETTINGS = SessionSettings(budget=64, repair_rows=8, method="snapkv", tenant="ann")
SESSION = Session("s_1", 1, SETTINGS, 0.0, 0.0, 0, MemoryReport())


def build_info(fingerprint: str = "f00d", block_tokens: int = 32) -> WorkerInfo:
    return worker_info_from_wire(
        pb.WorkerInfo(
            fingerprint=fingerprint,
            block_tokens=block_tokens,
            page_tokens=4,
            methods=[
                pb.MethodInfo(name="snapkv"),
                pb.MethodInfo(name="streaming_llm", by_position=True),
                pb.MethodInfo(name="icecache", by_position=True, attends_stored=True),
            ],
        )
    )


INFO = build_info()


def digest(
    leading: tuple[Message, ...] = (SYSTEM,), info: WorkerInfo = INFO, **settings: Any
) -> str:
    return prefix_digest(replace(SESSION, settings=replace(SETTINGS, **settings)), leading, info)


async def begun(harness, *messages: Message, **settings: Any) -> str:
    """A session that has had its first turn."""
    session = await harness.session(**settings)
    await harness.say(session, *messages)
    return session


async def test_a_session_that_begins_as_another_did_shares_its_pages(harness) -> None:
    first = await begun(harness, SYSTEM, ANN)
    second = await begun(harness, SYSTEM, BEN)
    assert [prefix.owner for prefix in harness.worker.prefixes] == [first]
    assert len(harness.worker.prefixes[0].token_ids) == 12
    assert harness.get_shared_pages((await harness.service.get(second))[0]) == [(first, 3)]
    assert (await harness.service.get(first))[0].shared == ()


async def test_an_opened_session_goes_on_with_the_pages_it_shares(harness) -> None:
    first = await begun(harness, SYSTEM, ANN)
    second = await begun(harness, SYSTEM, BEN)
    await harness.crash()
    await harness.say(second, ANN)
    assert harness.get_shared_pages(harness.worker.specs[second]) == [(first, 3)]
    assert harness.worker.prefixes == []


@pytest.mark.parametrize(
    "unlike", [{"tenant": "other"}, {"budget": 65}, {"method": "full"}, {"tools": (TOOL,)}]
)
async def test_nothing_is_shared_between_tenants_or_unlike_sessions(harness, unlike) -> None:
    await begun(harness, SYSTEM, ANN)
    other = await begun(harness, SYSTEM, ANN, **unlike)
    assert harness.worker.prefixes == []
    assert (await harness.service.get(other))[0].shared == ()


async def test_without_system_message_and_tools_nothing_is_shared(harness) -> None:
    await begun(harness, ANN)
    await begun(harness, ANN)
    assert harness.worker.prefixes == []


async def test_tools_alone_are_a_beginning(harness) -> None:
    await begun(harness, ANN, tools=(TOOL,))
    await begun(harness, ANN, tools=(TOOL,))
    assert len(harness.worker.prefixes) == 1


async def test_a_later_turn_shares_nothing(harness) -> None:
    session = await begun(harness, SYSTEM, ANN)
    await harness.say(session, SYSTEM, ANN)
    assert harness.worker.prefixes == []


async def test_pages_that_were_not_taken_are_given_back(harness) -> None:
    first = await begun(harness, SYSTEM, ANN)
    harness.worker.words.clear()
    harness.worker.shares = False
    second = await begun(harness, SYSTEM, BEN)
    assert (await harness.service.get(second))[0].shared == ()
    await harness.service.delete(first)
    assert harness.worker.dropped == [(first, 0)]


async def test_a_first_turn_that_fails_is_tried_again_with_the_same_pages(harness) -> None:
    first = await begun(harness, SYSTEM, ANN)
    second = await harness.session()
    harness.worker.faults["done"] = WorkerLost("gone")
    with pytest.raises(WorkerLost):
        await harness.say(second, SYSTEM, BEN)
    await harness.say(second, SYSTEM, BEN)
    assert harness.get_shared_pages((await harness.service.get(second))[0]) == [(first, 3)]


async def test_a_deleted_session_leaves_what_others_share_and_is_offered_no_more(harness) -> None:
    first = await begun(harness, SYSTEM, ANN)
    second = await begun(harness, SYSTEM, BEN)
    await harness.service.delete(first)
    assert harness.worker.dropped == [(first, 3)]
    third = await begun(harness, SYSTEM, ANN)
    assert len(harness.worker.prefixes) == 1
    await harness.service.delete(second)
    await harness.sweep()
    assert set(harness.worker.dropped[1:]) == {(second, 0), (first, 0)}
    await begun(harness, SYSTEM, BEN)
    assert harness.worker.prefixes[-1].owner == third


async def test_a_worker_that_cannot_read_another_ones_pages_offers_its_own(harness) -> None:
    first = await begun(harness, SYSTEM, ANN)
    harness.worker.names, harness.worker.shares = ["two"], False
    second = await begun(harness, SYSTEM, BEN)
    harness.worker.shares = True
    await begun(harness, SYSTEM, ANN)
    harness.worker.names = ["one"]
    await begun(harness, SYSTEM, BEN)
    harness.worker.names = ["three"]
    await begun(harness, SYSTEM, ANN)
    assert [prefix.owner for prefix in harness.worker.prefixes] == [first, second, first, first]


async def test_a_prefix_that_a_worker_could_take_is_the_only_one(harness) -> None:
    first = await begun(harness, SYSTEM, ANN)
    harness.worker.names = ["two"]
    await begun(harness, SYSTEM, BEN)
    await harness.service.delete(first)
    harness.worker.prefixes.clear()
    await begun(harness, SYSTEM, ANN)
    assert harness.worker.prefixes == []


async def test_first_words_of_less_than_a_page_are_not_offered(harness) -> None:
    await begun(harness, Message("system", "x"), Message("user"))
    await begun(harness, Message("system", "x"), ANN)
    assert harness.worker.prefixes == []


async def test_pages_stay_that_a_turn_is_about_to_share(harness) -> None:
    first = await begun(harness, SYSTEM, ANN)
    second = await harness.session()
    harness.worker.gates["token"] = asyncio.Event()
    harness.worker.reached["token"].clear()
    saying = asyncio.create_task(harness.say(second, SYSTEM, BEN))
    await harness.worker.reached["token"].wait()
    await harness.service.delete(first)
    assert harness.worker.dropped == [(first, 3)]
    harness.worker.gates["token"].set()
    await saying
    assert harness.get_shared_pages((await harness.service.get(second))[0]) == [(first, 3)]


async def test_a_fork_of_a_session_that_shares_names_both_owners(harness) -> None:
    first = await begun(harness, SYSTEM, ANN)
    second = await begun(harness, SYSTEM, BEN)
    await harness.say(second, ANN)
    child = await harness.service.fork(second, ForkRequest())
    assert harness.get_shared_pages(child) == [(first, 3), (second, 5)]
    await harness.service.delete(first)
    await harness.service.delete(second)
    assert harness.worker.dropped == [(first, 3), (second, 5)]


CHANGES = [
    {"tenant": "ben"},
    {"budget": 65},
    {"repair_rows": 9},
    {"method": "full"},
    {"method_settings": {"window": 8}},
    {"layer_budgets": "pyramid"},
    {"repair_settings": RepairSettings(contrast=1.0)},
    {"prefill": Prefill(sparse="auto")},
    {"retrieve": Retrieval(share=0.5)},
    {"tools": (TOOL,)},
    {"leading": (SYSTEM, SYSTEM)},
    {"leading": (Message("system", "you help people with everything they want "),)},
    {"info": build_info(fingerprint="beef")},
    {"info": build_info(block_tokens=64)},
]


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_shapes_rows_changes_the_digest(change) -> None:
    assert digest(**change) != digest()


RECALLING: dict[str, Any] = {"method": "icecache"}


@pytest.mark.parametrize(
    "same",
    [
        {"budget": 65},
        {"repair_rows": 9},
        {"method_settings": {"sinks": 8}},
        {"layer_budgets": "pyramid"},
        {"repair_settings": RepairSettings(contrast=1.0)},
        {"retrieve": Retrieval(share=0.5)},
        {"prefill": Prefill(attend="stored")},
        {"method": "streaming_llm", "prefill": Prefill(attend="stored")},
        {"seed": 9},
    ],
)
def test_a_selection_by_position_shapes_no_rows_of_prompts_that_attend_to_every_row(same) -> None:
    assert digest(**RECALLING | same) == digest(**RECALLING)


@pytest.mark.parametrize(
    "unlike",
    [
        {"tenant": "ben"},
        {"tools": (TOOL,)},
        {"leading": (SYSTEM, SYSTEM)},
        {"prefill": Prefill(attend="active")},
        {"prefill": Prefill(attend="stored"), "method": "snapkv"},
        {"method": "streaming_llm"},
        {"info": build_info(fingerprint="beef")},
        {"info": build_info(block_tokens=64)},
    ],
)
def test_other_rows_have_another_digest_where_prompts_attend_to_every_row(unlike) -> None:
    assert digest(**RECALLING | unlike) != digest(**RECALLING)


def test_what_shapes_no_rows_leaves_the_digest() -> None:
    same: dict[str, Any] = {
        "metadata": {"a": "b"},
        "repair_on": frozenset({RepairTrigger.TURN}),
        "repair_seconds": 1.0,
        "reselect": Reselection(every=4, first=4),
        "seed": 9,
    }
    assert digest(**same) == digest()


def test_a_seed_counts_where_evictions_follow_from_it() -> None:
    assert digest(method="random", seed=1) != digest(method="random", seed=2)


def test_a_seed_counts_where_blocks_are_prefilled_sparsely() -> None:
    for prefill, alike in ((Prefill(sparse="on"), False), (Prefill(sparse="off"), True)):
        digests = {digest(prefill=prefill, seed=seed) for seed in (1, 2)}
        assert (len(digests) == 1) == alike


async def test_sessions_of_unlike_prefill_share_no_pages(harness) -> None:
    sparse = Prefill(sparse="on")
    first = await begun(harness, SYSTEM, ANN)
    unlike = await begun(harness, SYSTEM, BEN, prefill=sparse, seed=3)
    assert harness.get_shared_pages((await harness.service.get(unlike))[0]) == []
    alike = await begun(harness, SYSTEM, BEN, prefill=sparse, seed=3)
    assert harness.get_shared_pages((await harness.service.get(alike))[0]) == [(unlike, 3)]
    assert first != unlike
