"""The care of episodes between turns.

What is built, when, and that it never stands in anybody's way.
"""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import ServiceError, WorkerLost, WorkerRefused
from kvrecall.domain.events import EpisodesBuilt, EpisodesFailed
from kvrecall.domain.messages import Message
from kvrecall.domain.settings.session import EpisodeSettings
from kvrecall.domain.tool_events import ToolEvent, ToolEventType
from kvrecall.domain.turn_request import TurnRequest
from kvrecall.protocol.v1 import worker_pb2 as pb

TEA = "kettle leaves brew steep cup"
TRAINS = "station rails ticket platform carriage"
SMALL = EpisodeSettings(count=2, segment_utterances=2, medoid_utterances=2, rebuild_growth=0.5)
"""A turn is a segment; four turns are enough to build."""

Chat = Callable[..., Awaitable[None]]


@pytest.fixture
def chat(harness) -> Chat:
    """Say a text per turn, each time answered with its own words.

    Wait for what follows unless told not to.
    """

    async def say(session: str, *texts: str, wait: bool = True) -> None:
        for text in texts:
            harness.worker.script = [text]
            await harness.say(session, Message("user", text))
            if wait:
                await harness.wait_until_idle(session)

    return say


@pytest.fixture
async def session(harness) -> str:
    """A session with episodes, and a budget that four turns are longer than."""
    return await harness.session(method="epicache", budget=16, repair_rows=0, episodes=SMALL)


@pytest.fixture
def told(harness) -> list:
    """What observers are told."""
    seen: list = []
    harness.service.observe(seen.append)
    return [seen]


async def labels(harness, session: str) -> list[int]:
    return [segment.label for segment in await harness.catalog.episodes.get_segments(session)]


async def building(harness, chat: Chat, session: str) -> None:
    """Talk until a build has begun, and is held."""
    harness.worker.gates["build"] = asyncio.Event()
    await chat(session, TEA, TRAINS, TEA)
    await chat(session, TRAINS, wait=False)
    await harness.worker.reached["build"].wait()


async def test_episodes_are_built_once_there_is_enough_to_build_them_from(
    harness, chat: Chat, session: str
) -> None:
    await chat(session, TEA, TRAINS, TEA)
    assert (await harness.catalog.episodes.get(session)).segments == 3
    assert harness.worker.builds == []
    await chat(session, TRAINS)
    found = await harness.catalog.episodes.get(session)
    assert (found.segments, found.built_segments, found.builds, found.active) == (4, 4, 1, "")
    assert [(each.id, each.segments, each.tokens) for each in found.episodes] == [
        ("1-1", 2, 22),
        ("1-2", 2, 22),
    ]
    assert found.episodes[0].medoid == f"user: {TEA}\nassistant: {TEA}"
    assert await labels(harness, session) == [0, 1, 0, 1]
    built = pb.Episode.FromString(await harness.catalog.episodes.get_built(session, "1-2"))
    assert (built.id, built.rows, built.length) == ("1-2", b"rows of 1-2", 44)


async def test_a_build_is_asked_for_in_the_logs_own_tokens(
    harness, chat: Chat, session: str
) -> None:
    await chat(session, TEA, TRAINS, TEA, TRAINS)
    (request,) = harness.worker.builds
    log = [
        token
        for turn in await harness.catalog.turns.get_after(session, 0, 9)
        for token in turn.token_ids
    ]
    first, second = request.plans
    assert list(first.patched_prompt) == log[0:11]
    assert list(second.patched_prompt) == log[11:22]
    spans = [(span.start, span.stop, span.similarity) for span in second.segments]
    assert spans == [(0, 11, 0), (11, 22, 1), (22, 33, 0.25), (33, 44, 1)]
    assert not request.token_ids


async def test_the_papers_own_build_gets_the_whole_log(harness, chat: Chat) -> None:
    settings = EpisodeSettings(2, 2, 2, "per_episode")
    session = await harness.session(method="epicache", budget=16, repair_rows=0, episodes=settings)
    await chat(session, TEA, TRAINS, TEA, TRAINS)
    log = [
        token
        for turn in await harness.catalog.turns.get_after(session, 0, 9)
        for token in turn.token_ids
    ]
    assert list(harness.worker.builds[0].token_ids) == log


async def test_a_session_within_its_budget_needs_no_episodes(harness, chat: Chat) -> None:
    session = await harness.session(method="epicache", budget=64, episodes=SMALL)
    await chat(session, TEA, TRAINS, TEA, TRAINS)
    assert harness.worker.builds == []
    await chat(session, TEA, TRAINS)
    assert len(harness.worker.builds) == 1


async def test_a_session_without_episodes_is_left_alone(harness, chat: Chat) -> None:
    session = await harness.session(budget=16, repair_rows=0)
    await chat(session, TEA, TRAINS, TEA, TRAINS)
    assert (harness.worker.embedded, harness.worker.builds) == ([], [])


