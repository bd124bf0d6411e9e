"""Conversations in a worker of this process: said once, then asked many times from the same state.

One session runs at a time. Decoding several at once would be faster, and which ones share a step would depend on
timing: sums of floats, and so now and then a token, would differ from run to run. Processes run side by side instead.
"""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

from evals.codecs import RAW, tiers_of
from evals.configs import Arm, rows_of
from kvrecall.app import calibration
from kvrecall.app.wiring import build_store
from kvrecall.domain.session_settings import EpisodeSettings
from kvrecall.domain.utterances import Utterance, said_by, text_of
from kvrecall.protocol.convert import message_from_wire
from kvrecall.protocol.v1 import worker_pb2 as wire
from kvstore.settings import CodecName
from workers import methods
from workers.engine.engine import Engine, Parts
from workers.engine.settings import WorkerSettings
from workers.generation import convert as wire_values
from workers.model import layer_sensitivity as profile
from workers.model.loader import LoadedModel, load_model
from workers.model.tokenizer import ChatTokenizer, load_tokenizer
from workers.scheduler.scheduler import Scheduler

Message = Mapping[str, Any]
"""An OpenAI-style message."""
MOST_REPLY_TOKENS = 32
ROOM_FOR_A_TURN = 256
"""Tokens that a question and its answer may take beside a history that is kept whole."""
_RAM_BYTES = 1 << 30


@dataclass(frozen=True)
class Setup:
    """How a conversation is kept. `budget`: rows per head, or a share of the history's tokens; see `arms.rows_of`.

    `codec`: of stored rows. Unless they are raw they are read back before every turn: see `codecs`.
    """

    model: str
    arm: Arm
    budget: str
    seed: int
    block_tokens: int
    episodes: EpisodeSettings
    codec: CodecName = RAW


@dataclass(frozen=True)
class Loaded:
    """A model in memory, with its tokenizer."""

    model: LoadedModel
    tokenizer: ChatTokenizer


@cache
def loaded(name: str) -> Loaded:
    """The model of that path or hub name, once per process. Raises ModelRefused."""
    model = load_model(name)
    return Loaded(model, load_tokenizer(name, model.eos_token_ids))


@cache
def sensitivity_of(name: str) -> tuple[float, ...] | None:
    """The layers' sensitivity (EpiCache 3.2), measured once per process; None where the context is too short."""
    found = loaded(name)
    if found.model.max_context < profile.LEAST_TOKENS:
        return None
    return calibration.measure(
        found.model, found.tokenizer, name, calibration.packaged_text(name)
    ).sensitivity


