"""A conversation that is said once to the full cache, and asked again from any selection of its rows.

RepairKV 3.2: what was said and answered is replayed in every condition, so that conditions differ only in which rows
of the context are active. All goes through the worker's own code: turns, observation, scoring, repair. There is one
engine and no scheduler: a step is taken when the last one has ended, so nothing depends on timing.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from evals.codecs import RAW, tiers_of
from evals.harness import Message, loaded
from kvrecall.app.wiring import build_store
from kvrecall.protocol import convert
from kvrecall.protocol.v1 import worker_pb2 as wire
from kvstore.settings import CodecName
from workers import methods
from workers.engine.engine import Engine, Parts
from workers.engine.eviction import active_rows
from workers.engine.selection import Selection
from workers.engine.session import ResidentSession
from workers.engine.settings import WorkerSettings
from workers.generation.steps import NextLogits, Steps
from workers.primitives.observation import Observed
from workers.repair.repair import run_pause_repair
from workers.tasks.turn import run_turn

T = TypeVar("T")
_RAM_BYTES = 1 << 31
_NAME = "replayed"


@dataclass(frozen=True)
class Operator:
    """How the worker repairs: `SessionSpec`'s settings and scan. `swap`: what comes takes the place of other rows."""

    settings: str
    scan: str = "exact"
    swap: bool = False


@dataclass(frozen=True)
class Reply:
    """What was said to a question, with the queries of the reply's own tokens."""

    text: str
    token_ids: tuple[int, ...]
    observed: Observed


class Replayed:
    """One session of an engine of its own. `state` is the full cache's, after everything that `say` and `reply` said.

    `method` is the first stage's: while rows are added every one stays, but it sees what it would have seen.
    """

    def __init__(self, engine: Engine, method: str, seed: int) -> None:
        self.engine = engine
        self.method = methods.build(method)
        self._spec = wire.SessionSpec(
            session=_NAME,
            epoch=1,
            budget=engine.settings.max_budget,
            method=method,
            method_settings="{}",
            seed=seed,
        )
        self._answering = wire.SessionSpec(
            session=_NAME, epoch=1, budget=engine.settings.max_budget, method="full", seed=seed
        )
        self.state = wire.SessionState()

    # The full cache

    def say(self, messages: Sequence[Message]) -> list[int]:
        """Recorded messages, which stay; returns their tokens. Raises `workers.errors`."""
        done = self._turn(self._spec, self.state, messages, generate=False)
        self.state = done.state
        return list(done.token_ids)

    def reply(self, question: str, most_tokens: int) -> Reply:
        """Answer from the full cache, greedily; question and answer stay. Raises `workers.errors`."""
        messages: list[Message] = [{"role": "user", "content": question}]
        before = self.state
        options = {"generate": True, "sampling": wire.Sampling(max_tokens=most_tokens)}
        done = self._turn(self._spec, before, messages, **options)
        said = tuple(done.token_ids[done.prompt_tokens : done.prompt_tokens + done.output_tokens])
        observed = self._queries_of(before, done.token_ids[: done.prompt_tokens], said)
        # Looking at the reply's queries has put the session back: the same greedy turn once more.
        again = self._turn(self._spec, before, messages, **options)
        assert again.token_ids == done.token_ids, "a greedy turn repeats itself"
        self.state = again.state
        return Reply(done.message.content, said, observed)

    def first_stage(self, observed: Observed, context: int) -> Tensor:
        """What the method scores each of the first `context` tokens: float32, the mean over all layers and heads."""
        resident = self._swapped_in(self._spec, self.state)
        layers = range(self.engine.model.shape.n_layers)
        rows = [active_rows(self.engine.cache, resident, observed, layer) for layer in layers]
        return (
            torch.stack([self.method.scores(of_layer).mean(0) for of_layer in rows])
            .mean(0)[:context]
            .cpu()
        )

    def keys(self) -> list[Tensor]:
        """Every key, per layer `[n_kv_heads, length, head_dim]`."""
        resident = self._swapped_in(self._spec, self.state)
        cache = self.engine.cache
        layers = range(self.engine.model.shape.n_layers)
        return [cache.read(resident.slot, layer).keys.clone() for layer in layers]

    # Any selection of its rows

    def holding(self, tokens: Tensor, scores: Tensor) -> wire.SessionState:
        """The same session with the rows of these tokens active, int64 `[m]`; the others were evicted with `scores`.

        scores: float32, of the context's tokens.
        """
        shape = self.engine.model.shape
        ascending = tokens.sort().values.to(torch.int32)
        layers = tuple(ascending.repeat(shape.n_kv_heads, 1) for _ in range(shape.n_layers))
        selection = Selection(
            layers, tuple(torch.zeros_like(of_layer, dtype=torch.bool) for of_layer in layers)
        )
        evicted = torch.zeros(self.state.length)
        evicted[: len(scores)] = scores.float()
        state = wire.SessionState()
        state.CopyFrom(self.state)
        state.selection = selection.to_bytes()
        state.eviction_scores = evicted.numpy().tobytes()
        return state

    def repaired(
        self,
        state: wire.SessionState,
        rows: int,
        operator: Operator,
        messages: Sequence[Message],
        stop_requested: Callable[[], bool] = bool,
    ) -> wire.RepairResult:
        """The worker's repair of a state by at most `rows` tokens, on messages that are about to be said."""
        held = max(Selection.from_bytes(state.selection).rows_per_head())
        spec = wire.SessionSpec()
        spec.CopyFrom(self._spec)
        spec.budget = held if operator.swap else held + rows
        spec.repair_rows = rows
        spec.repair_settings = operator.settings
        spec.repair_scan = operator.scan
        request = wire.RepairRequest(
            session=_NAME, epoch=1, trigger="turn", messages=_to_wire(messages)
        )
        resident = self._swapped_in(spec, state)
        return _finished(
            self.engine, resident, run_pause_repair(self.engine, resident, request, stop_requested)
        )

    def observed(self, state: wire.SessionState, messages: Sequence[Message]) -> Observed:
        """The queries of messages that are about to be said, over a state's active rows."""
        resident = self._swapped_in(self._spec, state)
        segments = self.engine.tokenizer.prompt(
            resident.session.recent, [dict(each) for each in messages], [], True
        )
        signal = [token for segment in segments for token in segment.token_ids]
        return self.engine.observe(resident, [*resident.session.pending, *signal])

    def ask(self, state: wire.SessionState, messages: Sequence[Message], most_tokens: int) -> str:
        """Answer from a state's rows, greedily, and forget it: nothing is evicted while it answers."""
        held = Selection.from_bytes(state.selection).row_counts()
        sampling = wire.Sampling(max_tokens=most_tokens)
        done = self._turn(self._answering, state, messages, generate=True, sampling=sampling)
        new = done.state.length - state.length
        heads = self.engine.model.shape.n_kv_heads
        after = Selection.from_bytes(done.state.selection).row_counts()
        assert after == [rows + heads * new for rows in held], (
            "a row left while a question was answered"
        )
        return str(done.message.content)

    def log_prob(self, state: wire.SessionState, messages: Sequence[Message], answer: str) -> float:
        """The mean log-probability, in nats, of an answer's tokens after messages, from a state's rows."""
        said: list[Message] = [*messages, {"role": "assistant", "content": answer}]
        resident = self._swapped_in(self._answering, state)
        request = self._request(said, generate=False, keep_distribution=True)
        _finished(self.engine, resident, run_turn(self.engine, resident, request, _unheard))
        heard = resident.session.distribution
        assert heard is not None, "it was to be kept"
        return float(heard.log_probs.gather(1, torch.tensor(heard.token_ids)[:, None]).mean())

    # Inside

    def _turn(
        self,
        spec: wire.SessionSpec,
        state: wire.SessionState,
        messages: Sequence[Message],
        **options: Any,
    ) -> wire.TurnDone:
        resident = self._swapped_in(spec, state)
        request = self._request(messages, **options)
        return _finished(self.engine, resident, run_turn(self.engine, resident, request, _unheard))

    def _request(self, messages: Sequence[Message], **options: Any) -> wire.TurnRequest:
        return wire.TurnRequest(session=_NAME, epoch=1, messages=_to_wire(messages), **options)

    def _swapped_in(self, spec: wire.SessionSpec, state: wire.SessionState) -> ResidentSession:
        return self.engine.swap_in(self.engine.open(spec, state))

    def _queries_of(
        self, state: wire.SessionState, prompt: Sequence[int], reply: Sequence[int]
    ) -> Observed:
        """The queries of a reply's tokens, each at its position, over all rows before it."""
        resident = self._swapped_in(self._spec, state)
        token_ids = [*resident.session.pending, *prompt]
        size = self.engine.settings.block_tokens
        for start in range(0, len(token_ids), size):
            self.engine.forward([resident], torch.tensor([token_ids[start : start + size]]))
        return self.engine.observe(resident, reply)