async def test_new_segments_join_the_nearest_episode_until_it_is_time_to_build_again(
    harness, chat: Chat, session: str
) -> None:
    await chat(session, TEA, TRAINS, TEA, TRAINS, TRAINS)
    found = await harness.catalog.episodes.get(session)
    assert (found.segments, found.built_segments) == (5, 4)
    assert [(each.id, each.segments, each.tokens) for each in found.episodes] == [
        ("1-1", 2, 22),
        ("1-2", 3, 33),
    ]
    assert await labels(harness, session) == [0, 1, 0, 1, 1]
    await chat(session, TEA)
    found = await harness.catalog.episodes.get(session)
    assert [(each.id, each.segments) for each in found.episodes] == [("2-1", 3), ("2-2", 3)]
    assert found.built_segments == 6


async def test_every_segment_is_embedded_once_and_few_at_a_time(harness, session: str) -> None:
    said = [Message(("user", "assistant")[n % 2], f"word{n} {TEA}") for n in range(200)]
    await harness.say(session, *said, generate=False)
    await harness.wait_until_idle(session)
    assert [len(texts) for texts in harness.worker.embedded] == [32, 32, 32, 4]
    texts = [text for batch in harness.worker.embedded for text in batch]
    assert texts == [f"{said[n].content}\n{said[n + 1].content}" for n in range(0, 200, 2)]
    spans = [
        (segment.start, segment.stop)
        for segment in await harness.catalog.episodes.get_segments(session)
    ]
    assert spans == [(14 * n, 14 * n + 14) for n in range(100)]


async def test_utterances_that_are_no_whole_segment_yet_wait_for_the_next(harness) -> None:
    settings = EpisodeSettings(count=2, segment_utterances=3)
    session = await harness.session(method="epicache", budget=16, repair_rows=0, episodes=settings)
    for text in ("a", "b", "c", "d", "e"):
        harness.worker.script = [text.upper()]
        await harness.say(session, Message("user", text))
        await harness.wait_until_idle(session)
    assert [text for batch in harness.worker.embedded for text in batch] == [
        "a\nA\nb",
        "B\nc\nC",
        "d\nD\ne",
    ]


async def test_a_turn_breaks_a_build_off_and_it_is_done_later(
    harness, chat: Chat, session: str
) -> None:
    await building(harness, chat, session)
    await asyncio.wait_for(harness.say(session, Message("user", TEA)), 5)
    harness.worker.gates["build"].set()
    await harness.wait_until_idle(session)
    assert len(harness.worker.builds) == 1
    assert (await harness.catalog.episodes.get(session)).built_segments == 5


async def test_a_turn_that_fails_leaves_a_build_to_be_done_as_well(
    harness, chat: Chat, session: str
) -> None:
    await building(harness, chat, session)
    harness.worker.faults["turn"] = WorkerLost("gone")
    with pytest.raises(WorkerLost):
        await harness.say(session, Message("user", TEA))
    harness.worker.gates["build"].set()
    await harness.wait_until_idle(session)
    assert (await harness.catalog.episodes.get(session)).built_segments == 4


async def test_nothing_is_cared_for_while_a_turn_waits_for_another(
    harness, chat: Chat, session: str
) -> None:
    await chat(session, TEA, TRAINS, TEA)
    streams = [
        harness.service.turn(session, TurnRequest((Message("user", TRAINS),), queue=True))
        for _ in range(3)
    ]
    for stream in streams:
        _ = [progress async for progress in stream]
    await harness.wait_until_idle(session)
    assert len(harness.worker.builds) == 1
    assert (await harness.catalog.episodes.get(session)).segments == 6


async def test_a_repair_breaks_a_build_off_and_comes_first(
    harness, chat: Chat, call: Callable
) -> None:
    session = await harness.session(method="epicache", budget=24, repair_rows=8, episodes=SMALL)
    await chat(session, TEA, TRAINS, TEA)
    harness.worker.gates["build"] = asyncio.Event()
    harness.worker.script = [[call("c1", "Bern")]]
    await harness.say(session, Message("user", TRAINS))
    await harness.worker.reached["build"].wait()
    assert harness.worker.call_log[-1] == 'tool_call: weather {"city": "Bern"}'
    harness.worker.reached["repair"].clear()
    event = ToolEvent(ToolEventType.COMPLETED, "c1", "rain")
    await harness.service.event(session, event)
    await harness.worker.reached["repair"].wait()
    assert harness.worker.call_log[-1] == "tool_result: tool rain"
    assert harness.worker.builds == []
    harness.worker.gates["build"].set()
    await harness.wait_until_idle(session)
    assert len(harness.worker.builds) == 1


