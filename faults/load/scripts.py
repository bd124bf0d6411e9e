"""Scripts of conversations under faults: functions of a seed, with one right answer per step.

Budgets are small, so that rows are evicted, and pauses are repaired: an answer depends on many
stored rows. A turn waits for the repairs that are due, so that no answer depends on timing.
"""

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

Json = dict[str, Any]
REPAIRED: Json = {
    "budget": 96,
    "research": {"repair_rows": 32, "repair_on": ["tool_call", "tool_result", "turn"]},
}
# Episodes are built and rebuilt in the background, so answers depend on timing.
EPISODES: Json = {
    "research": {
        "method": "epicache",
        "repair_rows": 16,
        "episodes": {"count": 2},
    },
    "budget": 96,
}
_SCRIPTS_PER_EPISODES = 8
# Two episodes need 16 utterances, which is more than the other turns of a script have.
_TURNS_BEFORE_EPISODES = 5
NOT_REPAIRED: Json = {"budget": 64, "research": {"repair_rows": 0}}
SYSTEM = (
    "You are a helpful assistant. You remember codes, and you look them up when you are asked to."
)
# Longer than two pages: its rows are shared, and who wrote them is deleted while others use them.
LONG_SYSTEM = " ".join(
    [
        SYSTEM,
        *(f"Rule {number}: the code of door {number} is {1000 + number}." for number in range(16)),
    ]
)
_NAMES = ("Ada", "Ben", "Clara", "David", "Emma", "Frank")
_THINGS = ("locker", "garage", "office", "garden")
_LINES = (
    "The code of {name}'s {thing} is {code}.",
    "{name} called about the {thing} again today.",
    "By the way, the {thing} of {name} has number {code}.",
    "I think that {name} will be late, the {thing} is closed.",
)

Kind = Literal["create", "turn", "event", "fork", "abort", "move"]


@dataclass(frozen=True)
class Step:
    """One write to session number `session` of its script.

    A fork's session is the parent; `body["as"]` is the number of the new one. An abort is a turn
    that is streamed without a key and left after its first words; as a move, it changes no answer.
    """

    kind: Kind
    session: int
    body: Json = field(default_factory=dict)
    stream: bool = False


@dataclass(frozen=True)
class Script:
    """A conversation and its forks. Every other script has `repairs`, and one in eight episodes.

    Of one with `episodes` only the log is compared, and answers that are given again. The steps
    from number `sleeps_at` on are sent at the end of a round, to sessions that slept.
    """

    number: int
    steps: tuple[Step, ...]
    sleeps_at: int

    @property
    def repairs(self) -> bool:
        """True if its sessions repair evicted rows."""
        return self.number % 2 == 0

    @property
    def episodes(self) -> bool:
        """True if its sessions have episodes."""
        return self.number % _SCRIPTS_PER_EPISODES == _SCRIPTS_PER_EPISODES - 1


def scripts(seed: int, count: int) -> list[Script]:
    """`count` different conversations, a function of the seed."""
    return [_script(Random(f"{seed} {number}"), number) for number in range(count)]


def _script(rng: Random, number: int) -> Script:
    steps = _steps(rng, number)
    sessions = 1 + sum(step.kind == "fork" for step in steps)
    awake = [_turn(rng, session, [_user(get_question(rng))]) for session in range(sessions)]
    return Script(number, (*steps, *awake), len(steps))


def _steps(rng: Random, number: int) -> list[Step]:
    system = LONG_SYSTEM if number % 4 < 2 else SYSTEM
    opening = [{"role": "system", "content": system}, _user(get_chatter(rng, 12))]
    settings = NOT_REPAIRED if number % 2 else REPAIRED
    if number % _SCRIPTS_PER_EPISODES == _SCRIPTS_PER_EPISODES - 1:
        settings = EPISODES
    steps = [Step("create", 0, settings | {"seed": number}), _turn(rng, 0, opening)]
    if settings is EPISODES:
        steps += [
            _turn(rng, 0, [_user(get_chatter(rng, 4))]) for _ in range(_TURNS_BEFORE_EPISODES)
        ]
    for pause in range(rng.randrange(1, 3)):
        if rng.random() < 0.5:
            steps += _detour(rng, 0)
        steps += [
            _turn(rng, 0, [_user(get_chatter(rng, rng.randrange(8, 25)))]),
            *_pause(rng, 0, f"c{pause}"),
        ]
    if rng.random() < 0.5:
        steps += _fork(rng, turns=sum(step.kind == "turn" for step in steps))
    steps.append(_turn(rng, 0, [_user(get_question(rng))]))
    return steps


def _detour(rng: Random, session: int) -> list[Step]:
    """An aborted turn; other words in another worker, if there is one; and back."""
    aborted = {
        "messages": [_user(f"Forget this. {get_chatter(rng, 30)}")],
        "max_tokens": 300,
        "repair": False,
        "wait_for_repairs": True,
    }
    words = _turn(rng, session, [_user(get_chatter(rng, rng.randrange(8, 25)))])
    move = Step("move", session)
    return [Step("abort", session, aborted), move, words, move]


def _fork(rng: Random, turns: int) -> list[Step]:
    """A fork at the end of the conversation or, as often, at its first turn, and turns in it."""
    at = rng.choice((None, 1))
    child = [
        _turn(rng, 1, [_user(get_chatter(rng, rng.randrange(6, 15)))]),
        _turn(rng, 1, [_user(get_question(rng))]),
    ]
    return [Step("fork", 0, {"turn": at, "turns": at or turns, "as": 1}), *child]


def _pause(rng: Random, session: int, call: str) -> list[Step]:
    """A tool call, its result, and the turn after it."""
    name = rng.choice(_NAMES)
    thing = rng.choice(_THINGS)
    function = {"name": "look_up", "arguments": json.dumps({"name": name, "thing": thing})}
    asks = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call, "function": function}],
    }
    found = f"{name}'s {thing} has number {rng.randrange(1000, 10000)}."
    kind = rng.choice(("tool_call.completed", "tool_call.completed", "tool_call.failed"))
    events = [Step("event", session, {"event_type": kind, "call_id": call, "result": found})]
    if rng.random() < 0.5:
        events.insert(
            0, Step("event", session, {"event_type": "tool_call.started", "call_id": call})
        )
    asking = Step(
        "turn",
        session,
        {"messages": [_user(get_question(rng)), asks], "generate": False, "wait_for_repairs": True},
    )
    return [asking, *events, _turn(rng, session, [])]


def _turn(rng: Random, session: int, messages: list[Json]) -> Step:
    sampling = {"max_tokens": rng.randrange(8, 25), "stop": ["<tool_call>"]}
    body = {"messages": messages, **sampling, "wait_for_repairs": True}
    return Step("turn", session, body, stream=rng.random() < 0.3)


def _user(text: str) -> Json:
    return {"role": "user", "content": text}


def get_question(rng: Random) -> str:
    """A user's question for a code."""
    return f"What is the code of {rng.choice(_NAMES)}'s {rng.choice(_THINGS)}?"


def get_chatter(rng: Random, sentences: int) -> str:
    """Sentences of about 14 tokens each, as users write them."""
    lines = [
        rng.choice(_LINES).format(
            name=rng.choice(_NAMES), thing=rng.choice(_THINGS), code=rng.randrange(1000, 10000)
        )
        for _ in range(sentences)
    ]
    return " ".join(lines)
