"""Sessions of a tenant that begin in the same words share the rows of these.

Nothing else is ever shared.
"""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvrecall.domain.errors import WorkerLost
from kvrecall.domain.messages import Message
from kvrecall.domain.page_ids import ID_BYTES
from services.lifecycle.forks import ForkRequest

SYSTEM = Message("system", "you help people with everything they want")
ANN = Message("user", "my name is ann")
BEN = Message("user", "my name is ben")
TOOL = '{"type": "function", "function": {"name": "weather"}}'


async def begun(harness, *messages: Message, **settings: Any) -> str:
    """A session that has had its first turn."""
    session = await harness.session(**settings)
    await harness.say(session, *messages)
    return session


def get_owners(harness) -> list[list[tuple[str, int]]]:
    """The owners of the pages that were offered, with how many, of each turn."""
    return [harness.get_shared_pages(prefix) for prefix in harness.worker.prefixes]


async def test_a_session_that_begins_as_another_did_shares_its_pages(harness) -> None:
    first = await begun(harness, SYSTEM, ANN)
    second = await begun(harness, SYSTEM, BEN)
    assert get_owners(harness) == [[(first, 3)]]
    assert len(harness.worker.prefixes[0].page_ids) == 3 * ID_BYTES
    assert harness.get_shared_pages((await harness.service.get(second))[0]) == [(first, 3)]
    assert (await harness.service.get(first))[0].shared == ()


async def test_an_opened_session_goes_on_with_the_pages_it_shares(harness) -> None:
    first = await begun(harness, SYSTEM, ANN)
    second = await begun(harness, SYSTEM, BEN)
    await harness.crash()
    await harness.say(second, ANN)
    assert harness.get_shared_pages(harness.worker.specs[second]) == [(first, 3)]
    assert harness.worker.prefixes == []


async def test_nothing_is_shared_between_tenants(harness) -> None:
    await begun(harness, SYSTEM, ANN)
    other = await begun(harness, SYSTEM, ANN, tenant="other")
    assert harness.worker.prefixes == []
    assert (await harness.service.get(other))[0].shared == ()


async def test_pages_are_shared_under_one_salt_and_not_with_another(harness) -> None:
    first = await begun(harness, SYSTEM, ANN, cache_salt="one")
    for salt in ("other", ""):
        await begun(harness, SYSTEM, BEN, cache_salt=salt)
    assert harness.worker.prefixes == []
    second = await begun(harness, SYSTEM, BEN, cache_salt="one")
    assert harness.get_shared_pages((await harness.service.get(second))[0]) == [(first, 3)]


async def test_a_fork_has_the_salt_of_its_parent(harness) -> None:
    parent = await begun(harness, SYSTEM, ANN, cache_salt="one")
    child = await harness.service.fork(parent, ForkRequest())
    assert child.settings.cache_salt == "one"
    await harness.crash()
    assert (await harness.service.get(child.id))[0].settings.cache_salt == "one"


@pytest.mark.parametrize("unlike", [{"budget": 65}, {"method": "full"}, {"seed": 9}])
async def test_rows_do_not_depend_on_settings_as_long_as_all_are_active(harness, unlike) -> None:
    first = await begun(harness, SYSTEM, ANN)
    other = await begun(harness, SYSTEM, ANN, **unlike)
    assert harness.get_shared_pages((await harness.service.get(other))[0]) == [(first, 3)]


async def test_no_system_message_is_needed(harness) -> None:
    long = Message("user", SYSTEM.content)
    first = await begun(harness, long)
    await begun(harness, long, ANN)
    assert get_owners(harness) == [[(first, 2)]]


async def test_the_session_that_has_the_most_of_a_prompt_is_shared(harness) -> None:
    first = await begun(harness, SYSTEM, ANN)
    longer = replace(ANN, content=f"{ANN.content} and I live in a house by the sea")
    second = await begun(harness, SYSTEM, longer)
    await begun(harness, SYSTEM, longer, BEN)
    assert get_owners(harness) == [[(first, 3)], [(first, 3), (second, 5)]]


async def test_words_behind_a_change_are_not_shared(harness) -> None:
    first = await begun(harness, SYSTEM, ANN, BEN)
    changed = replace(SYSTEM, content=SYSTEM.content.replace("want", "need"))
    await begun(harness, changed, ANN, BEN)
    assert get_owners(harness) == [[(first, 1)]]


async def test_a_later_turn_shares_nothing(harness) -> None:
    session = await begun(harness, SYSTEM, ANN)
    await harness.say(session, SYSTEM, ANN)
    assert harness.worker.prefixes == []


async def test_pages_that_were_not_taken_are_given_back(harness) -> None:
    first = await begun(harness, SYSTEM, ANN)
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
    await harness.service.delete(second)
    await harness.sweep()
    assert set(harness.worker.dropped[1:]) == {(second, 0), (first, 0)}
    third = await begun(harness, SYSTEM, ANN)
    assert len(harness.worker.prefixes) == 1
    await begun(harness, SYSTEM, BEN)
    assert get_owners(harness)[-1] == [(third, 3)]


async def test_a_worker_is_offered_the_pages_of_its_own_sessions_first(harness) -> None:
    first = await begun(harness, SYSTEM, ANN)
    harness.worker.names, harness.worker.shares = ["two"], False
    second = await begun(harness, SYSTEM, BEN)
    harness.worker.shares = True
    await begun(harness, SYSTEM, ANN)
    harness.worker.names = ["one"]
    await begun(harness, SYSTEM, BEN)
    assert get_owners(harness) == [[(first, 3)], [(second, 3)], [(first, 3)]]


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
