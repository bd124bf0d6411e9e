"""SIGKILL at any moment of a turn or a pause: acknowledged steps persist, others leave no trace.

One conversation is held with a server that is never killed. Then it is held again with one that is,
at another moment in each test; replies after the restart must equal those of an undisturbed server.
"""

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from kvrecall.client import KvrecallClient, KvrecallError, TextDelta

Json = dict[str, Any]
SETTINGS = {
    "budget": 128,
    "research": {
        "method": "snapkv",
        "repair_rows": 32,
        "repair_on": ["tool_call", "tool_result", "turn"],
    },
    "seed": 11,
}
GREEDY = {"max_tokens": 16, "stop": ["<tool_call>"]}
MIDDLE = 2
PAUSED = 3
ANSWERED = 4
END = 6


@pytest.fixture(scope="module")
def steps(say) -> list[Json]:
    """The conversation.

    Two turns, a pause (3), a result (4), and two turns after it, the last one of new words.
    """
    opening = [
        {"role": "system", "content": "You are a helpful assistant."},
        say.user(say.chatter(1, 30)),
    ]
    asking = [
        say.user("Which code opens the locker of Ada?"),
        say.asks("c1", name="Ada", thing="locker"),
    ]
    return [
        {"messages": opening, **GREEDY},
        {"messages": [say.user(say.chatter(2, 25))], **GREEDY},
        {"messages": asking, "generate": False},
        {
            "event": "tool_call.completed",
            "call_id": "c1",
            "result": "Ada's locker has number 4821.",
        },
        {"messages": [], **GREEDY, "wait_for_repairs": True},
        {"messages": [say.user("And what is the code of Ben's garage?")], **GREEDY},
    ]


@dataclass
class Walk:
    """One session and its progress through the steps; each step has its own idempotency key."""

    server: Any
    steps: list[Json]
    session: str
    answers: list[Json]

    @property
    def client(self) -> KvrecallClient:
        return self.server.own

    def take(self, number: int) -> Json:
        """Send a step, for the first time or again."""
        step = dict(self.steps[number])
        key = f"step-{number}"
        if kind := step.pop("event", None):
            return asdict(self.client.event(self.session, kind, key=key, **step))
        return asdict(self.client.turn(self.session, key=key, **step))

    def until(self, end: int) -> "Walk":
        """Send all steps up to `end`."""
        self.answers += [self.take(number) for number in range(len(self.answers), end)]
        return self

    def state(self) -> Json:
        """The session's representation without the time of its last event, which a repair changes."""
        return asdict(self.client.get_session(self.session)) | {"updated_at": None}

    def repeats_its_answers(self) -> bool:
        """Check that a retry of each acknowledged step returns its response and adds nothing."""
        before = self.state()
        answers = [self.take(number) for number in range(len(self.answers))]
        return answers == self.answers and self.state() == before


@pytest.fixture(scope="module")
def victim(new_server):
    server = new_server()
    server.start()
    return server


@pytest.fixture(scope="module")
def begin(steps) -> Callable[..., Walk]:
    """Start the conversation in a new session of a server."""

    def start(server, end: int = 0) -> Walk:
        session = server.own.create_session(**SETTINGS).id
        return Walk(server, steps, session, []).until(end)

    return start


@pytest.fixture(scope="module")
def undisturbed(new_server, begin) -> list[Json]:
    """Responses of a server that is never killed, step by step."""
    server = new_server()
    server.start()
    answers = begin(server, END).answers
    server.kill()
    assert all(turn["memory"]["evicted_rows"] for turn in answers if "memory" in turn), (
        "nothing was ever evicted"
    )
    assert [repair["trigger"] for repair in answers[4]["memory"]["repairs"]] == [
        "tool_call",
        "tool_result",
    ]
    assert all(repair["promoted"] for repair in answers[4]["memory"]["repairs"]), (
        "nothing was ever promoted"
    )
    return answers


def substance(answer: Json) -> Json:
    """A response without values that differ between runs.

    Ids, times, peaks and bytes since start.
    """
    memory = dict(answer.get("memory", {}))
    for name in ("peak_rows", "tier_bytes"):
        memory.pop(name, None)
    if memory:
        memory["repair"] = {**memory["repair"], "seconds": None}
        memory["repairs"] = [
            {**repair, "seconds": None, "in_pause": None, "bytes_read": None}
            for repair in memory["repairs"]
        ]
    return {**answer, "session": None, "seconds": None, "memory": memory, "state": None}


def same(answers: list[Json], others: list[Json]) -> bool:
    return [substance(answer) for answer in answers] == [substance(other) for other in others]


def in_background(request: Callable[[], Any]) -> tuple[threading.Thread, list[KvrecallError]]:
    """Send a request that will be interrupted; the thread appends its error to the list."""
    errors: list[KvrecallError] = []

    def run() -> None:
        try:
            request()
        except KvrecallError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def goes_on_as_if_nothing_had_happened(
    walk: Walk, before: Json, undisturbed: list[Json], *, moved: bool = False
) -> bool:
    """Check that acknowledged steps persist, and that the other steps equal the undisturbed server's.

    moved: a repair may have moved rows since.
    """
    state = walk.state()
    assert state | {"memory": before["memory"]} == before if moved else state == before
    assert walk.repeats_its_answers()
    return same(walk.until(END).answers, undisturbed)


