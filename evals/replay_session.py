"""A conversation computed once with the full cache and asked again from any selection of rows.

RepairKV 3.2: prompts and replies are replayed in every condition, so that conditions differ only in
the active rows of the context. All of it runs the worker's own code: turns, observation, scoring,
repair. There is one engine and no scheduler: a step starts when the last one has ended, so nothing
depends on timing.
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

from evals.codecs import RAW, store_settings
from evals.harness import Message, load
from kvrecall.protocol import convert
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.app.wiring import build_store
from kvstore.settings import CodecName
from workers import methods
from workers.engine.engine import Engine, Parts
from workers.engine.eviction.evict import active_rows
from workers.engine.eviction_scores import EvictionScores
from workers.engine.selection import Selection
from workers.engine.session import ResidentSession
from workers.engine.settings import WorkerSettings
from workers.generation.sampling import sample
from workers.generation.steps import Steps
from workers.primitives.observation import Observed
from workers.repair.observe import observe_signal
from workers.repair.repair import run_pause_repair
from workers.tasks.turn import run_turn

T = TypeVar("T")
_NAME = "replayed"


@dataclass(frozen=True)
class Operator:
    """A repair operator: settings of `SessionSpec`. With `swap`, rows replace others."""

    settings: str
    swap: bool = False


@dataclass(frozen=True)
class Reply:
    """The reply to a question, with the queries of the reply's own tokens."""

    text: str
    token_ids: tuple[int, ...]
    observed: Observed


class ReplaySession:
    """One session of an engine of its own. `state` is the full cache after all appended turns.

    `method` is the first stage's. No row is evicted while rows are appended, but the method
    observes what it would observe in a session with a budget.
    """

    def __init__(self, engine: Engine, method: str, seed: int) -> None:
        self.engine = engine
        self.method = methods.build(method)
        self._spec = pb.SessionSpec(
            session=_NAME,
            epoch=1,
            budget=engine.settings.max_budget,
            method=method,
            method_settings="{}",
            seed=seed,
        )
        self._full_spec = pb.SessionSpec(
            session=_NAME, epoch=1, budget=engine.settings.max_budget, method="full", seed=seed
        )
        self.state = pb.SessionState()

    # The full cache

    def append(self, messages: Sequence[Message]) -> list[int]:
        """Append recorded messages; returns their token ids. Raises `workers.errors`."""
        done = self._turn(self._spec, self.state, messages, generate=False)
        self.state = done.state
        return list(done.token_ids)

    def reply(self, question: str, max_tokens: int) -> Reply:
        """Answer greedily from the full cache and append question and answer.

        Raises `workers.errors`.
        """
        messages: list[Message] = [{"role": "user", "content": question}]
        before = self.state
        options = {"generate": True, "sampling": pb.Sampling(max_tokens=max_tokens)}
        done = self._turn(self._spec, before, messages, **options)
        reply = tuple(done.token_ids[done.prompt_tokens : done.prompt_tokens + done.output_tokens])
        observed = self._reply_queries(before, done.token_ids[: done.prompt_tokens], reply)
        # Observing the reply's queries has reset the session: run the same greedy turn again.
        again = self._turn(self._spec, before, messages, **options)
        assert again.token_ids == done.token_ids, "a greedy turn repeats itself"
        self.state = again.state
        return Reply(done.message.content, reply, observed)

    def first_stage_scores(self, observed: Observed, context: int) -> Tensor:
        """Scores of the first `context` tokens: float32, mean over all layers and heads."""
        resident = self._open_resident(self._spec, self.state)
        layers = range(self.engine.model.shape.n_layers)
        rows = [active_rows(self.engine.cache, resident, observed, layer) for layer in layers]
        scores = [self.method.scores(layer_rows).mean(0) for layer_rows in rows]
        return torch.stack(scores).mean(0)[:context].cpu()

    def keys(self) -> list[Tensor]:
        """Every key, per layer `[n_kv_heads, length, head_dim]`."""
        resident = self._open_resident(self._spec, self.state)
        cache = self.engine.cache
        layers = range(self.engine.model.shape.n_layers)
        return [cache.read(resident.slot, layer).keys.clone() for layer in layers]

    # Any selection of its rows

    def with_active(self, tokens: Tensor, scores: Tensor) -> pb.SessionState:
        """State with the rows of `tokens` active and all others evicted.

        `tokens` are int64 positions `[m]`; `scores` are the eviction scores of the context's
        tokens, float32.
        """
        shape = self.engine.model.shape
        ascending = tokens.sort().values.to(torch.int32)
        layers = tuple(ascending.repeat(shape.n_kv_heads, 1) for _ in range(shape.n_layers))
        selection = Selection(
            layers, tuple(torch.zeros_like(positions, dtype=torch.bool) for positions in layers)
        )
        evicted = EvictionScores.from_dense(scores.float(), len(scores))
        state = pb.SessionState()
        state.CopyFrom(self.state)
        state.selection = selection.to_bytes()
        state.eviction_scores = evicted.to_bytes()
        return state

    def repair(
        self,
        state: pb.SessionState,
        rows: int,
        operator: Operator,
        messages: Sequence[Message],
        stop_early: Callable[[], bool] = bool,
    ) -> pb.RepairResult:
        """The worker's repair of a state by at most `rows` tokens, on messages of the next turn.

        The repair ends at its first check at which `stop_early` returns true.
        """
        active = active_row_count(state)
        spec = pb.SessionSpec()
        spec.CopyFrom(self._spec)
        spec.budget = active if operator.swap else active + rows
        spec.repair_rows = rows
        spec.repair_settings = operator.settings
        request = pb.RepairRequest(
            session=_NAME, epoch=1, trigger="turn", messages=_to_wire(messages)
        )
        resident = self._open_resident(spec, state)
        steps = run_pause_repair(self.engine, resident, request, stop_early)
        return run_steps(self.engine, resident, steps)

    def observe(self, state: pb.SessionState, messages: Sequence[Message]) -> Observed:
        """Queries of messages of the next turn over a state's active rows."""
        resident = self._open_resident(self._spec, state)
        segments = self.engine.tokenizer.prompt(
            resident.session.recent, [dict(each) for each in messages], [], True
        )
        signal = [token for segment in segments for token in segment.token_ids]
        return run_steps(self.engine, resident, observe_signal(self.engine, resident, signal))

    def ask(self, state: pb.SessionState, messages: Sequence[Message], max_tokens: int) -> str:
        """Generate a greedy answer from a state's rows without committing it.

        Asserts that no row is evicted meanwhile.
        """
        before = Selection.from_bytes(state.selection).row_counts()
        sampling = pb.Sampling(max_tokens=max_tokens)
        done = self._turn(self._full_spec, state, messages, generate=True, sampling=sampling)
        new = done.state.length - state.length
        heads = self.engine.model.shape.n_kv_heads
        after = Selection.from_bytes(done.state.selection).row_counts()
        assert after == [rows + heads * new for rows in before], (
            "a row was evicted while a question was answered"
        )
        return str(done.message.content)

    def log_prob(self, state: pb.SessionState, messages: Sequence[Message], answer: str) -> float:
        """Mean log-probability (nats) of an answer's tokens after messages, from a state's rows."""
        new: list[Message] = [*messages, {"role": "assistant", "content": answer}]
        resident = self._open_resident(self._full_spec, state)
        request = self._request(new, generate=False, keep_distribution=True)
        steps = run_turn(self.engine, resident, request, _discard_event)
        run_steps(self.engine, resident, steps)
        kept = resident.session.distribution
        assert kept is not None, "the request keeps it"
        return float(kept.log_probs.gather(1, torch.tensor(kept.token_ids)[:, None]).mean())

    # Inside

    def _turn(
        self,
        spec: pb.SessionSpec,
        state: pb.SessionState,
        messages: Sequence[Message],
        **options: Any,
    ) -> pb.TurnDone:
        resident = self._open_resident(spec, state)
        request = self._request(messages, **options)
        steps = run_turn(self.engine, resident, request, _discard_event)
        return run_steps(self.engine, resident, steps)

    def _request(self, messages: Sequence[Message], **options: Any) -> pb.TurnRequest:
        return pb.TurnRequest(session=_NAME, epoch=1, messages=_to_wire(messages), **options)

    def _open_resident(self, spec: pb.SessionSpec, state: pb.SessionState) -> ResidentSession:
        return self.engine.swap_in(self.engine.open(spec, state))

    def _reply_queries(
        self, state: pb.SessionState, prompt: Sequence[int], reply: Sequence[int]
    ) -> Observed:
        """Queries of a reply's tokens, each at its position, over all rows before it."""
        resident = self._open_resident(self._spec, state)
        token_ids = [*resident.session.pending, *prompt]
        size = self.engine.settings.block_tokens
        for start in range(0, len(token_ids), size):
            self.engine.forward([resident], torch.tensor([token_ids[start : start + size]]))
        return self.engine.observe(resident, reply[-size:])


