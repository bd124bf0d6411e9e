"""Subjects of the throughput benchmark: transformers' own generate and kvrecall's engine."""

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_bytes
from typing import Any, Protocol

import torch
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from kvrecall.domain.page_ids import KEY_BYTES
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.app.wiring import build_store
from workers.engine.engine import Engine, Parts
from workers.engine.settings import WorkerSettings
from workers.model.loader import LoadedModel
from workers.model.tokenizer import ChatMessage, ChatTokenizer, keep_recent
from workers.scheduler.scheduler import Scheduler


@dataclass(frozen=True)
class Timed:
    """One turn: seconds from its start to the first token, and from there to the last."""

    prompt_tokens: int
    output_tokens: int
    first_token: float
    decode: float


class Subject(Protocol):
    """A conversation that is measured turn by turn."""

    name: str

    def turn(self, text: str, output_tokens: int) -> Timed:
        """Append a user message and generate exactly `output_tokens` tokens, greedily."""
        ...

    def cache_bytes(self) -> int:
        """Bytes of keys and values on the device after the last turn."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


@dataclass
class Clock(StoppingCriteria):
    """Records the time of each token.

    For transformers' generate it is a stopping criterion that never stops.
    """

    started: float = field(default_factory=time.perf_counter)
    moments: list[float] = field(default_factory=list)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        """Record a step of generate, for ids int64 `[B, t]`; returns bool `[B]`, all false."""
        input_ids[:, -1].tolist()  # a token counts when it is off the device
        self.record()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def record(self) -> None:
        """Record the time of a token."""
        self.moments.append(time.perf_counter())

    def timed(self, prompt_tokens: int) -> Timed:
        """Times of the turn."""
        return Timed(
            prompt_tokens,
            len(self.moments),
            self.moments[0] - self.started,
            self.moments[-1] - self.moments[0],
        )


class TransformersChat:
    """transformers' generate with DynamicCache, kept over turns or prefilled again."""

    def __init__(
        self, name: str, model: Any, tokenizer: ChatTokenizer, *, keep_cache: bool
    ) -> None:
        self.name = name
        self._model = model
        self._tokenizer = tokenizer
        self._keep_cache = keep_cache
        self._cache = DynamicCache(config=model.config)
        self._ids: list[int] = []
        self._recent: list[ChatMessage] = []

    @torch.inference_mode()
    def turn(self, text: str, output_tokens: int) -> Timed:
        """Append a user message and generate, see `Subject`."""
        clock = Clock()
        new: list[ChatMessage] = [{"role": "user", "content": text}]
        prompt = [
            t for s in self._tokenizer.prompt(self._recent, new, [], True) for t in s.token_ids
        ]
        self._ids += prompt
        if not self._keep_cache:
            self._cache = DynamicCache(config=self._model.config)
        output = generate(self._model, torch.tensor([self._ids]), self._cache, output_tokens, clock)
        reply = output[0, len(self._ids) :].tolist()
        self._ids += [*reply, self._tokenizer.eos_token_ids[0]]
        answer = {"role": "assistant", "content": self._tokenizer.inner.decode(reply)}
        self._recent = keep_recent([*self._recent, *new, answer])
        return clock.timed(len(prompt))

    def cache_bytes(self) -> int:
        """Bytes of all keys and values."""
        layers: list[Any] = self._cache.layers  # of a full cache: each with its keys and values
        return sum(int(tensor.nbytes) for layer in layers for tensor in (layer.keys, layer.values))

    def close(self) -> None:
        """Release the cache."""
        self._cache = DynamicCache(config=self._model.config)


def generate(
    model: Any, ids: torch.Tensor, cache: DynamicCache, tokens: int, clock: Clock
) -> torch.Tensor:
    """Generate exactly `tokens` tokens greedily for ids int64 `[B, t]`.

    Returns int64 `[B, t + tokens]`.
    """
    ids = ids.to(model.device)
    output: torch.Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    return output