def tokens_of(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> int:
    """How many tokens messages are when a conversation begins with them."""
    segments = tokenizer.prompt([], [dict(message) for message in messages], [], False)
    return sum(len(segment.token_ids) for segment in segments)


@contextmanager
def worker_of(setup: Setup, rows: int, slots: int = 1) -> Iterator[Scheduler]:
    """A worker whose slots hold `rows` rows beside a block, with its rows in a folder that is deleted afterwards."""
    found = loaded(setup.model)
    layers = setup.arm.layer_budgets or methods.METHODS[setup.arm.method].layer_budgets
    sensitivity = sensitivity_of(setup.model) if layers == "sensitivity" else None
    settings = WorkerSettings(slots=slots, max_budget=rows, block_tokens=setup.block_tokens)
    with tempfile.TemporaryDirectory(prefix="kvrecall-eval-") as folder:
        store = build_store(found.model, Path(folder), _RAM_BYTES, tiers_of(setup.codec))
        scheduler = Scheduler(
            Engine(Parts(found.model, found.tokenizer, store, settings, sensitivity))
        )
        try:
            yield scheduler
        finally:
            scheduler.close()
            store.close()


@contextmanager
def remembered(setup: Setup, messages: Sequence[Message]) -> Iterator["Session"]:
    """A session, in a worker of its own, to which a whole history has been said within the setup's budget.

    Raises BadBudget and `workers.errors`.
    """
    tokenizer = loaded(setup.model).tokenizer
    length = tokens_of(tokenizer, messages)
    budget = rows_of(setup.budget, length)
    with worker_of(setup, budget if setup.arm.evicts else length + ROOM_FOR_A_TURN) as worker:
        session = Session(worker, spec_of(setup, budget), swapped=setup.codec != RAW)
        for turn in in_turns(messages, tokenizer, setup.block_tokens):
            session.say(turn)
        yield session


def spec_of(setup: Setup, budget: int, session: str = "asked") -> wire.SessionSpec:
    """The session that a setup asks for; it has no reserve for repair."""
    arm = setup.arm
    return wire.SessionSpec(
        session=session,
        epoch=1,
        budget=budget,
        method=arm.method,
        method_settings=arm.settings,
        layer_budgets=arm.layer_budgets,
        seed=setup.seed,
    )


@dataclass
class Session:
    """A session of the worker with its committed state and its log. `seconds`: spent in saying the log.

    `swapped`: its rows are read back from the store before every turn, whether it needs them or not.
    """

    scheduler: Scheduler
    spec: wire.SessionSpec
    swapped: bool = False
    state: wire.SessionState = field(default_factory=wire.SessionState)
    memory: wire.MemoryReport = field(default_factory=wire.MemoryReport)
    token_ids: list[int] = field(default_factory=list)
    utterances: list[Utterance] = field(default_factory=list)
    seconds: float = 0.0
    _as_committed: bool = False

    def say(self, messages: Sequence[Message], **options: Any) -> wire.TurnDone:
        """A turn that stays: recorded messages, remembered as they stand. `options`: other fields of TurnRequest.

        Raises `workers.errors`.
        """
        started = time.perf_counter()
        done = self._turn(messages, generate=False, **options)
        self.seconds += time.perf_counter() - started
        self.state = done.state
        self.memory = done.memory
        self._note(messages, done)
        self._as_committed = True
        return done

    def ask(
        self, messages: Sequence[Message], max_tokens: int, episode: wire.Episode | None = None
    ) -> wire.TurnDone:
        """A turn that is answered, greedily, and taken back: the next one meets the session as this one did."""
        return self._turn(
            messages, generate=True, sampling=wire.Sampling(max_tokens=max_tokens), episode=episode
        )

    def restore(self) -> None:
        """Put the session back to its committed state, where a question has changed it."""
        if self.swapped or not self._as_committed:
            self.scheduler.open(wire.OpenRequest(spec=self.spec, state=self.state)).result()
        self._as_committed = True

    def _turn(self, messages: Sequence[Message], **options: Any) -> wire.TurnDone:
        self.restore()
        self._as_committed = False
        said = [wire_values.to_wire(dict(message)) for message in messages]
        request = wire.TurnRequest(
            session=self.spec.session, epoch=self.spec.epoch, messages=said, **options
        )
        return self.scheduler.turn(request, _ignore).result()

    def _note(self, messages: Sequence[Message], done: wire.TurnDone) -> None:
        """Keep the turn's tokens, and its utterances as `kvrecall.domain.utterances` tells them apart."""
        values = [message_from_wire(wire_values.to_wire(dict(message))) for message in messages]
        runs = [(side, text_of(run)) for side, run in groupby(values, said_by)]
        ends = accumulate(done.utterance_tokens, initial=len(self.token_ids))
        for (side, text), (start, stop) in zip(runs, pairwise(ends), strict=True):
            self.utterances.append(Utterance(side, text, start, stop))
        self.token_ids += done.token_ids


def in_turns(
    messages: Sequence[Message], tokenizer: ChatTokenizer, tokens: int
) -> list[list[Message]]:
    """A history as turns of whole exchanges, each of at most about `tokens` tokens unless one exchange is longer.

    Said like this it is prefilled in blocks, with an eviction after each (EpiCache 2.2).
    """
    turns: list[list[Message]] = []
    size = 0
    for exchange in exchanges(messages):
        length = tokens_of(tokenizer, exchange)
        if turns and size + length <= tokens:
            turns[-1] += exchange
            size += length
        else:
            turns.append(exchange)
            size = length
    return turns


def exchanges(messages: Sequence[Message]) -> list[list[Message]]:
    """Messages from each word of the user's to the next; what comes before the first leads it."""
    groups: list[list[Message]] = []
    answered = False
    for message in messages:
        if not groups or (message["role"] == "user" and answered):
            groups.append([])
            answered = False
        groups[-1].append(message)
        answered = answered or message["role"] == "assistant"
    return groups


def active_rows(session: Session) -> float:
    """Active rows per KV head, a mean over heads and layers."""
    model = session.scheduler.engine.model
    row_bytes = model.shape.row_bytes(model.dtype) * model.shape.n_layers * model.shape.n_kv_heads
    return float(session.memory.active_bytes / row_bytes)


def _ignore(event: wire.TurnEvent) -> None:
    """Nobody reads along."""
