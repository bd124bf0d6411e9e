"""Speed of prompts that attend to all stored rows, beside the active rows alone and the full cache.

One long message is appended to new sessions, in rotation. Speed is in tokens per second of CPU time of the
process, which other work on the machine changes less, and per second.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.retrieval.answers import BASELINE, BLOCK_TOKENS, build_text
from benchmarks.subjects import Worker
from benchmarks.throughput import RESULTS, describe, speed_rows
from kvrecall.reporting.results import Row, build_results
from reference import MODEL_PATH
from workers.engine.settings import WorkerSettings
from workers.model.loader import load_model
from workers.model.tokenizer import load_tokenizer

STORED = json.dumps({"prefill": json.dumps({"attend": "stored"})})
# Method and options of each arm.
ARMS = {
    BASELINE: ("streaming_llm", ""),
    "stored rows": ("streaming_llm", STORED),
    "full": ("full", ""),
}
CONTEXTS = (4096, 15_872)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="in tokens")
    parser.add_argument("--budget", type=int, default=256, help="rows per head and layer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)


def run(given: argparse.Namespace) -> None:
    """Measure, print, write."""
    torch.set_num_threads(given.threads)
    rows = []
    for context in given.contexts:
        for row in measure(context, given):
            rows.append(row)
            print(describe(row), flush=True)
    results = build_results("retrieval-prompts", given.seed, "reference", rows)
    results.write(given.out or RESULTS / "retrieval-prompts-cpu.json")


def measure(context: int, given: argparse.Namespace) -> Iterator[Row]:
    """The rows of one length of prompt."""
    model = load_model(MODEL_PATH)
    tokenizer = load_tokenizer(MODEL_PATH, model.eos_token_ids)
    settings = WorkerSettings(
        slots=len(ARMS), max_budget=context + BLOCK_TOKENS, block_tokens=BLOCK_TOKENS
    )
    text = build_text(tokenizer, context, given.seed)
    found = {clock: {name: list[float]() for name in ARMS} for clock in ("second", "CPU second")}
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker.start(model, tokenizer, Path(folder), settings)
        try:
            for number in range(given.rounds):
                for name in sorted(ARMS, reverse=bool(number % 2)):
                    method, options = ARMS[name]
                    session = f"{name} {number}"
                    worker.open(session, method, given.budget, options=options)
                    began, used = time.perf_counter(), time.process_time()
                    tokens = worker.append(session, text).prompt_tokens
                    found["second"][name].append(tokens / (time.perf_counter() - began))
                    found["CPU second"][name].append(tokens / (time.process_time() - used))
        finally:
            worker.close()
    condition = f"prompt of {context} tokens, budget {given.budget}"
    for unit, values in found.items():
        yield from speed_rows(condition, "prefill", f"tokens per {unit}", values, BASELINE)
