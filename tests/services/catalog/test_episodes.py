"""Episodes in the catalog: each change is atomic, fenced, and deleted with the session."""

from dataclasses import replace

import pytest

from kvrecall.domain.errors import CatalogError, StaleEpoch, UnknownEpisode, UnknownSession
from kvrecall.domain.reports import EpisodeReport, MemoryReport, TurnOutcome
from kvrecall.domain.sessions.session import Session, Turn
from kvrecall.domain.settings.session import EpisodeSettings, SessionSettings
from services.catalog.base import Catalog
from services.catalog.records import (
    BuildCommit,
    EpisodeRecord,
    EpisodeSet,
    SegmentRecord,
    SegmentsCommit,
    TurnCommit,
)

SEGMENTS = tuple(SegmentRecord(n, 10 * n, 10 * n + 10, b"\0\0\x80?" * 2) for n in range(4))
EMBEDDED = EpisodeSet(segments=4, next_token=40, last_turn=3, last_utterance=1, dimensions=2)
EPISODES = (
    EpisodeRecord("1-1", b"\0\0\x80?\0\0\0\0", 3, 30, "user: tea"),
    EpisodeRecord("1-2", b"\0\0\0\0\0\0\x80?", 1, 10, "user: rain"),
)
BUILT = replace(EMBEDDED, built_segments=4, builds=1, episodes=EPISODES)
BUILD = BuildCommit(BUILT, (b"built 1-1", b"\0"), (0, 0, 1, 0))


@pytest.fixture
async def catalog(catalog: Catalog) -> Catalog:
    """A catalog with the sessions s, whose episodes are built, and t, which has none."""
    for id in ("s", "t"):
        settings = SessionSettings(
            64, 8, "epicache", episodes=EpisodeSettings("auto", 3, 6, "per_episode", 0.5)
        )
        await catalog.sessions.create(
            Session(id, 1, settings, 1.0, 1.0, 0, MemoryReport()), b"", None
        )
    await catalog.episodes.commit_segments("s", SegmentsCommit(SEGMENTS, EMBEDDED), 1)
    await catalog.episodes.commit_build("s", BUILD, 1)
    return catalog


def turn(number: int, matched: str = "", active: str = "") -> TurnCommit:
    report = EpisodeReport(matched, 0.5, True, 20, 80, 1280, 0.01) if matched else None
    outcome = TurnOutcome(
        "s", number, None, "appended", 3, 0, MemoryReport(), (), {}, episode=report
    )
    return TurnCommit(
        Turn("s", number, (), (1, 2, 3), outcome, (2, 1)), b"", matched=matched, active=active
    )


async def test_settings_turns_and_episodes_come_back_as_they_were_committed(
    catalog: Catalog,
) -> None:
    assert (await catalog.sessions.get("s")).settings.episodes == EpisodeSettings(
        "auto", 3, 6, "per_episode", 0.5
    )
    assert await catalog.episodes.get("s") == BUILT
    labelled = [
        replace(segment, label=label) for segment, label in zip(SEGMENTS, (0, 0, 1, 0), strict=True)
    ]
    assert await catalog.episodes.get_segments("s") == labelled
    assert await catalog.episodes.get_built("s", "1-1") == b"built 1-1"
    await catalog.turns.commit(turn(1, "1-1", "1-1"), 1, None)
    assert await catalog.turns.get_after("s", 0, 5) == [turn(1, "1-1").turn]


async def test_a_session_without_segments_has_an_empty_set(catalog: Catalog) -> None:
    assert await catalog.episodes.get("t") == EpisodeSet()
    assert await catalog.episodes.get_segments("t") == []
    with pytest.raises(UnknownSession):
        await catalog.episodes.get("unknown")


async def test_turns_count_matches_and_name_the_active_episode(catalog: Catalog) -> None:
    await catalog.turns.commit(turn(1, "1-2", "1-2"), 1, None)
    await catalog.turns.commit(turn(2, "1-2", "1-2"), 1, None)
    await catalog.turns.commit(turn(3, "", "1-2"), 1, None)
    found = await catalog.episodes.get("s")
    assert found.active == "1-2"
    assert [episode.matched for episode in found.episodes] == [0, 2]


async def test_new_segments_keep_match_counts_and_the_active_episode(catalog: Catalog) -> None:
    await catalog.turns.commit(turn(1, "1-1", "1-1"), 1, None)
    grown = replace(EPISODES[1], segments=2, tokens=20, centroid=b"\0" * 8, matched=7)
    found = replace(BUILT, segments=5, next_token=50, active="wrong", episodes=(EPISODES[0], grown))
    await catalog.episodes.commit_segments(
        "s", SegmentsCommit((SegmentRecord(4, 40, 50, b"\0" * 8, 1),), found), 1
    )
    after = await catalog.episodes.get("s")
    assert (after.segments, after.next_token, after.active) == (5, 50, "1-1")
    assert after.episodes == (replace(EPISODES[0], matched=1), replace(grown, matched=0))
    assert [segment.label for segment in await catalog.episodes.get_segments("s")] == [
        0,
        0,
        1,
        0,
        1,
    ]


async def test_a_build_replaces_episodes_and_rows_but_not_the_active_episode(
    catalog: Catalog,
) -> None:
    await catalog.turns.commit(turn(1, "1-1", "1-1"), 1, None)
    only = replace(EPISODES[0], id="2-1")
    found = replace(BUILT, builds=2, episodes=(only,))
    await catalog.episodes.commit_build("s", BuildCommit(found, (b"new",), (0, 0, 0, 0)), 1)
    assert await catalog.episodes.get("s") == replace(found, active="1-1")
    assert await catalog.episodes.get_built("s", "2-1") == b"new"
    with pytest.raises(UnknownEpisode):
        await catalog.episodes.get_built("s", "1-1")


async def test_cleared_episodes_keep_the_build_count_and_the_active_episode(
    catalog: Catalog,
) -> None:
    await catalog.turns.commit(turn(1, "1-1", "1-1"), 1, None)
    await catalog.episodes.clear("s", 1)
    assert await catalog.episodes.get("s") == EpisodeSet(builds=1, active="1-1")
    assert await catalog.episodes.get_segments("s") == []


async def test_episodes_cannot_be_written_under_an_old_epoch(catalog: Catalog) -> None:
    await catalog.leases.take_over("s", "w")
    for write in (
        catalog.episodes.commit_segments("s", SegmentsCommit((), EMBEDDED), 1),
        catalog.episodes.commit_build("s", BUILD, 1),
        catalog.episodes.clear("s", 1),
    ):
        with pytest.raises(StaleEpoch):
            await write
    assert await catalog.episodes.get("s") == BUILT


async def test_a_failed_commit_of_segments_changes_nothing(catalog: Catalog) -> None:
    found = replace(BUILT, segments=9)
    with pytest.raises(CatalogError):  # a segment of that number exists
        await catalog.episodes.commit_segments(
            "s", SegmentsCommit((replace(SEGMENTS[0], number=4), SEGMENTS[0]), found), 1
        )
    assert await catalog.episodes.get("s") == BUILT
    assert len(await catalog.episodes.get_segments("s")) == 4


async def test_episodes_are_deleted_with_their_session(catalog: Catalog) -> None:
    await catalog.sessions.delete("s", None)
    with pytest.raises(UnknownSession):
        await catalog.episodes.get("s")
    assert await catalog.episodes.get_segments("s") == []
    with pytest.raises(UnknownEpisode):
        await catalog.episodes.get_built("s", "1-1")
