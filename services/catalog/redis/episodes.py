"""Segments and episodes in the Redis catalog."""

from kvrecall.domain.errors import UnknownEpisode, UnknownSession
from services.cancellation import run_to_completion
from services.catalog.encryption.encryption import Encryption
from services.catalog.records import BuildCommit, EpisodeSet, SegmentRecord, SegmentsCommit
from services.catalog.redis import mapping
from services.catalog.redis.connection.keys import BUILT, EPISODE_SET, EPISODES, LABELS, SEGMENTS
from services.catalog.redis.slot.commits import (
    RedisCommit,
    build_clear_episodes,
    build_episodes,
    build_segments,
)
from services.catalog.redis.slot.slot import SessionSlots


class RedisEpisodes:
    """Segments and episodes of each session."""

    def __init__(self, slots: SessionSlots, encryption: Encryption) -> None:
        self._slots = slots
        self._ciphers = encryption.sessions

    async def get(self, session_id: str) -> EpisodeSet:
        """Return the session's episodes without their rows. Raises UnknownSession."""
        cipher = await self._ciphers.to_read(session_id)
        exists, fields, episodes = await self._slots.read(
            session_id, ("HGETALL", EPISODE_SET), ("HGETALL", EPISODES)
        )
        if not exists:
            raise UnknownSession(session_id)
        return mapping.from_set_fields(mapping.to_hash(fields), mapping.to_hash(episodes), cipher)

    async def get_segments(self, session_id: str) -> list[SegmentRecord]:
        """Return all embedded segments, in time order."""
        cipher = await self._ciphers.to_read(session_id)
        _, segments, labels = await self._slots.read(
            session_id, ("HGETALL", SEGMENTS), ("HGETALL", LABELS)
        )
        return mapping.from_segment_entries(
            mapping.to_hash(segments), mapping.to_hash(labels), cipher
        )

    async def get_built(self, session_id: str, episode_id: str) -> bytes:
        """Return a serialized pb.Episode. Raises UnknownEpisode."""
        cipher = await self._ciphers.to_read(session_id)
        _, built = await self._slots.read(session_id, ("HGET", BUILT, episode_id))
        if built is None:
            raise UnknownEpisode(session_id, episode_id)
        return mapping.open_built(episode_id, built, cipher)

    async def commit_segments(self, session_id: str, commit: SegmentsCommit, epoch: int) -> None:
        """Add segments. Raises UnknownSession, StaleEpoch."""
        cipher = await self._ciphers.to_write(session_id)
        await self._apply(session_id, build_segments(commit, cipher), epoch)

    async def commit_build(self, session_id: str, commit: BuildCommit, epoch: int) -> None:
        """Replace the episodes. Raises UnknownSession, StaleEpoch."""
        cipher = await self._ciphers.to_write(session_id)
        await self._apply(session_id, build_episodes(commit, cipher), epoch)

    async def clear(self, session_id: str, epoch: int) -> None:
        """Delete segments and episodes. Raises UnknownSession, StaleEpoch."""
        await self._apply(session_id, build_clear_episodes(), epoch)

    async def _apply(self, session_id: str, commit: RedisCommit, epoch: int) -> None:
        await run_to_completion(self._slots.apply(session_id, commit, epoch=epoch))
