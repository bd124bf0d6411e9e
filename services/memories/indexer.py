"""Embeds what sessions with a memory have said, exchange by exchange, between their turns.

Each step ends in a commit: an interruption, by a turn or a crash, loses no more than the current step. The
passages are the segments of a session that has no episodes (`catalog.episodes`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from kvrecall.domain.episodes import vectors_to_bytes
from kvrecall.domain.errors import ServiceError, SessionBusy, StaleEpoch
from kvrecall.domain.events import EpisodesFailed
from kvrecall.domain.passages import Passage, cut_passages, split_exchanges
from kvrecall.domain.utterances import Utterance, utterances
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.records import EpisodeSet, SegmentRecord, SegmentsCommit
from services.context import ServiceContext
from services.embedding import embed_texts
from services.sessions.active import ActiveSession

# Texts per call of the encoder: a turn whose query is to be embedded waits for no more.
_TEXTS_PER_CALL = 32
_EXCHANGES_PER_STEP = 16
_TURNS_PER_READ = 128


@dataclass(frozen=True)
class _New:
    """Exchanges that are not embedded yet, their passages, and the last utterance of them."""

    passages: Sequence[Passage]
    texts: Sequence[str]
    last: Utterance


class PassageIndexer:
    """Embeds the passages of sessions with a memory. At most one `run` per session at a time."""

    def __init__(self, context: ServiceContext) -> None:
        self._catalog = context.catalog
        self._worker = context.worker
        self._sessions = context.sessions
        self._events = context.events

    async def run(self, live: ActiveSession) -> None:
        """Bring the session's passages up to its log. Publishes failures, and raises nothing.

        May be cancelled at any time; the next call continues from the last commit.
        """
        try:
            await self._sessions.epoch(live)  # no other process changes what is read from here on
            found = await self._catalog.episodes.get(live.id)
            while new := await self._read_next(live.id, found):
                found = await self._add(live, found, new)
        except (StaleEpoch, SessionBusy):
            return  # another process went on with the session
        except ServiceError as error:
            self._events.publish(EpisodesFailed(live.id, "segment", error.code, error.message))

    async def _read_next(self, session: str, found: EpisodeSet) -> _New | None:
        """Read the next whole exchanges; None if there are none."""
        turns = await self._catalog.turns.get_after(session, found.last_turn - 1, _TURNS_PER_READ)
        done = found.last_utterance + 1
        before = utterances(turns)[:done]
        start = found.next_token - (before[-1].stop if before else 0)
        said = utterances(turns, start)[done:]
        exchanges = split_exchanges(said)[:_EXCHANGES_PER_STEP]
        if not exchanges and len(turns) == _TURNS_PER_READ and said:
            exchanges = [said]  # so much was said without an answer
        if not exchanges:
            return None
        passages = [passage for each in exchanges for passage in cut_passages(each)]
        token_ids = list(chain.from_iterable(turn.token_ids for turn in turns))
        parts = [each for each in passages if each.text is None]
        chunks = [
            pb.TokenChunk(ids=token_ids[each.start - start : each.stop - start]) for each in parts
        ]
        decoded = iter(await self._decode(chunks))
        texts = [next(decoded) if each.text is None else each.text for each in passages]
        return _New(passages, texts, exchanges[-1][-1])

    async def _decode(self, chunks: Sequence[pb.TokenChunk]) -> Sequence[str]:
        """Decode chunks of tokens to their texts."""
        if not chunks:
            return ()
        return (await self._worker.detokenize(pb.DetokenizeRequest(chunks=chunks))).texts

    async def _add(self, live: ActiveSession, found: EpisodeSet, new: _New) -> EpisodeSet:
        """Embed passages and commit them; returns the set with them.

        Of another encoder's vectors before, which cannot be compared with these, none stays.
        """
        vectors, dimensions = await self._embed(new.texts)
        epoch = await self._sessions.epoch(live)
        if found.dimensions not in (0, dimensions):
            await self._catalog.episodes.clear(live.id, epoch)
            return await self._catalog.episodes.get(live.id)
        pairs = enumerate(zip(new.passages, vectors, strict=True), found.segments)
        records = [
            SegmentRecord(number, each.start, each.stop, vector) for number, (each, vector) in pairs
        ]
        changed = replace(
            found,
            segments=found.segments + len(records),
            next_token=new.last.stop,
            last_turn=new.last.turn,
            last_utterance=new.last.index,
            dimensions=dimensions,
        )
        commit = SegmentsCommit(tuple(records), changed)
        await self._catalog.episodes.commit_segments(live.id, commit, epoch)
        return changed

    async def _embed(self, texts: Sequence[str]) -> tuple[list[bytes], int]:
        """Embed texts; returns their vectors and the length of one. Raises as `embed_texts`."""
        parts = [texts[at : at + _TEXTS_PER_CALL] for at in range(0, len(texts), _TEXTS_PER_CALL)]
        found = [each for part in parts for each in await embed_texts(self._worker, part)]
        return [vectors_to_bytes(each) for each in found], len(found[0])
