"""One peer's session: all turns, with the server killed in a pause in the middle and at the end."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.peers.agent.contention import longest_wait, read_waits
from benchmarks.peers.agent.memory import peak_bytes
from benchmarks.peers.conversation import (
    Conversation,
    Message,
    Turn,
    ask_message,
    call_messages,
    result_message,
)
from benchmarks.peers.plan import Plan
from benchmarks.peers.subjects.base import Peer, Reply

# Between a turn and the kill: as long as a tool needs at least.
_BEFORE_KILL = 1.0


@dataclass(frozen=True)
class Measured:
    """One turn.

    Attributes:
        number: Of the turn, from 0.
        age: Turns since the fact was stated that is asked for.
        answer: Value asked for.
        text: The reply.
        right: Whether it gives the value.
        length: Tokens of the session, reply included.
        tokens: Of the reply.
        first_token: Seconds from the request to the first token.
        decode: Seconds from there to the last.
        after: Seconds behind the reply before the peer could be killed.
        started: Seconds from the start of a killed server to its being ready; None if it had
            not been killed.
        waited: Seconds that a thread of the server waited for a CPU during the reply, the longest
            of all threads: other work on the machine.
        peak_bytes: Peak memory of the server's processes so far.
    """

    number: int
    age: int
    answer: str
    text: str
    right: bool
    length: int
    tokens: int
    first_token: float
    decode: float
    after: float
    started: float | None
    waited: float
    peak_bytes: int


def run_session(
    peer: Peer, conversation: Conversation, plan: Plan, is_answer: Callable[[str, str], bool]
) -> Iterator[Measured]:
    """Run all turns and the last question; yields each turn when it is done. Raises PeerFailed.

    The turn behind a restart comes at once: its time to the first token is that of the resumed
    session.
    """
    peer.start()
    first: list[Message] = [{"role": "system", "content": conversation.system}]
    for number, turn in enumerate((*conversation.turns, conversation.last)):
        call_id = f"call_{number}"
        if turn.has_call:
            peer.call([*first, *call_messages(turn, call_id)])
            first = []
        killed = number in (plan.restart_at, len(conversation.turns))
        started = _restart(peer) if killed else None
        delivered = turn.has_call and not killed and peer.pause(turn, call_id)
        messages = [ask_message(turn)]
        if turn.has_call and not delivered:
            messages.insert(0, result_message(turn, call_id))
        before = read_waits(peer.pid)
        reply = peer.ask(messages, plan.reply_tokens)
        waited = longest_wait(before, read_waits(peer.pid))
        right = is_answer(reply.text, turn.answer)
        yield _measured(peer, number, turn, reply, right, started, waited)


def _restart(peer: Peer) -> float:
    """Kill the server and start it again; returns the seconds until it is ready."""
    time.sleep(_BEFORE_KILL)
    peer.kill()
    began = time.perf_counter()
    peer.start()
    return time.perf_counter() - began


def _measured(
    peer: Peer,
    number: int,
    turn: Turn,
    reply: Reply,
    right: bool,
    started: float | None,
    waited: float,
) -> Measured:
    return Measured(
        number,
        turn.age,
        turn.answer,
        reply.text,
        right,
        peer.length,
        reply.tokens,
        reply.first_token,
        reply.decode,
        reply.after,
        started,
        waited,
        peak_bytes(peer.pid),
    )
