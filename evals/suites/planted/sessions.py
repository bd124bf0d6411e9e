"""A session with a text in it, forked for every condition: each repaired, and asked."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from evals.configs import parse_config
from evals.harness import Message, load
from evals.replay_session import run_steps
from evals.spans import decode_with_offsets, overlapping
from evals.suites.planted.facts import Fact
from kvrecall.protocol.convert import chat_to_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.app.wiring import build_store
from workers.engine.engine import Engine, Parts
from workers.engine.session import Distribution, ResidentSession
from workers.engine.settings import WorkerSettings
from workers.primitives.observation import Observed
from workers.repair.repair import run_pause_repair
from workers.tasks.turn import run_turn

_BASE = "base"
# Tokens of the chat template around a message: its special token, the role, and a line end.
_TEMPLATE_TOKENS = 3


class _SharedObservation(Engine):
    """An engine for the repairs of one state's forks: they observe a block of tokens once.

    A long signal takes most of a repair's time, and conditions differ only in what follows it.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._observed: dict[tuple[int, ...], Observed] = {}

    def observe(self, resident: ResidentSession, token_ids: Sequence[int]) -> Observed:
        if resident.session.promoted_rows:  # a later hop
            return super().observe(resident, token_ids)
        key = tuple(token_ids)
        if key not in self._observed:
            self._observed[key] = super().observe(resident, token_ids)
        return self._observed[key]


@contextmanager
def open_engine(model: str, rows: int, slots: int, block_tokens: int) -> Iterator[Engine]:
    """An engine of its own with a temporary store. All repairs are of one cell's forks."""
    loaded = load(model)
    settings = WorkerSettings(slots=slots, max_budget=rows, block_tokens=block_tokens)
    with tempfile.TemporaryDirectory(prefix="kvrecall-eval-") as folder:
        store = build_store(loaded.model, Path(folder))
        engine = _SharedObservation(Parts(loaded.model, loaded.tokenizer, store, settings))
        try:
            yield engine
        finally:
            engine.close()
            store.close()


@dataclass(frozen=True)
class Reply:
    """The value that a session predicts after the beginning of the answer.

    `log_prob` is the mean log-probability of the expected value's tokens, in nats.
    """

    text: str
    right: bool
    log_prob: float


@dataclass(frozen=True)
class Cell:
    """A session that holds a text: its specification, state and token ids; whether it retrieves."""

    engine: Engine
    spec: pb.SessionSpec
    state: pb.SessionState
    token_ids: tuple[int, ...]
    retrieves: bool

    @classmethod
    def append(
        cls,
        engine: Engine,
        *,
        turns: Sequence[Sequence[Message]],
        seed: int,
        method: str,
        budget: int,
        repair_rows: int = 0,
    ) -> "Cell":
        """Append recorded turns to a new session; method: a run configuration.

        Raises BadConfig and `workers.errors`.
        """
        config = parse_config(method)
        spec = pb.SessionSpec(
            session=_BASE,
            epoch=1,
            method=config.method,
            method_settings=config.settings,
            layer_budgets=config.layer_budgets,
            options=config.options,
            budget=budget,
            repair_rows=repair_rows,
            seed=seed,
        )
        resident = engine.swap_in(engine.open(spec, pb.SessionState()))
        token_ids: list[int] = []
        state = pb.SessionState()
        for turn in turns:
            request = pb.TurnRequest(
                session=_BASE, epoch=1, messages=[chat_to_wire(dict(each)) for each in turn]
            )
            steps = run_turn(engine, resident, request, _discard_event)
            done = run_steps(engine, resident, steps)
            state = done.state
            token_ids += done.token_ids
        retrieves = resident.config.retrieval is not None
        return cls(engine, spec, state, tuple(token_ids), retrieves)

    def repair(self, name: str, settings: str, signal: Sequence[Message]) -> pb.RepairResult:
        """Fork the session as `name` and repair the fork on messages of the next turn."""
        spec = self._child_spec(name, settings)
        resident = self.engine.swap_in(self.engine.open(spec, self.state))
        request = pb.RepairRequest(
            session=spec.session,
            epoch=1,
            trigger="turn",
            messages=[chat_to_wire(dict(each)) for each in signal],
        )
        steps = run_pause_repair(self.engine, resident, request, bool)
        return run_steps(self.engine, resident, steps)

    def ask(
        self,
        facts: Sequence[Fact],
        name: str = "",
        settings: str = "{}",
        state: pb.SessionState | None = None,
    ) -> list[Reply]:
        """Ask every fact's question of a fork from its state, or of the session itself.

        The reply begins with the fact's answer up to the value, which is then predicted token by
        token: the greedy reply of a model that begins like this. Nothing is committed. Nothing is
        evicted, unless the session retrieves: then it is asked as it is.
        """
        spec = self._child_spec(name, settings)
        if not self.retrieves:
            spec.method = "full"
            spec.method_settings = "{}"
            spec.layer_budgets = ""
            spec.options = ""
            spec.budget = self.engine.settings.max_budget
            spec.repair_rows = 0
        replies = []
        for fact in facts:
            resident = self.engine.swap_in(self.engine.open(spec, state or self.state))
            request = self._question(spec.session, fact)
            run_steps(
                self.engine, resident, run_turn(self.engine, resident, request, _discard_event)
            )
            kept = resident.session.distribution
            assert kept is not None, "the request keeps it"
            replies.append(self._reply(kept, fact))
        return replies

    def template_tokens(self) -> set[int]:
        """Positions of the chat template's tokens: special ones and those right behind them."""
        special = set(self.engine.tokenizer.inner.all_special_ids)
        return {
            at
            for start, token in enumerate(self.token_ids)
            if token in special
            for at in range(start, start + _TEMPLATE_TOKENS)
        }

    def close(self) -> None:
        """Close all sessions of the engine."""
        for name in list(self.engine.sessions):
            self.engine.unload(name).result()

    def _child_spec(self, name: str, settings: str) -> pb.SessionSpec:
        spec = pb.SessionSpec()
        spec.CopyFrom(self.spec)
        spec.session = name or _BASE
        spec.repair_settings = settings
        return spec

    def _question(self, session: str, fact: Fact) -> pb.TurnRequest:
        messages: list[Message] = [
            {"role": "user", "content": fact.question},
            {"role": "assistant", "content": f"{fact.answer} {fact.value}."},
        ]
        return pb.TurnRequest(
            session=session,
            epoch=1,
            keep_distribution=True,
            messages=[chat_to_wire(dict(each)) for each in messages],
        )

    def _reply(self, kept: Distribution, fact: Fact) -> Reply:
        tokenizer = self.engine.tokenizer
        decoded, starts = decode_with_offsets(tokenizer, kept.token_ids)
        at = list(overlapping(starts, decoded.rfind(fact.value), fact.value))
        expected = torch.tensor(kept.token_ids)[at]
        predicted = kept.log_probs[at].argmax(-1)
        return Reply(
            tokenizer.decode(predicted.tolist()),
            bool((predicted == expected).all()),
            float(kept.log_probs[at].gather(1, expected[:, None]).mean()),
        )


def _discard_event(event: pb.TurnEvent) -> None:
    """Ignore a streamed event: only the result counts."""
