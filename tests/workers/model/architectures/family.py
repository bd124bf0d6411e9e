"""A tiny model, served by a worker, beside the same model as transformers runs it."""

import copy
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.app.wiring import build_state_store, build_store
from tests.workers.conftest import WORDS, LocalWorker, answer_of
from tests.workers.model.architectures.architecture import Architecture
from tests.workers.model.architectures.building import build
from workers.engine.engine import Parts
from workers.engine.session import ResidentSession
from workers.engine.settings import WorkerSettings
from workers.model.loader import adopt
from workers.model.tokenizer import ChatTokenizer

TOKENS = 16
"""Of each answer."""
TIE = 1e-4
"""Two logits that are nearer than this are as good as the same: either token may come."""
BUDGET = 640
"""Rows of a slot: more than any session here has."""
_SETTINGS = WorkerSettings(slots=2, max_budget=BUDGET, block_tokens=64)


def words(count: int, seed: int = 0) -> str:
    """Text without meaning, the same for the same seed."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


PROMPT = words(150)
"""Some 350 tokens: several windows, and several pages and blocks of 64."""


class Family:
    """One model, twice: as transformers runs it, and in a worker with two slots."""

    def __init__(
        self,
        architecture: Architecture,
        tokenizer: ChatTokenizer,
        directory: Path,
        settings: WorkerSettings = _SETTINGS,
        window: int | None = None,
    ) -> None:
        """Build the model; window: the end of its context, if it is to be shorter."""
        self.plain: PreTrainedModel = build(architecture)
        self.tokenizer = tokenizer
        self._directory = directory
        self._settings = settings
        self._window = window

    @cached_property
    def worker(self) -> LocalWorker:
        """The worker. Raises ModelRefused if the model is."""
        model = adopt(copy.deepcopy(self.plain))
        if self._window is not None:
            model = replace(model, max_context=self._window)
        store = build_store(model, self._directory, ram_bytes=1 << 26)
        states = build_state_store(model, self._directory, ram_bytes=1 << 26)
        return LocalWorker(Parts(model, self.tokenizer, store, self._settings, states=states))

    def close(self) -> None:
        """Stop the worker, if there is one."""
        if "worker" in self.__dict__:
            self.worker.close()

    def open(self, name: str, budget: int = BUDGET, **spec: Any) -> None:
        """Open a session: with every row active, unless `spec` names a method."""
        self.worker.open(name, budget=budget, **spec)

    def turn(self, name: str, text: str, **options: Any) -> pb.TurnDone:
        """Run a turn whose answer has at most 16 tokens."""
        return self.worker.turn(name, text, **{"max_tokens": TOKENS, **options})

    @cached_property
    def two_turns(self) -> tuple[pb.TurnDone, pb.TurnDone]:
        """The first turns of session `two`, with every row active."""
        self.open("two")
        return self.turn("two", PROMPT), self.turn("two", words(24, 1))

    @contextmanager
    def watch_logits(self) -> Iterator[dict[int, Tensor]]:
        """Collect the logits of a new session's passes, by the position of their last token."""
        engine: Any = self.worker.engine
        forward = engine.forward
        seen: dict[int, Tensor] = {}

        def watched(
            residents: Sequence[ResidentSession], token_ids: Tensor, *more: Any, **options: Any
        ) -> Tensor:
            logits: Tensor = forward(residents, token_ids, *more, **options)
            seen[residents[0].session.length - 1] = logits[0, -1].clone()
            return logits

        engine.forward = watched
        try:
            yield seen
        finally:
            del engine.forward

    def check_answer(self, done: pb.TurnDone, before: Sequence[int] = ()) -> None:
        """Check that each token of a turn's answer is the best that transformers finds for its place.

        In one pass over all tokens, which is quicker than `generate`. Where a number in it decides
        otherwise about an expert than in steps, what `generate` says counts.
        """
        own = self._logits(done, before).argmax(-1)
        if own.tolist() != answer_of(done):
            self.check_generated(done, before)

    def check_generated(self, done: pb.TurnDone, before: Sequence[int] = ()) -> None:
        """Check that a turn's answer is what transformers generates after all tokens up to it.

        Where its two best tokens are nearly as likely the answer may have either, and a warning says so.
        """
        prompt = torch.tensor([[*before, *done.token_ids[: done.prompt_tokens]]])
        answer = answer_of(done)
        assert len(answer) > 2, "too short an answer to show anything"
        model: Any = self.plain
        said = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=len(answer),
            do_sample=False,
        )
        own = said[0, prompt.shape[1] :].tolist()
        if own == answer:
            return
        logits = self._logits(done, before)
        gaps = logits.amax(-1) - logits[torch.arange(len(answer)), torch.tensor(answer)]
        assert float(gaps.max()) <= TIE, (
            f"not all tokens are transformers' own:\n{answer}\n{own}\n"
            f"behind its best logits: {gaps.tolist()}"
        )
        warnings.warn(f"near ties: {gaps.tolist()}", stacklevel=2)

    def distances(self, done: pb.TurnDone, seen: dict[int, Tensor]) -> list[float]:
        """Compute how far each next token's distribution was from transformers' own, in nats.

        `seen`: the logits of a session's first turn, by position.
        """
        first = done.prompt_tokens - 1
        return [
            _divergence(own, seen[position])
            for position, own in enumerate(self._logits(done), start=first)
        ]

    @torch.inference_mode()
    def _logits(self, done: pb.TurnDone, before: Sequence[int] = ()) -> Tensor:
        """Compute transformers' logits in the places of an answer's tokens, `[t, vocabulary]`."""
        model: Any = self.plain
        prompt = [*before, *done.token_ids[: done.prompt_tokens]]
        ids = torch.tensor([prompt + answer_of(done)])
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        return logits[0, len(prompt) - 1 : -1].float()


def _divergence(own: Tensor, other: Tensor) -> float:
    own, other = own.float().log_softmax(-1), other.float().log_softmax(-1)
    return float((own.exp() * (own - other)).sum())
