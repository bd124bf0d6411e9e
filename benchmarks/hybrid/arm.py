"""One model through the service's engine and through transformers, turn by turn."""

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from secrets import token_bytes
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.hybrid.meter import Meter
from benchmarks.hybrid.plain_model import Pass, PlainModel
from evals.replay_session import run_steps
from kvrecall.domain.page_ids import KEY_BYTES, make_random_id
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.app.wiring import build_state_store, build_store
from kvstore.store import RowStore
from workers.engine.engine import Engine, Parts
from workers.engine.session import ResidentSession, WorkerSession
from workers.engine.settings import WorkerSettings
from workers.model.loader import LoadedModel
from workers.model.tokenizer import ChatTokenizer
from workers.tasks.settle import run_settle
from workers.tasks.turn import run_turn

SERVICE, PLAIN = "service", "plain forward"
OVERHEAD, RATIO = "service less plain forward", "service over plain forward"
BESIDE = "service less plain forward and states"
COPIES, WRITES, SWAP = (
    "copies of states in memory",
    "writes of states",
    "out of the slot and in again",
)
COMPUTED, AGAIN = "tokens computed", "tokens computed again"
STATES, STATE_BYTES, ROW_BYTES = "states stored", "state bytes written", "row bytes written"
_STATE_BYTES = 1 << 30
# What a pool of states does in a turn. None of these calls another.
_COPYING = ("begin", "keep", "copy", "put")
_WRITTEN = 8


class Arm:
    """A model's sessions, and what their turns took: values by metric.

    Times are CPU seconds of the whole process, so of all threads of the service.
    """

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        model: LoadedModel,
        tokenizer: ChatTokenizer,
        plain: PreTrainedModel,
        rows: int,
    ) -> None:
        """Open an engine with files in `folder`, whose slot holds `rows` rows; the stack closes it."""
        self.found: dict[str, list[float]] = defaultdict(list)
        self._plain = plain
        self._stores = [stack.enter_context(closing(build_store(model, folder)))]
        self._states = build_state_store(model, folder, _STATE_BYTES)
        if self._states is not None:
            self._stores.append(stack.enter_context(closing(self._states)))
        limits = WorkerSettings(slots=1, max_budget=rows)
        parts = Parts(model, tokenizer, self._stores[0], limits, states=self._states)
        self.engine = stack.enter_context(closing(Engine(parts)))
        self._meter = Meter()
        self._passes: list[Pass] = []
        self._watch()

    @property
    def session(self) -> WorkerSession:
        """The session that is measured."""
        return self._resident.session

    def begin(self, name: str, method: str) -> None:
        """Begin a session, in the place of the one before."""
        if self.engine.sessions:
            self.engine.unload(self.session.name).result()
        budget = self.engine.settings.max_budget
        spec = pb.SessionSpec(
            session=name,
            epoch=1,
            row_key=token_bytes(KEY_BYTES),  # it finds no pages of another
            budget=budget,
            method=method,
            method_settings="{}",
        )
        self._resident = self.engine.swap_in(self.engine.open(spec, pb.SessionState()))
        self._conversation = PlainModel(self._plain)
        self._before: list[int] = [0] * len(self._stores)
        self.found.clear()

    def run_service(self, prompt: Sequence[int], answer: int) -> None:
        """Run the pause before a turn and the turn, and note what they took."""
        session = self.session
        self._passes.clear()
        self._meter.take()
        states = len(session.snapshots)
        held = session.length + len(session.pending)
        sampling = pb.Sampling(max_tokens=answer, min_tokens=answer)
        request = pb.TurnRequest(
            session=session.name, epoch=1, prompt=prompt, generate=True, sampling=sampling
        )
        began = time.process_time()
        if session.length:
            run_steps(self.engine, self._resident, run_settle(self.engine, self._resident))
        run_steps(
            self.engine, self._resident, run_turn(self.engine, self._resident, request, _skip)
        )
        self._note(SERVICE, time.process_time() - began)
        computed = sum(len(each.token_ids) for each in self._passes)
        self._note(COMPUTED, computed)
        end = max(each.start + len(each.token_ids) for each in self._passes)
        self._note(AGAIN, computed - (end - min(held, end)))
        if self._states is not None:
            self._note(COPIES, self._meter.take()[COPIES])
            self._note(STATES, len(session.snapshots) - states)
        self._note_written()

    def run_plain(self) -> None:
        """Run the passes of the last turn by transformers alone."""
        seconds = self._conversation.run(self._passes)
        service = self.found[SERVICE][-1]
        self._note(PLAIN, seconds)
        self._note(OVERHEAD, service - seconds)
        self._note(RATIO, service / seconds)

    def swap(self) -> None:
        """Let the session leave its slot and come back, and note what that took."""
        session = self.session
        began = time.process_time()
        self.engine.swap_out(session)
        self._resident = self.engine.swap_in(session)
        self._note(SWAP, time.process_time() - began)

    def finish(self) -> None:
        """Note what writes of states took, and what is left beside states, of all turns."""
        overheads = self.found[OVERHEAD]
        if self._states is None:
            self.found[BESIDE] = list(overheads)
            return
        one = self._time_write(self._states)
        self.found[WRITES] = [one * count for count in self.found[STATES]]
        turns = zip(overheads, self.found[COPIES], self.found[WRITES], strict=True)
        self.found[BESIDE] = [overhead - copies - writes for overhead, copies, writes in turns]

    def _time_write(self, states: RowStore) -> float:
        """Measure the CPU seconds of packing a state and writing it to a file, apart from all else."""
        side = self.engine.caches.side
        assert side is not None, "the model has states"
        assert side.states is not None, "the model has states"
        pages = [make_random_id() for _ in range(_WRITTEN)]
        began = time.process_time()
        for page in pages:
            packed = side.states.pack(self.session.snapshot.state)
            self.engine.stored.append_state("written", page, packed)
        states.flush("written")
        spent = time.process_time() - began
        states.close_session("written")
        states.delete(pages).result()
        return spent / _WRITTEN

    def _watch(self) -> None:
        """Note each pass of the engine, and the time of copies of states."""
        engine: Any = self.engine  # whose method is replaced
        forward = engine.forward
        if engine.has_states:
            assert self.engine.caches.side is not None
            self._meter.watch(self.engine.caches.side.states, _COPYING, COPIES)

        def note_and_forward(
            residents: Sequence[ResidentSession], token_ids: Tensor, *rest: object
        ) -> Tensor:
            self._passes.append(Pass(residents[0].session.length, tuple(token_ids[0].tolist())))
            logits: Tensor = forward(residents, token_ids, *rest)
            return logits

        engine.forward = note_and_forward

    def _note_written(self) -> None:
        """Note the bytes that the files have got, of rows and of states."""
        for i, (store, metric) in enumerate(
            zip(self._stores, (ROW_BYTES, STATE_BYTES), strict=False)
        ):
            written = list(store.tiers().values())[-1].counters.written_bytes
            self._note(metric, written - self._before[i])
            self._before[i] = written

    def _note(self, metric: str, value: float) -> None:
        self.found[metric].append(value)


def _skip(event: pb.TurnEvent) -> None:
    """Ignore a streamed event: only the result counts."""
