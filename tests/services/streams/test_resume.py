"""An answer that is generated again reaches the reader once, or the stream fails."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.domain.errors import WorkerLost
from kvrecall.domain.messages import TokenLogprob, ToolCall
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.streams.resume import StreamResumer
from services.streams.turn import (
    ArgumentsDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallEmitted,
    TurnProgress,
)

CALL = ToolCall("call_1_0", "weather", '{"city": "Bern"}')


def text_of(published: list[TurnProgress]) -> str:
    return "".join(item.text for item in published if isinstance(item, TextDelta))


@given(st.lists(st.text(min_size=1, max_size=4), max_size=8), st.integers(0, 8), st.data())
def test_the_reader_gets_every_answer_once_wherever_it_was_interrupted(
    pieces: list[str], sent: int, data: st.DataObject
) -> None:
    published: list[TurnProgress] = []
    resumer = StreamResumer(published.append)
    answer = "".join(pieces)
    resumer.begin()
    for piece in pieces[:sent]:
        resumer.text(piece)
    resumer.begin()
    rest = answer
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        resumer.text(rest[:size])
        rest = rest[size:]
    resumer.end()
    assert text_of(published) == answer
    assert all(item.text for item in published if isinstance(item, TextDelta))


def test_a_piece_costs_its_own_length_however_long_the_answer_is() -> None:
    said = "x" * 1_000_000
    resumer = StreamResumer(lambda _: None)
    for _ in range(2):
        resumer.begin()
        resumer.text(said)
        tracemalloc.start()
        try:
            resumer.text("and so on")
            assert tracemalloc.get_traced_memory()[1] < 10_000, "nothing is copied"
        finally:
            tracemalloc.stop()
    resumer.end()


def test_a_divergent_answer_is_not_published() -> None:
    published: list[TurnProgress] = []
    resumer = StreamResumer(published.append)
    resumer.begin()
    resumer.text("one two")
    resumer.begin()
    resumer.text("one ")
    with pytest.raises(WorkerLost, match="a different answer"):
        resumer.text("three")
    assert resumer.diverged
    assert text_of(published) == "one two"


def test_an_answer_that_ends_before_the_sent_prefix_diverges() -> None:
    resumer = StreamResumer(lambda _: None)
    resumer.begin()
    resumer.text("one two")
    resumer.begin()
    resumer.text("one")
    with pytest.raises(WorkerLost):
        resumer.end()


def test_calls_are_published_once_and_must_be_the_same() -> None:
    published: list[TurnProgress] = []
    resumer = StreamResumer(published.append)
    resumer.begin()
    resumer.call(CALL)
    resumer.begin()
    resumer.call(CALL)
    resumer.end()
    assert published == [ToolCallEmitted(CALL)]
    resumer.begin()
    with pytest.raises(WorkerLost):
        resumer.call(ToolCall("call_1_0", "weather", '{"city": "Rome"}'))


def delta(arguments: str, index: int = 0, name: str = "f") -> pb.ArgumentsDelta:
    return pb.ArgumentsDelta(index=index, id=f"c{index}", name=name, arguments=arguments)


@given(
    st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(0, 20),
    st.data(),
)
def test_arguments_go_on_where_they_broke_off(
    calls: list[str], sent: int, data: st.DataObject
) -> None:
    published: list[TurnProgress] = []
    resumer = StreamResumer(published.append)

    def run(limit: int) -> None:
        """Generate all calls in random pieces; break off after `limit` characters."""
        resumer.begin()
        for index, arguments in enumerate(calls):
            rest = arguments
            while rest and limit > 0:
                size = data.draw(st.integers(1, len(rest)))
                resumer.arguments(delta(rest[:size], index))
                rest, limit = rest[size:], limit - size
            if limit <= 0:
                return
            resumer.call(ToolCall(f"c{index}", "f", arguments))
        resumer.end()

    run(sent)
    run(1000)
    pieces = [item for item in published if isinstance(item, ArgumentsDelta)]
    whole = [item.call.arguments for item in published if isinstance(item, ToolCallEmitted)]
    assert whole == calls
    assert all(piece.arguments for piece in pieces)
    for index, arguments in enumerate(calls):
        assert "".join(p.arguments for p in pieces if p.index == index) == arguments


def say(resumer: StreamResumer, piece: pb.ArgumentsDelta) -> None:
    """Answer with one piece of arguments and nothing else."""
    resumer.arguments(piece)
    resumer.end()


@pytest.mark.parametrize("again", [delta('{"b'), delta('{"a', name="g"), delta("{")])
def test_arguments_that_diverge_end_the_stream(again: pb.ArgumentsDelta) -> None:
    resumer = StreamResumer(lambda _: None)
    resumer.begin()
    resumer.arguments(delta('{"a'))
    resumer.begin()
    with pytest.raises(WorkerLost):
        say(resumer, again)
    assert resumer.diverged


def test_a_call_that_was_sent_whole_is_not_begun_again_by_a_worker_that_sends_pieces() -> None:
    published: list[TurnProgress] = []
    resumer = StreamResumer(published.append)
    resumer.begin()
    resumer.call(CALL)
    resumer.begin()
    resumer.arguments(pb.ArgumentsDelta(id=CALL.id, name=CALL.name, arguments=CALL.arguments))
    resumer.call(CALL)
    resumer.end()
    assert published == [ToolCallEmitted(CALL)]


def test_calls_that_are_missing_from_the_retry_diverge() -> None:
    resumer = StreamResumer(lambda _: None)
    resumer.begin()
    resumer.call(CALL)
    resumer.begin()
    with pytest.raises(WorkerLost):
        resumer.end()


def test_log_probabilities_are_published_once() -> None:
    published: list[TurnProgress] = []
    resumer = StreamResumer(published.append)
    first, second, third = (TokenLogprob(token, token.encode(), -1.0) for token in "abc")
    resumer.begin()
    resumer.text("", [first])
    resumer.text("ab", [second])
    resumer.begin()
    resumer.text("a", [first])
    resumer.text("bc", [second, third])
    resumer.end()
    deltas = [item for item in published if isinstance(item, TextDelta)]
    assert [each for delta in deltas for each in delta.logprobs] == [first, second, third]
    assert text_of(published) == "abc"


def test_reasoning_is_published_once_and_must_be_the_same() -> None:
    published: list[TurnProgress] = []
    resumer = StreamResumer(published.append)
    resumer.begin()
    resumer.chunk(pb.TokenChunk(reasoning="so "))
    resumer.begin()
    resumer.chunk(pb.TokenChunk(reasoning="so it is"))
    resumer.chunk(pb.TokenChunk(text="ok"))
    resumer.end()
    assert published == [ReasoningDelta("so "), ReasoningDelta("it is"), TextDelta("ok")]
    resumer.begin()
    with pytest.raises(WorkerLost):
        resumer.chunk(pb.TokenChunk(reasoning="no"))


def test_tokens_count_once_however_often_they_are_generated() -> None:
    published: list[TurnProgress] = []
    resumer = StreamResumer(published.append)
    chunks = [
        pb.TokenChunk(ids=[1], reasoning="so "),
        pb.TokenChunk(ids=[2]),
        pb.TokenChunk(ids=[3], text="ok"),
    ]
    for count in (2, 3):
        resumer.begin()
        for chunk in chunks[:count]:
            resumer.chunk(chunk)
    counted = [each.tokens for each in published if isinstance(each, TextDelta | ReasoningDelta)]
    assert sum(counted) == 3
