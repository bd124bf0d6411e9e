"""Divergence of a model with a sparse prefill from itself with the exact one, by alpha.

A session gets the beginning of a recorded conversation as one message, and what follows as the recorded
reply. The measure is the distance between the next-token distributions over that reply, of a session
that prefills exactly and of one for each alpha, all of them with every row. Density and cover are those
that the sessions report.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.throughput import RESULTS
from evals.configs import FULL, parse_config
from evals.harness import Message, Session, Setup, build_spec, load, open_worker
from evals.recordings import list_recordings, read_recording
from evals.summary import mean_row
from kvrecall.domain.session_settings import EpisodeSettings
from kvrecall.reporting.results import Row, build_results
from workers.model.tokenizer import ChatTokenizer

ALPHAS = (0.955, 0.98, 0.99, 0.995)
# Room for the template around the two messages.
_TEMPLATE_TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", type=Path, required=True, help="recordings, a file or a folder")
    parser.add_argument("--limit", type=int, default=4, help="recordings")
    parser.add_argument("--tokens", type=int, default=4096, help="of the message")
    parser.add_argument("--reply", type=int, default=256, help="tokens of the recorded reply")
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--alphas", type=float, nargs="+", default=ALPHAS)


def run(given: argparse.Namespace) -> None:
    """Measure, print, write."""
    setup = Setup(given.model, parse_config(FULL), "", given.seed, given.block, EpisodeSettings())
    records = []
    for place in list_recordings(given.data)[: given.limit]:
        tokenizer = load(given.model).tokenizer
        lines = [str(message["content"]) for message in read_recording(place).messages]
        turn = cut_turn(lines, tokenizer, given.tokens, given.reply)
        for record in measure(setup, turn, given.tokens + given.reply, given.alphas):
            records.append(record)
            print(place.number, record, flush=True)
    rows = list(result_rows(records, given.alphas, given.seed))
    results = build_results("sparse-prefill-fidelity", given.seed, given.model, rows)
    results.write(given.out or RESULTS / "sparse-prefill-fidelity.json")


def cut_turn(
    lines: Sequence[str], tokenizer: ChatTokenizer, tokens: int, reply: int
) -> list[Message]:
    """The lines up to `tokens` tokens as the user's message, the next ones as the reply to it."""
    ends = list(accumulate(len(tokenizer.encode(f"{line}\n")) for line in lines))
    first = sum(end <= tokens for end in ends)
    last = sum(end <= tokens + reply for end in ends)
    return [
        {"role": "user", "content": "\n".join(lines[:first])},
        {"role": "assistant", "content": "\n".join(lines[first:last])},
    ]


def measure(
    setup: Setup, turn: Sequence[Message], tokens: int, alphas: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """A record of each alpha on one turn."""
    rows = tokens + _TEMPLATE_TOKENS
    with open_worker(setup, rows, slots=2) as worker:
        exact = Session(worker, build_spec(setup, rows, FULL))
        exact.append(turn, keep_distribution=True)
        for alpha in alphas:
            spec = build_spec(setup, rows, f"alpha-{alpha:g}")
            prefill = json.dumps({"sparse": "on", "alpha": alpha})
            spec.options = json.dumps({"prefill": prefill})
            done = Session(worker, spec).append(turn, compare_with=FULL)
            yield {
                "alpha": alpha,
                "kl": done.fidelity.kl_mean,
                "top1": done.fidelity.top1_agreement,
                "density": done.prefill.density,
                "cover": done.prefill.cover_mean,
                "least cover": done.prefill.cover_min,
                "heard": done.fidelity.tokens,
            }


def result_rows(
    records: Sequence[dict[str, Any]], alphas: Sequence[float], seed: int
) -> Iterator[Row]:
    """Means over the recordings, by alpha."""
    names = {
        "mean KL, nats": "kl",
        "top-1 agreement": "top1",
        "density": "density",
        "cover": "cover",
        "least cover of a layer and head": "least cover",
    }
    for alpha in alphas:
        group = [record for record in records if record["alpha"] == alpha]
        heard = sum(record["heard"] for record in group)
        for name, key in names.items():
            values = [record[key] for record in group]
            yield from mean_row(
                name, values, seed, method=f"full, sparse {alpha:g}", tokens_heard=heard
            )
