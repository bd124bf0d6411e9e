"""The start of a turn.

Which episode it is about, what is switched, and that no turn fails by it.
"""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import EpisodesUnsupported, WorkerLost, WorkerRefused
from kvrecall.domain.events import EpisodesFailed
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message, Sampling
from kvrecall.domain.reports import EpisodeReport
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.settings.session import EpisodeSettings
from kvrecall.domain.turn_request import TurnRequest
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.records import IdempotencyKey

TEA = "kettle leaves brew steep cup"
TRAINS = "station rails ticket platform carriage"
SMALL = EpisodeSettings(count=2, segment_utterances=2, medoid_utterances=2, rebuild_growth=4.0)


@pytest.fixture
async def session(harness) -> str:
    """A session that spoke of tea, then of trains, and has an episode of each; none is active."""
    session = await harness.session(method="epicache", budget=16, repair_rows=0, episodes=SMALL)
    for text in (TEA, TEA, TRAINS, TRAINS):
        harness.worker.script = [text]
        await harness.say(session, Message("user", text))
        await harness.wait_until_idle(session)
    harness.worker.embedded.clear()
    return session


async def run_turn(harness, session: str, text: str) -> EpisodeReport | None:
    """Run a turn about a text, and what follows it; returns its episode report, if it has one."""
    outcome = await harness.say(session, Message("user", text))
    await harness.wait_until_idle(session)
    report: EpisodeReport | None = outcome.episode
    return report


async def about(harness, session: str, text: str) -> EpisodeReport:
    """Run a turn about a text in a session with episodes; returns its episode report."""
    report = await run_turn(harness, session, text)
    assert report is not None
    return report


async def test_a_turn_switches_to_the_episode_it_is_about(harness, session: str) -> None:
    found = await about(harness, session, "ticket platform please")
    assert found == replace(
        found, episode="1-2", switched=True, rows_moved=20, rows_kept=80, bytes_moved=1280
    )
    assert 0.2 < found.similarity < 1
    (sent,) = harness.worker.switches
    assert sent == pb.Episode.FromString(await harness.catalog.episodes.get_built(session, "1-2"))
    assert (sent.id, sent.rows, len(sent.patched_prompt)) == ("1-2", b"rows of 1-2", 11)


async def test_a_turn_that_stays_in_its_episode_moves_nothing(harness, session: str) -> None:
    await about(harness, session, TRAINS)
    stayed = await about(harness, session, "a ticket for the carriage")
    assert (stayed.episode, stayed.switched, stayed.rows_moved, stayed.bytes_moved) == (
        "1-2",
        False,
        0,
        0,
    )
    back = await about(harness, session, TEA)
    assert (back.episode, back.switched) == ("1-1", True)
    assert [episode.id for episode in harness.worker.switches] == ["1-2", "1-1"]
    found = await harness.catalog.episodes.get(session)
    assert [episode.matched for episode in found.episodes] == [1, 2]
    assert found.active == "1-1"


async def test_a_turn_that_was_not_committed_is_not_counted_and_switches_again(
    harness, session: str
) -> None:
    harness.worker.faults["done"] = WorkerLost("gone")
    with pytest.raises(WorkerLost):
        await about(harness, session, TRAINS)
    found = await harness.catalog.episodes.get(session)
    assert ([episode.matched for episode in found.episodes], found.active) == ([0, 0], "")
    again = await about(harness, session, TRAINS)
    assert again.switched


async def test_which_episode_is_active_outlives_the_process(harness, session: str) -> None:
    await about(harness, session, TRAINS)
    await harness.crash()
    stayed = await about(harness, session, TRAINS)
    assert (stayed.episode, stayed.switched) == ("1-2", False)


async def test_the_answer_to_a_repeated_turn_tells_the_same_episode(harness, session: str) -> None:
    request = TurnRequest((Message("user", TRAINS),), sampling=Sampling(5))
    key = IdempotencyKey("turn", "k", "body")
    told = []
    for _ in range(2):
        told.append(
            [progress async for progress in harness.service.turn(session, request, key)][
                -1
            ].outcome.episode
        )
    assert told[0] == told[1]
    assert told[0].switched
    assert [each.matched for each in (await harness.catalog.episodes.get(session)).episodes] == [
        0,
        1,
    ]


