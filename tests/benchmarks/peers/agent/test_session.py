"""The run of one peer: what it is sent, and when its server is killed."""

import os
from collections.abc import Sequence
from typing import ClassVar

import pytest

from benchmarks.peers.agent import session
from benchmarks.peers.agent.session import Measured, run_session
from benchmarks.peers.conversation import Message, Turn, generate
from benchmarks.peers.plan import Plan
from benchmarks.peers.subjects.base import Reply
from evals.languages.choice import get_language

PLAN = Plan("smollm2", (), 1, 4, 600, 20, 0.0, 1)
CONVERSATION = generate(get_language("smollm2"), 1, 4, 600, 20)


class RecordingPeer:
    """Records what it is sent; its reply is the text of the first answer, each time."""

    pid = os.getpid()
    length = 7
    versions: ClassVar[dict[str, str]] = {}

    def __init__(self, takes_results: bool) -> None:
        self.takes_results = takes_results
        self.sent: list[str] = []

    def start(self) -> None:
        self.sent.append("start")

    def call(self, messages: Sequence[Message]) -> None:
        self.sent.append(" ".join(message["role"] for message in messages))

    def pause(self, turn: Turn, call_id: str) -> bool:
        self.sent.append("pause")
        return self.takes_results

    def ask(self, messages: Sequence[Message], max_tokens: int) -> Reply:
        self.sent.append("ask: " + " ".join(message["role"] for message in messages))
        return Reply(CONVERSATION.turns[0].answer, 5, 0.1, 0.2)

    def kill(self) -> None:
        self.sent.append("kill")


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_BEFORE_KILL", 0.0)


def run(peer: RecordingPeer) -> list[Measured]:
    return list(run_session(peer, CONVERSATION, PLAN, lambda text, answer: text == answer))


def test_the_server_is_killed_in_a_pause_in_the_middle_and_before_the_last_question() -> None:
    peer = RecordingPeer(takes_results=False)
    turns = run(peer)
    usual = ["user assistant", "pause", "ask: tool user"]
    assert peer.sent == [
        *["start", "system user assistant", "pause", "ask: tool user"],
        *usual,
        *["user assistant", "kill", "start", "ask: tool user"],
        *usual,
        *["kill", "start", "ask: user"],
    ]
    assert [turn.number for turn in turns if turn.started is not None] == [2, 4]


def test_a_result_that_was_taken_in_the_pause_is_not_sent_again() -> None:
    peer = RecordingPeer(takes_results=True)
    run(peer)
    asked = [sent for sent in peer.sent if sent.startswith("ask")]
    assert asked == ["ask: user", "ask: user", "ask: tool user", "ask: user", "ask: user"]


def test_replies_are_judged_by_the_answer_of_their_own_turn() -> None:
    turns = run(RecordingPeer(takes_results=False))
    answers = [turn.answer for turn in (*CONVERSATION.turns, CONVERSATION.last)]
    assert [turn.right for turn in turns] == [answer == answers[0] for answer in answers]
    assert all(turn.peak_bytes > 0 for turn in turns)
