"""Speed and quality of a model's weights in float32, packed bfloat16, 8 and 4 bits, in one run.

`python -m benchmarks.quantized --model FOLDER --name NAME --data FOLDER` takes the CPU time of the one
thread that computes, pass by pass in rotation, as `passes.py` does: ratios count. Quality is the
distance of the next-token distributions from float32's over text of recordings, in pieces of 4 tokens,
so that the kernels of few bits compute it. The result file goes to `benchmarks/results/`. Takes two
to three minutes of CPU time for 135 million weights; nothing is kept of a run that was cut off.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.passes import RESULTS, EnginePasses, build_rows, measure
from evals.recordings import list_recordings, read_recording
from kvrecall.app.models import resolve_model
from kvrecall.reporting.results import Row, bootstrap, build_results, quality_row
from workers.cache.active_cache import ActiveCache
from workers.cache.forward_step import ForwardStep
from workers.model.loader import LoadedModel, load_model
from workers.model.quantized_linear import Quantization
from workers.model.tokenizer import ChatTokenizer, load_tokenizer

BATCHES = (1, 4, 8)
BLOCK = 256
# Tokens at once when quality is measured: few enough for the kernels of few bits.
PIECE = 4
# First tokens of a text, which are hard to predict whatever the weights.
SKIPPED = 32


@dataclass(frozen=True)
class Weights:
    """A form of the weights that is measured."""

    dtype: torch.dtype
    quantize: Quantization | None = None


FORMS = {
    "float32": Weights(torch.float32),
    "bfloat16, packed": Weights(torch.bfloat16),
    "int8": Weights(torch.bfloat16, "int8"),
    "int4": Weights(torch.bfloat16, "int4"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="as for kvrecall serve")
    parser.add_argument("--name", required=True, help="the model's name in the result file")
    parser.add_argument("--data", type=Path, required=True, help="recordings: a file or a folder")
    parser.add_argument(
        "--texts", type=int, default=4, help="recordings that quality is measured on"
    )
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each")
    parser.add_argument("--context", type=int, default=512, help="tokens before the decode steps")
    parser.add_argument("--steps", type=int, default=24, help="decode steps of each form")
    parser.add_argument("--prefills", type=int, default=6, help="prefills of each form")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    path = resolve_model(given.model)
    models = {
        name: load_model(path, each.dtype, "cpu", quantize=each.quantize)
        for name, each in FORMS.items()
    }
    tokenizer = load_tokenizer(path, next(iter(models.values())).eos_token_ids)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        passes = {
            name: EnginePasses(model, tokenizer, Path(folder) / name)
            for name, model in models.items()
        }
        rows += measure_speed(passes, given.context, given.steps, given.prefills)
    texts = read_texts(given.data, tokenizer, given.texts, given.tokens)
    rows += measure_quality(models, texts)
    for row in rows:
        print(f"{row['condition']:<60} {row.get('ratio', row.get('mean'))}", flush=True)
    results = build_results("quantized", 0, f"{given.name} (one thread)", rows)
    results.write(given.out or RESULTS / f"quantized-{given.name}-cpu.json")


def measure_speed(
    passes: Mapping[str, EnginePasses], context: int, steps: int, prefills: int
) -> Iterator[Row]:
    """Decode steps after `context` tokens, full caches, and prefills of as many, per form."""
    for batch in BATCHES:
        subjects = {
            name: each.decoder(batch, context, "full", context + 512)
            for name, each in passes.items()
        }
        condition = f"decode after {context} tokens, {batch} at once"
        yield from build_rows(condition, measure(subjects, steps))
    subjects = {
        name: each.prefill(context, BLOCK, "full", context) for name, each in passes.items()
    }
    condition = f"prefill of {context} tokens in blocks of {BLOCK}"
    yield from build_rows(condition, measure(subjects, prefills))


def read_texts(data: Path, tokenizer: ChatTokenizer, count: int, tokens: int) -> list[Tensor]:
    """The first tokens of the first recordings' words, int64 `[tokens]` each.

    Raises BadDataFile, BadReplayFile.
    """
    texts = []
    for place in list_recordings(data)[:count]:
        messages = read_recording(place).messages
        words = "\n".join(str(message["content"]) for message in messages if message["content"])
        texts.append(torch.tensor(tokenizer.encode(words)[:tokens]))
    return texts


def measure_quality(models: Mapping[str, LoadedModel], texts: Sequence[Tensor]) -> Iterator[Row]:
    """Mean KL divergence from the first model's distributions, and top-1 agreement, per form."""
    baseline, *others = models
    expected = [predict(models[baseline], text) for text in texts]
    for name in others:
        pairs = [
            (theirs[SKIPPED:], predict(models[name], text)[SKIPPED:])
            for theirs, text in zip(expected, texts, strict=True)
        ]
        measured = {
            "mean KL from float32, nats": [divergence(*pair) for pair in pairs],
            "top-1 agreement with float32": [agreement(*pair) for pair in pairs],
        }
        for metric, values in measured.items():
            estimate = bootstrap(torch.cat(values).tolist())
            if estimate is not None:
                yield quality_row(f"{metric}: {name}", estimate, texts=len(texts))


@torch.inference_mode()
def predict(model: LoadedModel, text: Tensor) -> Tensor:
    """Log-probabilities of the token after each, float32 `[t, vocabulary]`."""
    cache = ActiveCache(model.shape, 1, [len(text)] * model.shape.n_layers, model.dtype)
    slot = cache.claim(cache.rows)
    logits = []
    for start in range(0, len(text), PIECE):
        piece = text[None, start : start + PIECE]
        step = ForwardStep(cache, [slot], start + torch.arange(piece.shape[1])[None])
        logits.append(model.forward(piece, step, logits_to_keep=piece.shape[1])[0])
    return torch.cat(logits).log_softmax(-1)


def divergence(expected: Tensor, found: Tensor) -> Tensor:
    """KL divergence of each position's distributions, nats; log-probabilities `[t, vocabulary]`."""
    return (expected.exp() * (expected - found)).sum(-1)


def agreement(expected: Tensor, found: Tensor) -> Tensor:
    """1 where the most likely token is the same, else 0; log-probabilities `[t, vocabulary]`."""
    return (expected.argmax(-1) == found.argmax(-1)).double()


if __name__ == "__main__":
    main()