@contextmanager
def open_replay_session(
    model: str, method: str, seed: int, *, rows: int, block_tokens: int, codec: CodecName = RAW
) -> Iterator[ReplaySession]:
    """A session of at most `rows` rows per head, in an engine of its own; its files are deleted.

    Every step begins with rows from the store, so that all active rows have been through `codec`.
    """
    loaded = load(model)
    settings = WorkerSettings(slots=1, max_budget=rows, block_tokens=block_tokens)
    with tempfile.TemporaryDirectory(prefix="kvrecall-eval-") as folder:
        store = build_store(loaded.model, Path(folder), tiers=store_settings(codec))
        engine = Engine(Parts(loaded.model, loaded.tokenizer, store, settings))
        try:
            yield ReplaySession(engine, method, seed)
        finally:
            engine.close()
            store.close()


def active_tokens(state: pb.SessionState) -> Tensor:
    """Positions of the tokens with at least one active row, int64 ascending."""
    positions = Selection.from_bytes(state.selection).store_positions()
    tokens = torch.unique(torch.cat([in_layer.flatten() for in_layer in positions]))
    return torch.masked_select(tokens, tokens >= 0)


def active_row_count(state: pb.SessionState) -> int:
    """Active rows per KV head of the layer that has most."""
    return max(Selection.from_bytes(state.selection).rows_per_head())


def run_steps(engine: Engine, resident: ResidentSession, steps: Steps[T]) -> T:
    """Run a task of the worker to its end, as the scheduler does for a single one."""
    answer: Any = None
    while True:
        try:
            wanted = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        answer = None
        if isinstance(wanted, Future):
            wanted.result()
        elif wanted is not None:
            logits = engine.forward([resident], torch.tensor([[wanted.token]]))[:, -1]
            (answer,) = sample(logits, [wanted.sampler])


def _to_wire(messages: Sequence[Message]) -> list[pb.Message]:
    return [convert.chat_to_wire(dict(message)) for message in messages]


def _discard_event(event: pb.TurnEvent) -> None:
    """Ignore a streamed event: only the result counts."""
