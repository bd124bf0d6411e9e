"""The passages of a session with a memory: embedded between its turns, exchange by exchange."""

from typing import Any

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import WorkerRefused
from kvrecall.domain.events import EpisodesFailed
from kvrecall.domain.messages import Message
from kvrecall.domain.passages import MOST_TOKENS

TEA = "kettle leaves brew"
LONG = " ".join(f"word{number}" for number in range(2 * MOST_TOKENS))


async def talk(harness, session: str, said: str, answer: str, generate: bool = True) -> None:
    """Run a turn, and wait for what follows it."""
    harness.worker.script = [answer]
    await harness.say(session, Message("user", said), generate=generate)
    await harness.wait_until_idle(session)


async def get_spans(harness, session: str) -> list[tuple[int, int]]:
    found = await harness.catalog.episodes.get_segments(session)
    return [(each.start, each.stop) for each in found]


async def test_each_exchange_is_a_passage_of_what_both_sides_said(harness) -> None:
    session = await harness.session(method="icecache", repair_rows=0, remember="ann")
    await talk(harness, session, TEA, "with milk")
    await talk(harness, session, "and sugar", "none")
    assert [text for texts in harness.worker.embedded for text in texts if "milk" in text] == [
        f"{TEA}\nwith milk"
    ]
    log = await harness.catalog.turns.get_after(session, 0, 9)
    first, second = (len(turn.token_ids) for turn in log)
    assert await get_spans(harness, session) == [(0, first), (first, first + second)]
    assert (await harness.catalog.episodes.get(session)).episodes == ()


async def test_what_has_no_answer_waits_for_it(harness) -> None:
    session = await harness.session(method="icecache", repair_rows=0, remember="ann")
    await talk(harness, session, TEA, "", generate=False)
    assert await get_spans(harness, session) == []
    await talk(harness, session, "well?", "with milk")
    log = await harness.catalog.turns.get_after(session, 0, 9)
    assert await get_spans(harness, session) == [(0, sum(len(turn.token_ids) for turn in log))]


async def test_a_long_exchange_is_cut_and_its_parts_are_read_from_its_tokens(harness) -> None:
    session = await harness.session(method="icecache", repair_rows=0, remember="ann")
    await talk(harness, session, LONG, "I see")
    spans = await get_spans(harness, session)
    assert len(spans) == 3
    assert spans[0][1] == spans[1][0]
    assert all(stop - start <= MOST_TOKENS for start, stop in spans)
    parts = harness.worker.embedded[-1]
    assert "word0" in parts[0]
    assert "I see" in parts[-1]


async def test_a_session_without_a_memory_is_not_embedded(harness) -> None:
    session = await harness.session(method="icecache", repair_rows=0)
    await talk(harness, session, TEA, "with milk")
    assert harness.worker.embedded == []
    assert await get_spans(harness, session) == []


async def test_what_could_not_be_embedded_is_after_the_next_turn(harness) -> None:
    events: list[Any] = []
    harness.service.observe(events.append)
    session = await harness.session(method="icecache", repair_rows=0, remember="ann")
    harness.worker.faults["embed"] = WorkerRefused(ErrorCode.EMBEDDER_REFUSED, "no encoder")
    await talk(harness, session, TEA, "with milk")
    assert await get_spans(harness, session) == []
    assert EpisodesFailed(session, "segment", "embedder_refused", "no encoder") in events
    await talk(harness, session, "and sugar", "none")
    assert len(await get_spans(harness, session)) == 2


async def test_another_encoder_embeds_all_anew(harness) -> None:
    session = await harness.session(method="icecache", repair_rows=0, remember="ann")
    await talk(harness, session, TEA, "with milk")
    harness.worker.dimensions = 12
    await talk(harness, session, "and sugar", "none")
    found = await harness.catalog.episodes.get_segments(session)
    assert [len(each.vector) for each in found] == [48, 48]