async def test_time_for_matching_is_told_as_a_phase_of_its_own(harness, session: str) -> None:
    outcome = await harness.say(session, Message("user", TEA))
    assert outcome.seconds["match"] >= 0


async def test_what_says_nothing_new_of_the_users_side_is_not_matched(
    harness, session: str
) -> None:
    outcome = await harness.say(session, Message("assistant", "by the way"), generate=False)
    assert outcome.episode is None
    assert "match" not in outcome.seconds


async def test_a_session_without_episodes_embeds_nothing(harness) -> None:
    for options in ({}, {"method": "epicache"}, {"method": "epicache", "episodes": None}):
        session = await harness.session(**options)
        assert await run_turn(harness, session, TEA) is None
    assert harness.worker.embedded == []


@pytest.mark.parametrize(
    "error", [WorkerLost("gone"), WorkerRefused(ErrorCode.EMBEDDER_REFUSED, "gone")]
)
async def test_a_turn_that_cannot_be_matched_stays_where_it_is(
    harness, session: str, error: WorkerLost | WorkerRefused
) -> None:
    told = harness.hear()
    harness.worker.faults["embed"] = error
    outcome = await harness.say(session, Message("user", TRAINS))
    assert (outcome.finish_reason, outcome.episode) == ("stop", None)
    (failed,) = [event for event in told if isinstance(event, EpisodesFailed)]
    assert failed == EpisodesFailed(session, "match", error.code, "gone")
    assert harness.worker.switches == []


class TestSlowEncoder:
    """An encoder that takes its time."""

    @pytest.fixture
    def settings(self) -> ServiceLimits:
        return ServiceLimits(queue_seconds=5, drain_seconds=5, match_seconds=0.05)

    async def test_a_turn_does_not_wait_for_it_for_ever(self, harness, session: str) -> None:
        harness.worker.gates["embed"] = asyncio.Event()
        outcome = await harness.say(session, Message("user", TRAINS))
        assert outcome.episode is None


async def test_an_episode_that_the_worker_cannot_use_is_left_out(harness, session: str) -> None:
    told = harness.hear()
    harness.worker.faults["switch"] = WorkerRefused(
        ErrorCode.BAD_EPISODE, "rows of another session"
    )
    found = await about(harness, session, TRAINS)
    assert (found.episode, found.switched) == ("1-2", False)
    (failed,) = [event for event in told if isinstance(event, EpisodesFailed)]
    assert failed == EpisodesFailed(session, "switch", "bad_episode", "rows of another session")
    assert (await harness.catalog.episodes.get(session)).active == ""


async def test_other_refusals_of_a_turn_with_an_episode_are_the_turns_own(
    harness, session: str
) -> None:
    harness.worker.faults["switch"] = WorkerRefused(ErrorCode.TURN_TOO_LONG, "too much")
    with pytest.raises(WorkerRefused, match="too much"):
        await about(harness, session, TRAINS)


async def test_a_method_that_looks_at_episodes_has_them_by_default(harness) -> None:
    chosen = {}
    cases: dict[str, dict[str, Any]] = {
        "default": {"method": "epicache"},
        "off": {"method": "epicache", "episodes": None},
        "own": {"method": "epicache", "episodes": SMALL},
        "other": {"method": "snapkv"},
        "other, off": {"method": "snapkv", "episodes": None},
    }
    for name, options in cases.items():
        chosen[name] = (
            await harness.service.create(CreateSession(budget=64, **options))
        ).settings.episodes
    default = EpisodeSettings()
    assert chosen == {
        "default": default,
        "off": None,
        "own": SMALL,
        "other": None,
        "other, off": None,
    }


async def test_episodes_of_another_method_are_refused(harness) -> None:
    with pytest.raises(EpisodesUnsupported, match="'snapkv' do not look at episodes") as caught:
        await harness.service.create(CreateSession(budget=64, method="snapkv", episodes=SMALL))
    assert caught.value.details == {"field": "research.episodes"}


@pytest.mark.parametrize("how", ["uniform", "pyramid", "sensitivity", None])
async def test_how_the_budget_is_split_reaches_the_worker(harness, how: str | None) -> None:
    session = await harness.session(layer_budgets=how)
    assert harness.worker.specs[session].layer_budgets == (how or "")
    await harness.crash()
    await harness.say(session, Message("user", "hello"))
    assert harness.worker.specs[session].layer_budgets == (how or "")