@contextmanager
def replaying(
    model: str, method: str, seed: int, *, rows: int, block_tokens: int, codec: CodecName = RAW
) -> Iterator[Replayed]:
    """A session that may become `rows` rows long, in an engine of its own; its files are deleted afterwards.

    Every step begins with rows out of the store, so that all that is active has been through its `codec`.
    """
    found = loaded(model)
    settings = WorkerSettings(slots=1, max_budget=rows, block_tokens=block_tokens)
    with tempfile.TemporaryDirectory(prefix="kvrecall-eval-") as folder:
        store = build_store(found.model, Path(folder), _RAM_BYTES, tiers_of(codec))
        engine = Engine(Parts(found.model, found.tokenizer, store, settings))
        try:
            yield Replayed(engine, method, seed)
        finally:
            engine.close()
            store.close()


def tokens_held(state: wire.SessionState) -> Tensor:
    """The tokens of which some row is active, int64 ascending."""
    places = Selection.from_bytes(state.selection).store_positions()
    held = torch.unique(torch.cat([of_layer.flatten() for of_layer in places]))
    return torch.masked_select(held, held >= 0)


def rows_held(state: wire.SessionState) -> int:
    """Active rows per KV head, of the layer that has most."""
    return max(Selection.from_bytes(state.selection).rows_per_head())


def _finished(engine: Engine, resident: ResidentSession, steps: Steps[T]) -> T:
    """Drive a job of the worker's to its end, as the scheduler does where there is only one."""
    answer: Any = None
    while True:
        try:
            wanted = steps.send(answer)
        except StopIteration as end:
            found: T = end.value
            return found
        answer = None
        if isinstance(wanted, Future):
            wanted.result()
        elif wanted is not None:
            row = engine.forward([resident], torch.tensor([[wanted]]))[0, -1]
            answer = NextLogits(row, int(row.argmax()))


def _to_wire(messages: Sequence[Message]) -> list[wire.Message]:
    return [convert.chat_to_wire(dict(message)) for message in messages]


def _unheard(event: wire.TurnEvent) -> None:
    """Nobody reads along."""
