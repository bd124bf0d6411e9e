"""Decode steps and prefill blocks of the engine beside transformers' own passes, in CPU time.

`python -m benchmarks.passes --model FOLDER` runs transformers with a kept DynamicCache, and the
engine with full caches and with a budget, pass by pass in rotation. It takes the CPU time of the one
thread that computes, so that it can run beside other work: ratios count, seconds do not. The result
file goes to `benchmarks/results/`. No store, scheduler or tokenizer takes part; `throughput.py`
measures sessions with all of them.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from benchmarks.subjects import copy_plain
from kvrecall.app.wiring import build_store
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.reporting.results import Row, build_results, speed_row
from workers.engine.engine import Engine, Parts
from workers.engine.session import ResidentSession
from workers.engine.settings import WorkerSettings
from workers.model.loader import LoadedModel, cache_argument, load_model
from workers.model.tokenizer import ChatTokenizer, load_tokenizer

RESULTS = Path(__file__).parent / "results"
BATCHES = (1, 2, 4)
BLOCKS = (128, 256, 512)
MAX_BATCH = 8
WARM = 2


@dataclass(frozen=True)
class Subject:
    """A pass that is measured, and the number of tokens that it appends over all sessions."""

    run: Callable[[], object]
    tokens: int


def main() -> None:
    """Read the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a transformers folder or a hub name")
    parser.add_argument("--name", required=True, help="the model's name in the result file")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--context", type=int, default=512, help="tokens before the decode steps")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens that are prefilled")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--steps", type=int, default=24, help="decode steps of each subject")
    parser.add_argument("--prefills", type=int, default=5, help="prefills of each subject")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(given.model, getattr(torch, given.dtype), "cpu")
    tokenizer = load_tokenizer(given.model, model.eos_token_ids)
    theirs = copy_plain(load_model(given.model, model.dtype, "cpu", pack=False))
    with tempfile.TemporaryDirectory() as folder:
        passes = EnginePasses(model, tokenizer, Path(folder))
        bench = Bench(passes, theirs, given.budget)
        decode = measure(bench.decoders(given.context), given.steps)
        prefill = measure(bench.prefills(given.prompt), given.prefills)
    rows = [
        *build_rows(f"decode after {given.context} tokens", decode),
        *build_rows(f"prefill of {given.prompt} tokens", prefill),
    ]
    for row in rows:
        print(f"{row['condition']:<60} {row.get('ratio', 1.0):.3f}", flush=True)
    results = build_results("passes", 0, f"{given.name} ({given.dtype}, one thread)", rows)
    name = f"passes-{given.name}-{given.dtype}-cpu.json"
    results.write(given.out or RESULTS / name)


class EnginePasses:
    """Builds passes of engines over one model, on random tokens, of up to MAX_BATCH sessions."""

    def __init__(self, model: LoadedModel, tokenizer: ChatTokenizer, folder: Path) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._folders = (folder / str(number) for number in count())
        vocabulary = len(tokenizer.inner)
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(10, vocabulary, (MAX_BATCH, 1 << 13), generator=generator)

    def decoder(self, batch: int, context: int, method: str, rows: int) -> Subject:
        """Decode steps of `batch` sessions after `context` tokens each."""
        engine = self._engine(batch, rows, context)
        residents = [self._open(engine, f"s{index}", method, rows) for index in range(batch)]
        for index, resident in enumerate(residents):
            engine.forward([resident], self.ids[index : index + 1, :context])
            engine.evict(resident)
        token_ids = self.ids[:batch, :1]
        return Subject(lambda: engine.forward(residents, token_ids).argmax(-1).tolist(), batch)

    def prefill(self, tokens: int, block: int, method: str, rows: int) -> Subject:
        """Prefills of one session in blocks."""
        engine = self._engine(1, rows, block)
        prompt = self.ids[:1, :tokens]

        def run() -> None:
            resident = self._open(engine, "s", method, rows)
            for start in range(0, tokens, block):
                engine.forward([resident], prompt[:, start : start + block])
                engine.evict(resident)
            engine.discard(engine.sessions.pop("s"))

        return Subject(run, tokens)

    def _engine(self, slots: int, rows: int, block: int) -> Engine:
        settings = WorkerSettings(slots=slots, max_budget=rows, block_tokens=block)
        store = build_store(self._model, next(self._folders), 1 << 20)
        return Engine(Parts(self._model, self._tokenizer, store, settings))

    @staticmethod
    def _open(engine: Engine, name: str, method: str, budget: int) -> ResidentSession:
        spec = pb.SessionSpec(session=name, epoch=1, budget=budget, method=method)
        session = engine.open(spec, pb.SessionState())
        session.stored = False
        return engine.swap_in(session)


