"""A conversation in a worker whose chat template drops reasoning, with its turn log."""

from typing import Any

from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.workers.conftest import WAIT
from tests.workers.model.architectures.family import Family
from workers.tasks.logged_tokens import LoggedTokens, fold_turns

PAGE = 64
Chat = dict[str, Any]


def user(text: str) -> Chat:
    """A user's message."""
    return {"role": "user", "content": text}


def said(text: str, reasoning: str = "", call: str = "") -> Chat:
    """An answer, with what was reasoned before, and with a call."""
    calls = [pb.ToolCall(id=call, name="look", arguments='{"at": "it"}')] if call else []
    return {"role": "assistant", "content": text, "reasoning": reasoning, "tool_calls": calls}


def result(text: str, call: str) -> Chat:
    """The result of a call."""
    return {"role": "tool", "content": text, "tool_call_id": call}


class Talk:
    """One session, its messages and its log."""

    def __init__(self, family: Family, name: str = "s", **spec: Any) -> None:
        self.family = family
        self.name = name
        self.epoch = 1
        self.spec = spec
        self.turns: list[pb.LoggedTurn] = []
        self.done: list[pb.TurnDone] = []
        family.open(name, **spec)

    @property
    def log(self) -> LoggedTokens:
        """What the session has, by its log."""
        return fold_turns(self.turns)

    @property
    def messages(self) -> list[pb.Message]:
        """All that was said."""
        return [message for turn in self.turns for message in turn.messages]

    def say(self, *messages: Chat, generate: bool = False, **sampling: Any) -> pb.TurnDone:
        """Run a turn, with the end of the log where a user's message is among them."""
        sent = [pb.Message(**message) for message in messages]
        request = pb.TurnRequest(
            session=self.name,
            epoch=self.epoch,
            messages=sent,
            generate=generate,
            sampling=pb.Sampling(**{"max_tokens": 24, **sampling}),
            earlier=self._find_earlier() if any(m.role == "user" for m in sent) else None,
        )
        done = self.family.worker.scheduler.turn(request, lambda _: None).result(WAIT)
        answer = [done.message] if done.HasField("message") else []
        logged = pb.LoggedTurn(
            token_ids=done.token_ids,
            prompt_tokens=done.prompt_tokens,
            output_tokens=done.output_tokens,
            messages=[*sent, *answer],
            recorded_tokens=done.recorded_tokens,
            unsettled_tokens=done.state.unsettled,
            rewrite=done.rewrite if done.HasField("rewrite") else None,
        )
        self.turns.append(logged)
        self.done.append(done)
        assert self.log.rows == done.state.length
        assert self.log.pending == list(done.state.pending)
        return done

    def reopen(self, number: int | None = None) -> None:
        """Open the session as a turn committed it, by default the last one, in a new epoch."""
        keep = len(self.turns) if number is None else number
        self.turns, self.done = self.turns[:keep], self.done[:keep]
        self.epoch += 2
        state = self.done[-1].state
        self.family.open(self.name, state=state, epoch=self.epoch, **self.spec)

    def _find_earlier(self) -> pb.Earlier:
        messages = self.messages
        users = [i for i, message in enumerate(messages) if message.role == "user"]
        if not users:
            return pb.Earlier()
        return pb.Earlier(messages=messages[users[-1] :], token_ids=self.log.tokens)
