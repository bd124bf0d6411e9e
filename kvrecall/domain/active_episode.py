"""The episode whose rows are active in a session."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EpisodeSegment:
    """Token positions `start` to `stop - 1` of a session, with their similarity to an episode.

    `similarity` is 1 for the episode's own segments, otherwise between 0 and 1.
    """

    start: int
    stop: int
    similarity: float


@dataclass(frozen=True)
class ActiveEpisode:
    """An episode as evictions use it. The default value stands for no episode.

    `patched_prompt` holds the token ids of the medoid segments (EpiCache section 2.3).
    """

    id: str = ""
    patched_prompt: tuple[int, ...] = ()
    segments: tuple[EpisodeSegment, ...] = ()


NO_EPISODE = ActiveEpisode()