class Bench:
    """Builds the passes of transformers and of engines over one model."""

    def __init__(self, passes: EnginePasses, theirs: PreTrainedModel, budget: int) -> None:
        self._passes = passes
        self._theirs = theirs
        self._budget = budget
        self._ids = passes.ids

    def decoders(self, context: int) -> dict[str, Subject]:
        """Decode steps of 1, 2 and 4 sessions after `context` tokens each."""
        subjects = {}
        for batch in BATCHES:
            cache = DynamicCache(config=self._theirs.config)
            self._their_pass(self._ids[:batch, :context], cache)
            subjects[f"transformers, {batch} at once"] = self._their_decoder(batch, cache)
        for batch in BATCHES:
            for name, method, rows in (
                ("full", "full", context + 512),
                (f"budget {self._budget}", "snapkv", self._budget),
            ):
                subject = self._passes.decoder(batch, context, method, rows)
                subjects[f"kvrecall, {name}, {batch} at once"] = subject
        return subjects

    def prefills(self, tokens: int) -> dict[str, Subject]:
        """Prefills of one session: transformers' in one piece, the engine's in blocks."""
        prompt = self._ids[:1, :tokens]

        def in_one_piece() -> None:
            self._their_pass(prompt, DynamicCache(config=self._theirs.config))

        subjects = {"transformers, one piece": Subject(in_one_piece, tokens)}
        for block in BLOCKS:
            for name, method, rows in (
                ("full", "full", tokens),
                (f"budget {self._budget}", "snapkv", self._budget),
            ):
                subject = self._passes.prefill(tokens, block, method, rows)
                subjects[f"kvrecall, {name}, blocks of {block}"] = subject
        return subjects

    @torch.inference_mode()
    def _their_pass(self, token_ids: Tensor, cache: DynamicCache) -> Tensor:
        theirs = self._theirs
        logits: Tensor = theirs(
            input_ids=token_ids, use_cache=True, logits_to_keep=1, **{cache_argument(theirs): cache}
        ).logits
        return logits[:, -1].argmax(-1)

    def _their_decoder(self, batch: int, cache: DynamicCache) -> Subject:
        token_ids = self._ids[:batch, :1]
        return Subject(lambda: self._their_pass(token_ids, cache).tolist(), batch)


def measure(subjects: dict[str, Subject], passes: int) -> dict[str, list[float]]:
    """CPU seconds per token of each subject, in rotation; the first passes are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(passes + WARM):
        for name, subject in subjects.items():
            began = time.thread_time()
            subject.run()
            seconds[name].append((time.thread_time() - began) / subject.tokens)
    return {name: each[WARM:] for name, each in seconds.items()}


def build_rows(condition: str, seconds: dict[str, list[float]]) -> Iterator[Row]:
    """A row per subject: tokens a CPU second, and the median paired ratio to the first subject."""
    baseline, base = next(iter(seconds.items()))
    for name, each in seconds.items():
        ratio = median(theirs / ours for theirs, ours in zip(base, each, strict=True))
        yield speed_row(
            f"{condition}: {name}",
            "speed",
            "tokens per CPU second",
            [1 / value for value in each],
            ratio_to=baseline,
            ratio=round(ratio, 3),
        )


if __name__ == "__main__":
    main()
