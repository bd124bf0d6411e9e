"""Decoding speed of a model's answers with retrieval, within the budget alone, and over all rows.

The same question is answered again and again from one state, in rotation, after an answer of three
tokens: the first step that retrieves copies the session's rows to where they are searched, once, and its
time is a row of its own. Speed is in tokens per second of CPU time of the process, which other work on
the machine changes less, and per second.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch

from benchmarks.subjects import Clock, Worker, without_end_of_turn
from benchmarks.throughput import RESULTS, describe, speed_rows
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.reporting.results import Row, build_results, speed_row
from reference import MODEL_PATH
from reference.conversation import generate
from workers.engine.settings import WorkerSettings
from workers.model.loader import load_model
from workers.model.tokenizer import ChatTokenizer, load_tokenizer

BASELINE = "budget"
RETRIEVAL = "retrieval"
EVERY_ROW = json.dumps({"retrieve": json.dumps({"share": 0.75, "index": "exact"})})
# Method and options of each arm.
ARMS = {
    BASELINE: ("streaming_llm", ""),
    RETRIEVAL: ("icecache", ""),
    "retrieval, every row scored": ("icecache", EVERY_ROW),
    "full": ("full", ""),
}
CONTEXTS = (4096, 15_872)
OUTPUT_TOKENS = 65
BLOCK_TOKENS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="in tokens")
    parser.add_argument("--budget", type=int, default=256, help="rows per head and layer")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)


def run(given: argparse.Namespace) -> None:
    """Measure, print, write."""
    torch.set_num_threads(given.threads)
    rows = []
    for context in given.contexts:
        for row in measure(context, given):
            rows.append(row)
            print(describe(row), flush=True)
    results = build_results("retrieval-answers", given.seed, "reference", rows)
    results.write(given.out or RESULTS / "retrieval-answers-cpu.json")


def measure(context: int, given: argparse.Namespace) -> Iterator[Row]:
    """The rows of one length of context."""
    model = load_model(MODEL_PATH)
    model, tokenizer = without_end_of_turn(model, load_tokenizer(MODEL_PATH, model.eos_token_ids))
    most = context + BLOCK_TOKENS + OUTPUT_TOKENS
    settings = WorkerSettings(slots=len(ARMS), max_budget=most, block_tokens=BLOCK_TOKENS)
    text = build_text(tokenizer, context, given.seed)
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker.start(model, tokenizer, Path(folder), settings)
        try:
            yield from time_answers(worker, text, context, given)
        finally:
            worker.close()


def build_text(tokenizer: ChatTokenizer, tokens: int, seed: int) -> str:
    """Build a text of so many tokens in the packaged model's language."""
    lines = (each.user for each in generate(seed, 3 * tokens, split="held_out").exchanges)
    return str(tokenizer.inner.decode(tokenizer.encode(" ".join(lines))[:tokens]))


def time_answers(
    worker: Worker, text: str, context: int, given: argparse.Namespace
) -> Iterator[Row]:
    """Speed of every method, and the share of retrieval in the time of a token."""
    states = dict[str, pb.SessionState]()
    for name, (method, options) in ARMS.items():
        worker.open(name, method, given.budget, options=options)
        states[name] = worker.append(name, text).state
    found = {clock: {name: list[float]() for name in ARMS} for clock in ("second", "CPU second")}
    share, first = list[float](), list[float]()
    for number in range(given.rounds + 1):
        for name in sorted(ARMS, reverse=bool(number % 2)):
            method, options = ARMS[name]
            worker.open(name, method, given.budget, state=states[name], options=options)
            filling, clock = Clock(), Clock()
            worker.ask(name, "Go on.", 3, filling).result()  # fills slot and arena
            began = time.process_time()
            done = worker.ask(name, "Go on.", OUTPUT_TOKENS, clock).result()
            used = time.process_time() - began
            assert (done.retrieval.steps > 0) == name.startswith(RETRIEVAL)
            if number == 0:  # warms up
                continue
            timed = clock.timed(done.prompt_tokens)
            found["second"][name].append((timed.output_tokens - 1) / timed.decode)
            found["CPU second"][name].append(timed.output_tokens / used)
            if name == RETRIEVAL:
                share.append(done.retrieval.seconds / (timed.decode + timed.first_token))
                first.append(filling.moments[1] - filling.moments[0])
    condition = f"answer after {context} tokens, budget {given.budget}"
    for unit, values in found.items():
        yield from speed_rows(condition, "decode", f"tokens per {unit}", values, BASELINE)
    yield speed_row(condition, "share of search and reading", "of the time", share)
    yield speed_row(condition, "first step, with the copy of all rows", "seconds", first)
    assert median(share) < 1
