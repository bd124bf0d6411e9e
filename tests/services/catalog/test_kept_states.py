"""Worker states at the ends of turns, which forks there begin with."""

from collections.abc import Callable
from dataclasses import replace

from kvrecall.domain.sessions.session import Session
from services.catalog.base import Catalog
from services.catalog.records import KeptState, TurnCommit
from services.catalog.serialization import pack

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]


async def test_the_last_states_are_kept_and_each_16th_before(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    for number in range(1, 36):
        kept = KeptState(pack(b"state %d" % number), 3)
        await catalog.turns.commit(replace(make_turn("s", number), kept=kept), 1, None)
    states = {number: await catalog.turns.get_state("s", number) for number in range(37)}
    assert {number for number, state in states.items() if state is not None} == {
        16,
        32,
        33,
        34,
        35,
    }
    assert states[16] == b"state 16"
    assert await catalog.turns.get_state("unknown", 16) is None


async def test_no_state_is_kept_unless_it_is_asked_for(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.turns.commit(make_turn("s", 1), 1, None)
    assert await catalog.turns.get_state("s", 1) is None


async def test_kept_states_go_with_their_session(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    commit = replace(make_turn("s", 1), kept=KeptState(pack(b"state"), 3))
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.turns.commit(commit, 1, None)
    await catalog.sessions.delete("s", None)
    await catalog.sessions.create(make_session("t"), b"", None)
    assert await catalog.turns.get_state("s", 1) is None
