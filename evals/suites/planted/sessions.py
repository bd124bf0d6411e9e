"""A session with a text in it, forked for every condition: repaired and asked in one batch."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from evals.harness import Message, load
from evals.lockstep import run_together
from evals.suites.planted.facts import Fact
from kvrecall.app.wiring import build_store
from kvrecall.protocol.convert import chat_to_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.engine import Engine, Parts
from workers.engine.session import ResidentSession
from workers.engine.settings import WorkerSettings
from workers.repair.repair import run_pause_repair
from workers.tasks.open import run_fork_from_state
from workers.tasks.turn import run_turn

_RAM_BYTES = 1 << 30
_BASE = "base"
_REPLY_TOKENS = 16
# Tokens of the chat template around a message: its special token, the role, and a line end.
_TEMPLATE_TOKENS = 3


@contextmanager
def open_engine(model: str, rows: int, slots: int, block_tokens: int) -> Iterator[Engine]:
    """An engine of its own with a temporary store."""
    loaded = load(model)
    settings = WorkerSettings(slots=slots, max_budget=rows, block_tokens=block_tokens)
    with tempfile.TemporaryDirectory(prefix="kvrecall-eval-") as folder:
        store = build_store(loaded.model, Path(folder), _RAM_BYTES)
        engine = Engine(Parts(loaded.model, loaded.tokenizer, store, settings))
        try:
            yield engine
        finally:
            engine.close()
            store.close()


@dataclass(frozen=True)
class Cell:
    """A session that holds a text: its specification, state and token ids."""

    engine: Engine
    spec: pb.SessionSpec
    state: pb.SessionState
    token_ids: tuple[int, ...]

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
        """Append recorded turns to a new session. Raises `workers.errors`."""
        spec = pb.SessionSpec(
            session=_BASE,
            epoch=1,
            method=method,
            method_settings="{}",
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
            (done,) = run_together(engine, [(resident, steps)])
            state = done.state
            token_ids += done.token_ids
        return cls(engine, spec, state, tuple(token_ids))

    def repair(self, name: str, settings: str, signal: Sequence[Message]) -> pb.RepairResult:
        """Fork the session as `name` and repair the fork on messages of the next turn."""
        spec = self._child_spec(name, settings)
        child = self.engine.create_empty(spec, self.state)
        fork = run_fork_from_state(
            self.engine, child, pb.ForkRequest(parent=_BASE, spec=spec, state=self.state)
        )
        # A fork decodes nothing, and needs no slot.
        for wanted in fork:
            if wanted is not None:
                wanted.result()  # type: ignore[union-attr]
        resident = self.engine.swap_in(child)
        request = pb.RepairRequest(
            session=spec.session,
            epoch=1,
            trigger="turn",
            messages=[chat_to_wire(dict(each)) for each in signal],
        )
        steps = run_pause_repair(self.engine, resident, request, bool)
        (result,) = run_together(self.engine, [(resident, steps)])
        return result

    def ask(
        self,
        states: Mapping[str, pb.SessionState],
        settings: Mapping[str, str],
        facts: Sequence[Fact],
    ) -> dict[str, list[str]]:
        """Ask every fact's question of each fork from its state, all forks in one batch."""
        replies: dict[str, list[str]] = {name: [] for name in states}
        for fact in facts:
            tasks = [
                (
                    resident,
                    run_turn(self.engine, resident, self._question(name, fact), _discard_event),
                )
                for name, resident in self._restore(states, settings).items()
            ]
            for name, done in zip(states, run_together(self.engine, tasks), strict=True):
                replies[name].append(done.message.content)
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
        """Delete all sessions of the engine."""
        for name in list(self.engine.sessions):
            self.engine.delete(name).result()

    def _restore(
        self, states: Mapping[str, pb.SessionState], settings: Mapping[str, str]
    ) -> dict[str, ResidentSession]:
        """Open each fork, or the session itself for "", at its state."""
        return {
            name: self.engine.swap_in(
                self.engine.open(self._child_spec(name, settings[name]), state)
            )
            for name, state in states.items()
        }

    def _child_spec(self, name: str, settings: str) -> pb.SessionSpec:
        spec = pb.SessionSpec()
        spec.CopyFrom(self.spec)
        spec.session = name or _BASE
        spec.repair_settings = settings
        return spec

    def _question(self, name: str, fact: Fact) -> pb.TurnRequest:
        return pb.TurnRequest(
            session=name or _BASE,
            epoch=1,
            generate=True,
            sampling=pb.Sampling(max_tokens=_REPLY_TOKENS, stop=["\n"]),
            messages=[chat_to_wire({"role": "user", "content": fact.question})],
        )


def _discard_event(event: pb.TurnEvent) -> None:
    """Ignore a streamed event: only the result counts."""