@dataclass(frozen=True)
class Worker:
    """kvrecall's engine and scheduler on a model, with rows in memory and in files under `data`."""

    scheduler: Scheduler

    @classmethod
    def start(
        cls, model: LoadedModel, tokenizer: ChatTokenizer, data: Path, settings: WorkerSettings
    ) -> "Worker":
        """Start a worker on the shared model."""
        return cls(
            Scheduler(Engine(Parts(model, tokenizer, build_store(model, data, 4 << 30), settings)))
        )

    def open(
        self,
        session: str,
        method: str,
        budget: int,
        settings: str = "{}",
        state: pb.SessionState | None = None,
        options: str = "",
    ) -> None:
        """Open a new session, or one as it was in `state`."""
        spec = pb.SessionSpec(
            session=session,
            epoch=1,
            row_key=token_bytes(KEY_BYTES),  # it finds no pages of another
            budget=budget,
            method=method,
            method_settings=settings,
            options=options,
        )
        self.scheduler.open(pb.OpenRequest(spec=spec, state=state)).result()

    def append(self, session: str, text: str) -> pb.TurnDone:
        """Append a user message without generating."""
        messages = [pb.Message(role="user", content=text)]
        return self.scheduler.turn(
            pb.TurnRequest(session=session, epoch=1, messages=messages), _discard_event
        ).result()

    def ask(self, session: str, text: str, output_tokens: int, clock: Clock) -> Any:
        """Start a turn whose tokens the clock records; returns the future of its result."""
        messages = [pb.Message(role="user", content=text)]
        sampling = pb.Sampling(max_tokens=output_tokens)
        request = pb.TurnRequest(
            session=session, epoch=1, messages=messages, generate=True, sampling=sampling
        )
        return self.scheduler.turn(request, lambda event: _record_token(clock, event))

    def close(self) -> None:
        """Stop the scheduler, close the store."""
        self.scheduler.close()
        self.scheduler.engine.store.close()


class KvrecallChat:
    """A session of kvrecall's engine under a method and a budget."""

    def __init__(self, name: str, worker: Worker, method: str, budget: int) -> None:
        self.name = name
        self._worker = worker
        worker.open(name, method, budget)

    def turn(self, text: str, output_tokens: int) -> Timed:
        """Append a user message and generate, see `Subject`."""
        clock = Clock()
        done = self._worker.ask(self.name, text, output_tokens, clock).result()
        return clock.timed(done.prompt_tokens)

    def cache_bytes(self) -> int:
        """Bytes of the active keys and values."""
        return int(self._worker.scheduler.memory(self.name).result().active_bytes)

    def close(self) -> None:
        """Close the worker."""
        self._worker.close()


def transformers_batch_speed(model: Any, ids: torch.Tensor, tokens: int) -> float:
    """Tokens per second of generate over a batch of prompts int64 `[B, t]`, without prefill."""
    clock = Clock()
    with torch.inference_mode():
        generate(model, ids, DynamicCache(config=model.config), tokens, clock)
    return len(ids) * (tokens - 1) / (clock.moments[-1] - clock.moments[0])


def kvrecall_batch_speed(worker: Worker, sessions: Sequence[str], tokens: int) -> float:
    """Tokens per second over all sessions, from the last session's first token on."""
    clocks = [Clock() for _ in sessions]
    turns = [
        worker.ask(name, "Go on.", tokens, clock)
        for name, clock in zip(sessions, clocks, strict=True)
    ]
    for turn in turns:
        turn.result()
    began = max(clock.moments[0] for clock in clocks)
    ended = max(clock.moments[-1] for clock in clocks)
    counted = sum(moment > began for clock in clocks for moment in clock.moments)
    return counted / max(1e-9, ended - began)


def clock(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds of a run: CPU time of the process on a CPU, time until the device is done elsewhere."""
    if device.type == "cpu":
        started = time.process_time()
        run()
        return time.process_time() - started
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    return time.perf_counter() - started


def without_end_of_turn(
    model: LoadedModel, tokenizer: ChatTokenizer
) -> tuple[LoadedModel, ChatTokenizer]:
    """The same model and tokenizer without end of turn: every turn decodes all its tokens."""
    padding = tokenizer.inner.pad_token_id or 0
    return replace(model, eos_token_ids=(padding,)), ChatTokenizer(tokenizer.inner, (padding,))


def copy_plain(model: LoadedModel) -> PreTrainedModel:
    """A copy of the model with transformers' own attention."""
    copied = deepcopy(model.module)
    copied.set_attn_implementation("sdpa")
    return copied


def _record_token(clock: Clock, event: pb.TurnEvent) -> None:
    if event.WhichOneof("event") == "token":
        clock.record()


def _discard_event(event: pb.TurnEvent) -> None:
    """Ignore a streamed event: only the result counts."""
