"""A worker that does as it is told.

For timing, failures and cancellations that no real worker makes on command.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from itertools import groupby, takewhile
from pathlib import Path

import numpy as np
import pytest

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import WorkerLost, WorkerRefused
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message, Sampling
from kvrecall.domain.turn_request import TurnRequest
from kvrecall.protocol.convert import worker_options_from_wire
from kvrecall.protocol.v1 import worker_pb2 as wire
from services.catalog.sqlite.catalog import SqliteCatalog
from services.service import CreateSession, SessionService


class StubWorker:
    """Answers each turn with the next of `script` (texts, or tool calls), one word per token.

    Its rows are words. A session's selection is a hash over everything that ever changed it, so
    that two sessions with equal selections went through the same turns and repairs in the same
    order, and a rollback that was forgotten shows. Its encoder gives texts with the same words near
    vectors, and it builds an episode of any rows. `gates` hold calls back: a turn waits for
    `gates["token"]` before each word, a repair for `gates["repair"]`, and so for embed and build. A
    hurried repair waits no longer and has scored half of its rows. `faults` are raised by the call
    of that name, once each. With several `names` it is as many workers over the same rows. Pages
    are of four words: `prefixes` it was offered, and what it was told to drop.
    """

    def __init__(self) -> None:
        self.script: list[str | list[wire.ToolCall]] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.reached: dict[str, asyncio.Event] = {
            name: asyncio.Event() for name in ("token", "repair", "embed", "build")
        }
        self.faults: dict[str, Exception] = {}
        self.sessions: dict[str, wire.SessionState] = {}
        self.specs: dict[str, wire.SessionSpec] = {}
        self.call_log: list[str] = []
        self.words: dict[int, str] = {}
        self.hurries: dict[str, asyncio.Event] = {}
        self.deadlines: list[float | None] = []
        self.embedded: list[list[str]] = []
        self.builds: list[wire.BuildEpisodesRequest] = []
        self.switches: list[wire.Episode] = []
        self.dimensions = 24
        self.open_turns = 0
        self.closed = False
        self.retained: wire.RetainOnlyRequest | None = None
        self.prefixes: list[wire.Prefix] = []
        self.dropped: list[tuple[str, int]] = []
        self.durable = True
        self.names = ["one"]
        self.draining: set[str] = set()
        self.released: list[tuple[str, int]] = []
        self.rebuilds: list[wire.RebuildRequest] = []
        self.epochs: list[int] = []

    async def describe(self) -> wire.WorkerInfo:
        return wire.WorkerInfo(
            model="scripted",
            fingerprint="f00d",
            layers=2,
            kv_heads=1,
            head_dim=4,
            slots=4,
            max_budget=1024,
            min_budget=16,
            block_tokens=32,
            max_context=4096,
            methods=[
                wire.MethodInfo(
                    name="snapkv", summary="the last window's attention", settings_schema="{}"
                ),
                wire.MethodInfo(name="full", summary="keeps everything", settings_schema="{}"),
                wire.MethodInfo(
                    name="epicache",
                    summary="an episode's attention",
                    settings_schema="{}",
                    episodes=True,
                ),
            ],
            repair=wire.MethodInfo(
                name="repairkv", summary="bursts around anchors", settings_schema="{}"
            ),
            page_tokens=4,
            token_bytes=64,
        )

    def choose_worker(self, session: str, owner: str, avoid: Sequence[str] = ()) -> str:
        well = [name for name in self.names if name not in avoid and name not in self.draining]
        if not well:
            raise WorkerLost("there is no worker")
        return owner if owner in well else well[0]

    async def workers(self) -> list[wire.WorkerRecord]:
        return [
            wire.WorkerRecord(
                name=name,
                address=f"{name}:1",
                slots=4,
                free_slots=3,
                sessions=1,
                draining=name in self.draining,
            )
            for name in self.names
        ]

    async def retain_only(self, request: wire.RetainOnlyRequest) -> None:
        self.retained = request

    async def open(self, request: wire.OpenRequest) -> wire.MemoryReport:
        self._fault("open")
        session = request.spec.session
        self.call_log.append(f"open {request.state.length}")
        for name in ("method_settings", "repair_settings"):
            if '"bad"' in getattr(request.spec, name):
                raise WorkerRefused(ErrorCode.BAD_SETTINGS, f"{name}.bad is not a setting")
        self.epochs.append(request.spec.epoch)
        self.specs[session] = request.spec
        self.sessions[session] = wire.SessionState.FromString(request.state.SerializeToString())
        return self._memory(session)

    async def fork(self, request: wire.ForkRequest) -> wire.ForkResult:
        self._fault("fork")
        self._state(request.parent)
        session = request.spec.session
        self.call_log.append(f"fork {'state' if request.HasField('state') else len(request.turns)}")
        state = wire.SessionState.FromString(request.state.SerializeToString())
        for turn in request.turns:
            words = [self.words[token] for token in turn.token_ids]
            self._change(state, "turn", words[: turn.prompt_tokens])
            for word in words[turn.prompt_tokens :]:
                self._change(state, "token", [word])
        self.specs[session], self.sessions[session] = request.spec, state
        return wire.ForkResult(memory=self._memory(session), state=state)

    async def rebuild(self, request: wire.RebuildRequest) -> wire.RebuildResult:
        self._fault("rebuild")
        self.rebuilds.append(request)
        await self.open(wire.OpenRequest(spec=request.spec, state=request.state))
        return wire.RebuildResult(pages=2, seconds=0.5, memory=self._memory(request.spec.session))

    async def release(self, request: wire.ReleaseRequest) -> None:
        self._fault("release")
        self.released.append((request.session, request.epoch))

    async def turn(self, request: wire.TurnRequest) -> AsyncGenerator[wire.TurnEvent, None]:
        self._fault("turn")
        state = self._state(request.session)
        if request.HasField("episode"):
            self._fault("switch")
        self.open_turns += 1
        try:
            switched = self._switch(state, request)
            prompt = [word for message in request.messages for word in _words(message)]
            self._change(state, "turn" if not request.repair else "repaired turn", prompt)
            answer = self.script.pop(0) if request.generate and self.script else "ok"
            message = self._message(request.generate, answer)
            spoken = message.content.split()[: request.sampling.max_tokens] if message else []
            for word in spoken:
                await self._gate("token")
                self._fault("token")
                self._change(state, "token", [word])
                yield wire.TurnEvent(token=wire.TokenChunk(ids=[_token(word)], text=word + " "))
            for call in message.tool_calls if message else []:
                yield wire.TurnEvent(tool_call=call)
            self._fault("done")
            done = self._done(request, state, prompt, message, spoken)
            if switched is not None:
                done.switched.CopyFrom(switched)
            yield wire.TurnEvent(done=done)
        finally:
            self.open_turns -= 1

    def _deadline(self, session: str) -> float | None:
        return worker_options_from_wire(self.specs[session]).repair_seconds

    async def repair(self, request: wire.RepairRequest) -> wire.RepairResult:
        self._fault("repair")
        state = self._state(request.session)
        signal = request.text.split() + [
            word for message in request.messages for word in _words(message)
        ]
        signal += [self.words[token] for token in request.token_ids]
        self.call_log.append(f"{request.trigger}: {' '.join(signal)}")
        self.deadlines.append(self._deadline(request.session))
        self._change(state, request.trigger, [])
        cut = not await self._gate_or_hurry(request.session)
        state.promoted_rows += 2
        state.selection = hashlib.sha256(state.selection + " ".join(signal).encode()).digest()
        report = wire.RepairReport(
            trigger=request.trigger,
            signal_tokens=len(signal),
            scored_rows=4 if cut else 8,
            candidates=8,
            promoted=[1, 2],
            seconds=0.5,
            demoted_rows=1,
            truncated=cut,
            hops=1,
            bytes_read=640,
        )
        return wire.RepairResult(report=report, memory=self._memory(request.session), state=state)

    async def stop_early(self, request: wire.StopEarlyRequest) -> None:
        self._fault("stop_early")
        if request.session in self.hurries:
            self.hurries[request.session].set()

    async def detokenize(self, request: wire.DetokenizeRequest) -> wire.DetokenizeResult:
        return wire.DetokenizeResult(
            texts=[" ".join(self.words[id] for id in chunk.ids) for chunk in request.chunks]
        )

    async def embed(self, texts: list[str]) -> wire.EmbedResult:
        self._fault("embed")
        await self._gate("embed")
        self.embedded.append(texts)
        vectors = np.stack([_vector(text, self.dimensions) for text in texts])
        return wire.EmbedResult(dimensions=self.dimensions, vectors=vectors.astype("<f4").tobytes())

    async def build_episodes(self, request: wire.BuildEpisodesRequest) -> wire.BuildEpisodesResult:
        self._fault("build")
        state = self._state(request.session)
        for plan in request.plans:
            if not plan.patched_prompt or any(span.stop > state.length for span in plan.segments):
                raise WorkerRefused(
                    ErrorCode.BAD_EPISODE,
                    f"{plan.id} has no prompt, or names rows that are not there",
                )
        await self._gate("build")
        self.builds.append(request)
        return wire.BuildEpisodesResult(
            episodes=[
                wire.Episode(
                    id=plan.id,
                    rows=f"rows of {plan.id}".encode(),
                    patched_prompt=plan.patched_prompt,
                    length=state.length,
                    segments=plan.segments,
                )
                for plan in request.plans
            ],
            scored_rows=state.length,
            seconds=0.5,
        )

    async def memory(self, session: str) -> wire.MemoryReport:
        self._state(session)
        return self._memory(session)

    async def delete(self, request: wire.DeleteRequest) -> None:
        self._fault("delete")
        self.dropped.append((request.session, request.keep_pages))
        self.sessions.pop(request.session, None)

    async def stats(self) -> dict[str, wire.WorkerStats]:
        self._fault("stats")
        tiers = {
            "ram": wire.TierStats(
                bytes=640, limit_bytes=1000, hits=3, misses=1, reads=4, read_bytes=256
            ),
            "nvme": wire.TierStats(
                bytes=1280,
                errors=2,
                refused_pages=5,
                writes=7,
                written_bytes=512,
                write_seconds=0.5,
            ),
        }
        open_here = len(self.sessions)
        one = wire.WorkerStats(
            slots_in_use=open_here, sessions=open_here, tiers=tiers, lost_pages=3, rebuilt_pages=2
        )
        return dict.fromkeys(self.names, one)

    async def close(self) -> None:
        self.closed = True

    def _state(self, session: str) -> wire.SessionState:
        if session not in self.sessions:
            raise WorkerRefused(ErrorCode.SESSION_NOT_OPEN, f"{session} is not open")
        return self.sessions[session]

    def _change(self, state: wire.SessionState, why: str, words: list[str]) -> None:
        state.length += len(words)
        self.words |= {_token(word): word for word in words}
        state.selection = hashlib.sha256(
            state.selection + f"{why} {' '.join(words)}".encode()
        ).digest()

    def _switch(
        self, state: wire.SessionState, request: wire.TurnRequest
    ) -> wire.SwitchReport | None:
        if not request.HasField("episode"):
            return None
        episode = request.episode
        self.switches.append(episode)
        self._change(state, f"switch to {episode.id}", [])
        state.episode = episode.id
        state.patched_prompt[:] = episode.patched_prompt
        return wire.SwitchReport(
            episode=episode.id, rows_moved=20, rows_kept=80, bytes_moved=1280, seconds=0.01
        )

    def _take(self, request: wire.TurnRequest, token_ids: list[int]) -> int:
        """Whole pages of the prefix that the prompt begins with, but for its last word."""
        if not request.HasField("prefix"):
            return 0
        self.prefixes.append(request.prefix)
        alike = takewhile(
            lambda pair: pair[0] == pair[1],
            zip(request.prefix.token_ids, token_ids[:-1], strict=False),
        )
        return len(list(alike)) // 4

    async def _gate(self, name: str) -> None:
        self.reached[name].set()
        if name in self.gates:
            await self.gates[name].wait()

    async def _gate_or_hurry(self, session: str) -> bool:
        """Wait for the gate of repairs, or for a hurry: whether it was the gate."""
        hurried = self.hurries[session] = asyncio.Event()
        waiting = [asyncio.create_task(self._gate("repair")), asyncio.create_task(hurried.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return not hurried.is_set()
        finally:
            del self.hurries[session]
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)

    def _fault(self, name: str) -> None:
        if name in self.faults:
            raise self.faults.pop(name)

    def _message(self, generate: bool, answer: str | list[wire.ToolCall]) -> wire.Message | None:
        if not generate:
            return None
        if isinstance(answer, str):
            return wire.Message(role="assistant", content=answer)
        return wire.Message(role="assistant", tool_calls=answer)

    def _done(
        self,
        request: wire.TurnRequest,
        state: wire.SessionState,
        prompt: list[str],
        message: wire.Message | None,
        spoken: list[str],
    ) -> wire.TurnDone:
        reason = "appended" if message is None else "tool_calls" if message.tool_calls else "stop"
        done = wire.TurnDone(
            finish_reason=reason,
            message=message,
            token_ids=[_token(word) for word in prompt + spoken],
            prompt_tokens=len(prompt),
            output_tokens=len(spoken),
            memory=self._memory(request.session),
            seconds={"prefill": 0.25, "decode": 0.75},
            state=state,
            durable=self.durable,
            utterance_tokens=_runs(request) + ([len(spoken)] if message is not None else []),
            shared_pages=self._take(request, [_token(word) for word in prompt]),
        )
        if request.repair:
            report = wire.RepairReport(
                trigger="turn",
                signal_tokens=len(prompt),
                scored_rows=6,
                candidates=6,
                promoted=[0, 1, 3],
                seconds=0.1,
                hops=1,
                bytes_read=320,
            )
            self.deadlines.append(self._deadline(request.session))
            done.repair.CopyFrom(report)
        if request.compare_with:
            done.fidelity.CopyFrom(wire.Fidelity(tokens=5, kl_mean=0.5, top1_agreement=0.8))
        return done

    def _memory(self, session: str) -> wire.MemoryReport:
        state = self.sessions[session]
        budget = self.specs[session].budget
        active = min(state.length, budget)
        return wire.MemoryReport(
            length=state.length,
            budget=budget,
            active_rows=[active, active - 1 if active else 0],
            peak_rows=[active + 2, active],
            bound_rows=[budget + 32, budget + 32],
            active_bytes=active * 64,
            evicted_rows=state.length - active,
            promoted_rows=state.promoted_rows,
            tier_bytes={"ram": state.length * 64},
            in_slot=True,
        )


def _words(message: wire.Message) -> list[str]:
    calls = [f"{call.name} {call.arguments}" for call in message.tool_calls]
    return [message.role, *" ".join([message.content, *calls]).split()]


def _runs(request: wire.TurnRequest) -> list[int]:
    runs = groupby(request.messages, lambda message: message.role == "assistant")
    return [sum(len(_words(message)) for message in run) for _, run in runs]


def _vector(text: str, dimensions: int) -> np.ndarray:
    """A direction per word, added up: texts that share words lie near each other."""
    words = text.lower().split() or [""]
    directions = [np.random.default_rng(_token(word)).standard_normal(dimensions) for word in words]
    total = np.sum(directions, axis=0)
    return total / np.linalg.norm(total)


def _token(word: str) -> int:
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:2], "big")


class Harness:
    """A service over a scripted worker and a real catalog in a file, and how to restart it."""

    def __init__(self, path: Path, settings: ServiceLimits) -> None:
        self.path = path
        self.settings = settings
        self.worker = StubWorker()
        self.service: SessionService
        self.catalog: SqliteCatalog

    async def start(self) -> None:
        """Open the catalog and start a service over it."""
        self.catalog = await SqliteCatalog.open(self.path, self.settings.idempotency_records)
        self.service = SessionService(self.worker, self.catalog, self.settings)
        await self.service.start()

    async def crash(self) -> None:
        """Lose the process: the worker's memory, running repairs, everything but the file."""
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            if task.get_name().startswith(("background ", "episodes ")):
                task.cancel()
                await asyncio.wait({task})
        await self.catalog.close()
        self.worker = StubWorker()
        await self.start()

    async def session(self, **settings: object) -> str:
        """A new session of budget 64."""
        return (
            await self.service.create(
                CreateSession(**{"budget": 64, "repair_rows": 8, "seed": 1} | settings)
            )
        ).id

    async def say(self, session: str, *messages: Message, **options: object):
        """Run a turn to its end: what it came to."""
        stream = self.service.turn(
            session, TurnRequest(messages, **{"sampling": Sampling(50)} | options)
        )
        return [progress async for progress in stream][-1].outcome

    async def selection(self, session: str) -> bytes:
        """The committed selection."""
        return wire.SessionState.FromString(
            await self.catalog.sessions.get_worker_state(session)
        ).selection

    async def wait_until_idle(self, session: str) -> None:
        """Wait until no background work of the session runs."""
        tasks = [task for task in asyncio.all_tasks() if task.get_name() == f"background {session}"]
        for task in tasks:
            await task


@pytest.fixture
def settings() -> ServiceLimits:
    return ServiceLimits(queue_seconds=5, drain_seconds=5)


@pytest.fixture
async def harness(tmp_path: Path, settings: ServiceLimits) -> AsyncIterator[Harness]:
    harness = Harness(tmp_path / "catalog.db", settings)
    await harness.start()
    yield harness
    for gate in harness.worker.gates.values():
        gate.set()
    await harness.service.stop()


@pytest.fixture
def call() -> Callable[[str, str], wire.ToolCall]:
    """A tool call with an id and the city it asks about."""
    return lambda id, city: wire.ToolCall(id=id, name="weather", arguments=f'{{"city": "{city}"}}')


@pytest.fixture
def user() -> Callable[[str], Message]:
    return lambda text: Message("user", text)
