"""Conversations in a worker of this process: appended once, asked many times from one state.

One session runs at a time. Decoding several at once would be faster, but which of them share a step
would depend on timing: sums of floats, and so now and then a token, would differ from run to run.
Processes run side by side instead.
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

import torch

from evals.codecs import RAW, store_settings
from evals.configs import RunConfig, budget_rows
from kvrecall.domain.settings.session import EpisodeSettings
from kvrecall.domain.utterances import Utterance, join_text, side_of_message
from kvrecall.protocol.convert import chat_to_wire, message_from_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.app import calibration
from kvrecall_server.app.models import resolve_model
from kvrecall_server.app.wiring import build_state_store, build_store
from kvstore.settings import CodecName
from workers import methods
from workers.engine.engine import Engine, Parts
from workers.engine.session import Distribution
from workers.engine.settings import WorkerSettings
from workers.model import layer_sensitivity
from workers.model.loader import LoadedModel, load_model
from workers.model.tokenizer import ChatTokenizer, load_tokenizer
from workers.scheduler.scheduler import Scheduler

# An OpenAI-style message.
Message = Mapping[str, Any]
MAX_REPLY_TOKENS = 32
# Tokens that a question and its answer may take beside a history that is not evicted.
TURN_TOKENS = 256
_SYSTEM: Message = {"role": "system", "content": "You are a helpful assistant."}
_STATE_BYTES = 1 << 30


@dataclass(frozen=True)
class Setup:
    """Settings of a session.

    `budget` is a number of rows per head, or a share of the history's tokens, see
    `configs.budget_rows`. `codec` is that of stored rows; unless it is raw, they are read back
    before every turn, see `codecs`.
    """

    model: str
    config: RunConfig
    budget: str
    seed: int
    block_tokens: int
    episodes: EpisodeSettings
    codec: CodecName = RAW


@dataclass(frozen=True)
class Loaded:
    """A loaded model with its tokenizer."""

    model: LoadedModel
    tokenizer: ChatTokenizer


@cache
def load(name: str) -> Loaded:
    """Load a model by any name that `--model` takes, once per process. Raises ModelRefused.

    On a CPU it computes in float32, so that results do not depend on the CPU's instructions.
    """
    path = resolve_model(name)
    model = load_model(path, None if torch.cuda.is_available() else torch.float32)
    return Loaded(model, load_tokenizer(path, model.eos_token_ids))


@cache
def get_sensitivity(name: str) -> tuple[float, ...] | None:
    """Sensitivity of each layer (EpiCache 3.2), measured once per process.

    None if the model's context is too short to measure it.
    """
    loaded = load(name)
    if loaded.model.max_context < layer_sensitivity.MIN_TOKENS:
        return None
    return calibration.measure(
        loaded.model, loaded.tokenizer, name, calibration.packaged_text(name)
    ).sensitivity


def count_tokens(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> int:
    """Number of tokens of messages in a conversation.

    Without the system message that some templates put in front of a conversation that has none.
    """
    if not messages or messages[0]["role"] == "system":
        return _count_opening(tokenizer, messages)
    return _count_opening(tokenizer, [_SYSTEM, *messages]) - _count_opening(tokenizer, [_SYSTEM])


def _count_opening(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> int:
    segments = tokenizer.prompt([], [dict(message) for message in messages], [], False)
    return sum(len(segment.token_ids) for segment in segments)


@contextmanager
def open_worker(
    setup: Setup, rows: int, slots: int = 1, chunk_tokens: int | None = None
) -> Iterator[Scheduler]:
    """A worker whose slots hold `rows` rows per head and a block, with a temporary store."""
    loaded = load(setup.model)
    config = setup.config
    layers = config.layer_budgets or methods.METHODS[config.method].layer_budgets
    sensitivity = get_sensitivity(setup.model) if layers == "sensitivity" else None
    settings = WorkerSettings(
        slots=slots, max_budget=rows, block_tokens=setup.block_tokens, chunk_tokens=chunk_tokens
    )
    with tempfile.TemporaryDirectory(prefix="kvrecall-eval-") as folder:
        tiers = store_settings(setup.codec)
        store = build_store(loaded.model, Path(folder), tiers=tiers)
        states = build_state_store(loaded.model, Path(folder), _STATE_BYTES, tiers)
        scheduler = Scheduler(
            Engine(
                Parts(loaded.model, loaded.tokenizer, store, settings, sensitivity, states=states)
            )
        )
        try:
            yield scheduler
        finally:
            scheduler.close()
            scheduler.engine.stored.close()


@contextmanager
def open_session(
    setup: Setup, messages: Sequence[Message], chunk_tokens: int | None = None
) -> Iterator["Session"]:
    """A session in a worker of its own that holds a whole history within the setup's budget.

    Raises BadBudget and `workers.errors`.
    """
    tokenizer = load(setup.model).tokenizer
    length = count_tokens(tokenizer, messages)
    budget = budget_rows(setup.budget, length)
    rows = budget if setup.config.evicts else length + TURN_TOKENS
    with open_worker(setup, rows, chunk_tokens=chunk_tokens) as worker:
        session = Session(worker, build_spec(setup, budget), reload_every_turn=setup.codec != RAW)
        for turn in split_turns(messages, tokenizer, setup.block_tokens):
            session.append(turn)
        yield session


def build_spec(setup: Setup, budget: int, session: str = "asked") -> pb.SessionSpec:
    """Specification of a session under a setup, without rows reserved for repair."""
    config = setup.config
    return pb.SessionSpec(
        session=session,
        epoch=1,
        budget=budget,
        method=config.method,
        method_settings=config.settings,
        layer_budgets=config.layer_budgets,
        options=config.options,
        seed=setup.seed,
    )


@dataclass
class Session:
    """A session of the worker with its committed state and its log.

    `seconds` is the time spent in appending the log. With `reload_every_turn` its rows are read
    back from the store before every turn, whether it needs them or not.
    """

    scheduler: Scheduler
    spec: pb.SessionSpec
    reload_every_turn: bool = False
    state: pb.SessionState = field(default_factory=pb.SessionState)
    memory: pb.MemoryReport = field(default_factory=pb.MemoryReport)
    token_ids: list[int] = field(default_factory=list)
    utterances: list[Utterance] = field(default_factory=list)
    seconds: float = 0.0
    _as_committed: bool = False

    def append(self, messages: Sequence[Message], **options: Any) -> pb.TurnDone:
        """Append recorded messages as a turn, without generating, and commit it.

        `options` are other fields of TurnRequest. Raises `workers.errors`.
        """
        started = time.perf_counter()
        done = self._turn(messages, generate=False, **options)
        self.seconds += time.perf_counter() - started
        self.state = done.state
        self.memory = done.memory
        self._log(messages, done)
        self._as_committed = True
        return done

    def read(self, messages: Sequence[Message], **options: Any) -> pb.TurnDone:
        """Prefill recorded messages as a turn without committing it, as `ask` does.

        `options` are other fields of TurnRequest. Raises `workers.errors`.
        """
        return self._turn(messages, generate=False, **options)

    def repair(self, messages: Sequence[Message]) -> pb.RepairReport:
        """Repair on messages of the next turn, none of which is appended, and commit it.

        Raises `workers.errors`.
        """
        self.restore()
        request = pb.RepairRequest(
            session=self.spec.session,
            epoch=self.spec.epoch,
            trigger="turn",
            messages=_to_wire(messages),
        )
        result = self.scheduler.repair(request).result()
        self.state = result.state
        return result.report

    @property
    def distribution(self) -> Distribution:
        """Next-token log-probabilities of the last turn, which has kept them."""
        kept = self.scheduler.engine.session(self.spec.session).distribution
        assert kept is not None, "the turn keeps its distribution"
        return kept

    def ask(
        self,
        messages: Sequence[Message],
        max_tokens: int,
        episode: pb.Episode | None = None,
        remembered: Sequence[pb.Passage] = (),
        **sampling: Any,
    ) -> pb.TurnDone:
        """Generate an answer without committing it: the next turn starts from the same state.

        `remembered`: what it sees of other sessions. It is greedy; `sampling` are other fields of
        Sampling. Raises `workers.errors`.
        """
        chosen = pb.Sampling(max_tokens=max_tokens, **sampling)
        return self._turn(
            messages, generate=True, sampling=chosen, episode=episode, remembered=remembered
        )

    def restore(self) -> None:
        """Restore the committed state if a question has changed the session."""
        if self.reload_every_turn or not self._as_committed:
            self.scheduler.open(pb.OpenRequest(spec=self.spec, state=self.state)).result()
        self._as_committed = True

    def _turn(self, messages: Sequence[Message], **options: Any) -> pb.TurnDone:
        self.restore()
        self._as_committed = False
        request = pb.TurnRequest(
            session=self.spec.session,
            epoch=self.spec.epoch,
            messages=_to_wire(messages),
            **options,
        )
        return self.scheduler.turn(request, _discard_event).result()

    def _log(self, messages: Sequence[Message], done: pb.TurnDone) -> None:
        """Log the turn's tokens, and its utterances as `kvrecall.domain.utterances` splits them."""
        values = [message_from_wire(chat_to_wire(dict(message))) for message in messages]
        runs = [(side, join_text(run)) for side, run in groupby(values, side_of_message)]
        ends = accumulate(done.utterance_tokens, initial=len(self.token_ids))
        for (side, text), (start, stop) in zip(runs, pairwise(ends), strict=True):
            self.utterances.append(Utterance(side, text, start, stop))
        self.token_ids += done.token_ids


def split_turns(
    messages: Sequence[Message], tokenizer: ChatTokenizer, tokens: int
) -> list[list[Message]]:
    """A history as turns of whole exchanges, each of at most about `tokens` tokens.

    A single exchange may be longer. A history appended like this is prefilled in blocks, with an
    eviction after each (EpiCache 2.2).
    """
    turns: list[list[Message]] = []
    size = 0
    for exchange in split_exchanges(messages):
        length = count_tokens(tokenizer, exchange)
        if turns and size + length <= tokens:
            turns[-1] += exchange
            size += length
        else:
            turns.append(exchange)
            size = length
    return turns


def split_exchanges(messages: Sequence[Message]) -> list[list[Message]]:
    """Messages grouped from each user message to the next one that follows an answer.

    Messages before the first user message lead the first group.
    """
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


def _to_wire(messages: Sequence[Message]) -> list[pb.Message]:
    return [chat_to_wire(dict(message)) for message in messages]


def _discard_event(event: pb.TurnEvent) -> None:
    """Ignore a streamed event: only the result counts."""