async def test_reports_that_call_for_no_repair_let_a_build_go_on(
    harness, chat: Chat, call: Callable
) -> None:
    session = await harness.session(method="epicache", budget=16, repair_rows=0, episodes=SMALL)
    await chat(session, TEA, TRAINS, TEA)
    harness.worker.gates["build"] = asyncio.Event()
    harness.worker.script = [[call("c1", "Bern")]]
    await harness.say(session, Message("user", TRAINS))
    await harness.worker.reached["build"].wait()
    (held,) = [task for task in asyncio.all_tasks() if task.get_name() == f"maintenance {session}"]
    await harness.service.event(session, ToolEvent(ToolEventType.DELTA, "c1", "ra"))
    harness.worker.gates["build"].set()
    await harness.wait_until_idle(session)
    assert not held.cancelled()
    assert len(harness.worker.builds) == 1


async def test_after_a_crash_it_goes_on_from_what_was_committed(
    harness, chat: Chat, session: str
) -> None:
    await building(harness, chat, session)
    before = await harness.catalog.episodes.get_segments(session)
    await harness.crash()
    assert await harness.catalog.episodes.get_segments(session) == before
    await chat(session, TEA)
    assert len(harness.worker.embedded) == 1
    assert (await harness.catalog.episodes.get(session)).built_segments == 5


async def test_a_build_that_fails_is_told_and_tried_again_after_the_next_turn(
    harness, chat: Chat, session: str, told: list
) -> None:
    harness.worker.faults["build"] = WorkerRefused(ErrorCode.OVERLOADED, "too much to do")
    await chat(session, TEA, TRAINS, TEA, TRAINS)
    failures = [each for each in told[0] if isinstance(each, EpisodesFailed)]
    assert failures == [EpisodesFailed(session, "build", "overloaded", "too much to do")]
    await chat(session, TEA)
    built = [each for each in told[0] if isinstance(each, EpisodesBuilt)]
    assert built == [EpisodesBuilt(session, episodes=2, segments=5, scored_rows=55, seconds=0.5)]


async def test_a_worker_that_broke_in_a_build_opens_the_session_again(
    harness, chat: Chat, session: str
) -> None:
    harness.worker.faults["build"] = WorkerLost("gone")
    await chat(session, TEA, TRAINS, TEA, TRAINS)
    opened = len([said for said in harness.worker.call_log if said.startswith("open")])
    await chat(session, TEA)
    assert len([said for said in harness.worker.call_log if said.startswith("open")]) == opened + 1


async def test_segments_that_cannot_be_embedded_wait_for_the_next_turn(
    harness, chat: Chat, session: str, told: list
) -> None:
    harness.worker.faults["embed"] = WorkerRefused(ErrorCode.EMBEDDER_REFUSED, "no such encoder")
    await chat(session, TEA)
    assert told[0][-1] == EpisodesFailed(session, "segment", "embedder_refused", "no such encoder")
    await chat(session, TRAINS)
    assert (await harness.catalog.episodes.get(session)).segments == 2


async def test_another_encoder_makes_all_vectors_anew(
    harness, chat: Chat, session: str, told: list
) -> None:
    await chat(session, TEA, TRAINS, TEA, TRAINS)
    harness.worker.dimensions = 8
    await chat(session, TEA)
    found = await harness.catalog.episodes.get(session)
    assert (found.segments, found.built_segments, found.dimensions) == (5, 5, 8)
    assert {episode.id for episode in found.episodes} == {"2-1", "2-2"}
    (failure,) = [each for each in told[0] if isinstance(each, EpisodesFailed)]
    assert (failure.step, failure.code) == ("match", "embedding_refused")


async def test_episodes_of_another_build_than_was_asked_for_are_refused(
    harness, chat: Chat, session: str, told: list
) -> None:
    build = harness.worker.build_episodes

    async def forgets_one(request: pb.BuildEpisodesRequest) -> pb.BuildEpisodesResult:
        result = await build(request)
        del result.episodes[1:]
        return result

    harness.worker.build_episodes = forgets_one
    await chat(session, TEA, TRAINS, TEA, TRAINS)
    assert told[0][-1].step == "build"
    assert (await harness.catalog.episodes.get(session)).episodes == ()


async def test_a_deleted_session_and_a_stop_take_the_build_with_them(
    harness, chat: Chat, session: str
) -> None:
    await building(harness, chat, session)
    await harness.service.delete(session)
    assert not [task for task in asyncio.all_tasks() if session in task.get_name()]
    with pytest.raises(ServiceError):
        await harness.service.episodes(session)
    other = await harness.session(method="epicache", budget=16, repair_rows=0, episodes=SMALL)
    harness.worker.reached["build"].clear()
    await building(harness, chat, other)
    await harness.service.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await harness.start()