def test_a_kill_between_and_within_turns(victim, begin, undisturbed, say) -> None:
    resting, reading, speaking = (begin(victim, MIDDLE) for _ in range(3))
    before = [walk.state() for walk in (resting, reading, speaking)]
    stored = victim.metric("kvrecall_tier_bytes", tier="nvme")
    long = {"messages": [say.user(say.chatter(3, 400))], "generate": False}
    client = victim.client()
    thread, errors = in_background(lambda: client.turn(reading.session, **long, key="broken"))
    # Rows of the turn are in files already at the kill: a restart must not count them as the
    # session's.
    say.until(
        lambda: victim.metric("kvrecall_tier_bytes", tier="nvme") > stored + 300_000,
        "a part of the prefill",
    )
    stream = victim.own.stream(speaking.session, [say.user("Go on.")], max_tokens=400, key="broken")
    assert [type(next(stream)) for _ in range(3)] == [TextDelta] * 3
    assert [walk.state()["state"] for walk in (resting, reading, speaking)] == [
        "idle",
        "prefilling",
        "decoding",
    ]
    victim.kill()
    thread.join()
    assert [error.code for error in errors] == ["connection_failed"]
    with pytest.raises(KvrecallError):
        list(stream)
    victim.start()
    for walk, state in zip((resting, reading, speaking), before, strict=True):
        assert state["turns"] == MIDDLE
        assert goes_on_as_if_nothing_had_happened(walk, state, undisturbed)


def test_an_interrupted_turn_can_be_retried_with_its_key(victim, begin, undisturbed, say) -> None:
    walk = begin(victim, END - 1)
    client = victim.client()
    thread, errors = in_background(
        lambda: client.turn(walk.session, [say.user(say.chatter(4, 400))], key="step-5")
    )
    say.until(lambda: walk.state()["state"] == "prefilling", "the prefill")
    victim.kill()
    thread.join()
    assert errors
    victim.start()
    assert walk.state()["turns"] == undisturbed[END - 2]["turn"]
    assert same(walk.until(END).answers, undisturbed)
    assert walk.repeats_its_answers()


def at_once(walk: Walk, say) -> None:
    """The moment of the acknowledgement.

    The repair that it calls for was not begun, or is at work.
    """


def in_the_repair(walk: Walk, say) -> None:
    say.until(lambda: walk.state()["state"] == "repairing" or promoted(walk) > 0, "a repair")


def after_the_repair(walk: Walk, say) -> None:
    say.until(
        lambda: promoted(walk) > 0 and walk.state()["state"] == "paused", "the end of a repair"
    )


def promoted(walk: Walk) -> int:
    return walk.client.memory(walk.session).promoted_rows


@pytest.mark.parametrize("moment", [at_once, in_the_repair, after_the_repair])
def test_a_kill_in_a_pause_before_and_after_the_result(
    victim, begin, undisturbed, say, moment
) -> None:
    answered = begin(victim, PAUSED)
    after_the_repair(answered, say)
    answered.until(ANSWERED)
    waiting = begin(victim, PAUSED)
    moment(waiting, say)
    held = promoted(waiting) if moment is after_the_repair else 0
    before = [walk.state() | {"state": "paused"} for walk in (waiting, answered)]
    victim.kill()
    victim.start()
    calls = [[(call["id"], call["status"]) for call in state["pending_calls"]] for state in before]
    assert calls == [[("c1", "pending")], [("c1", "completed")]]
    assert promoted(waiting) >= held
    # A repair may be committed between the look and the kill, unless it is over.
    moved = moment is not after_the_repair
    assert waiting.state()["memory"]["length"] == before[0]["memory"]["length"]
    assert goes_on_as_if_nothing_had_happened(waiting, before[0], undisturbed, moved=moved)
    assert goes_on_as_if_nothing_had_happened(answered, before[1], undisturbed)


def test_repeated_kills_and_no_token_is_prefilled_twice(victim, begin, undisturbed) -> None:
    walk = begin(victim, MIDDLE)
    for end in (PAUSED, END):
        length = walk.state()["length"]
        victim.kill()
        victim.start()
        new = [answer["usage"]["prompt_tokens"] for answer in walk.until(end).answers[-1:]]
        assert victim.metric("kvrecall_tier_hits_total", tier="nvme") > 0, (
            "no row was read from the files"
        )
        assert victim.metric("kvrecall_tokens_total", kind="prompt") < 100 < length
        assert new == [undisturbed[end - 1]["usage"]["prompt_tokens"]]
    assert same(walk.answers, undisturbed)


def test_answers_are_settled_to_the_same_bits_though_the_server_is_killed_behind_each(
    new_server: Callable[..., Any], say: Any
) -> None:
    """Their rows are computed again in the pause, or with the next turn where there was none."""
    server = new_server()
    server.start()
    settings: Json = {"research": {"method": "icecache"}, "budget": 128, "seed": 11}
    said: Json = {"max_tokens": 150, "temperature": 1.0}
    turns = [[say.user(say.chatter(40 + turn, 9))] for turn in range(3)]
    session = server.own.create_session(**settings).id
    undisturbed = [server.own.turn(session, messages, **said) for messages in turns]
    session = server.own.create_session(**settings).id
    for messages, expected in zip(turns, undisturbed, strict=True):
        answer = server.own.turn(session, messages, **said)
        server.kill()
        server.start()
        assert answer.text == expected.text
        assert answer.memory.length == expected.memory.length
