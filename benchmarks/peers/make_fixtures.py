"""Ask kvpress which rows it keeps and store the answer for the tests: `python -m benchmarks.peers.make_fixtures`.

It makes an environment of its own with kvpress (which needs another transformers than kvrecall), runs
`dump_kvpress.py` in it on the packaged model, and writes `tests/benchmarks/fixtures/kvpress.json`.
"""

import argparse
import json
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from reference import MODEL_PATH
from reference.conversation import generate

HERE = Path(__file__).parent
FIXTURE = HERE.parents[1] / "tests" / "benchmarks" / "fixtures" / "kvpress.json"
INPUTS = ((7001, 256, 96), (7002, 400, 128), (7003, 597, 192))
"""Seed of a held-out conversation, tokens of it, and rows per head that are kept."""


def main() -> None:
    """Make the environment if it is not there, ask, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environment", type=Path, default=HERE / ".venv")
    arguments = parser.parse_args()
    python = environment(arguments.environment)
    inputs = [token_ids(seed, tokens) for seed, tokens, _ in INPUTS]
    cases = [
        case
        for index, (_, tokens, budget) in enumerate(INPUTS)
        for case in cases_of(index, tokens, budget)
    ]
    command = [str(python), str(HERE / "dump_kvpress.py"), str(MODEL_PATH)]
    asked = json.dumps({"inputs": inputs, "cases": cases})
    told = json.loads(
        subprocess.run(command, input=asked, stdout=subprocess.PIPE, text=True, check=True).stdout
    )
    for case, layers in zip(cases, told["kept"], strict=True):
        case["layers"] = layers
    write({"versions": told["versions"], "inputs": inputs, "cases": cases})


def environment(path: Path) -> Path:
    """Its Python, with kvpress; installed if the folder is not there. torch first, at our version."""
    python = path / "bin" / "python"
    if not python.exists():
        venv.create(path, with_pip=True)
        for packages in (
            [f"torch=={torch.__version__.split('+')[0]}"],
            ["kvpress", "transformers<5.3"],
        ):
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def token_ids(seed: int, tokens: int) -> list[int]:
    """The first tokens of a held-out conversation."""
    conversation = generate(seed, 2 * tokens)
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL_PATH)
    text = tokenizer.apply_chat_template(
        conversation.messages(), tools=conversation.tools, tokenize=False
    )
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)[:tokens]
    assert len(ids) == tokens, "the conversation is long enough"
    return ids


def cases_of(index: int, tokens: int, budget: int) -> list[dict[str, Any]]:
    """Per method: its settings, and the press that does the same on input `index`, down to `budget` rows a head."""
    ratio = 1 - (budget + 0.5) / tokens  # presses truncate the rows they keep
    snapkv = press("SnapKVPress", compression_ratio=ratio, window_size=32, kernel_size=5)
    tail = 20 + tokens % 10
    chunks = press("SnapKVPress", compression_ratio=ratio, window_size=tail, kernel_size=1)
    pyramid = {"compression_ratio": 1 - budget / tokens, "window_size": 2, "kernel_size": 5}
    pooled = {"window": 32, "pool": 5, "pooling": "mean"}
    compared: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (
            "streaming_llm",
            {"sinks": 4},
            press("StreamingLLMPress", compression_ratio=ratio, n_sink=4),
        ),
        (
            "h2o",
            {"recent": 0, "per_query": True},
            press("ObservedAttentionPress", compression_ratio=ratio),
        ),
        ("snapkv", pooled, snapkv),
        ("pyramidkv", {**pooled, "window": 2}, press("PyramidKVPress", **pyramid)),
        ("adakv", {**pooled, "floor": 0.2}, press("AdaKVPress", press=snapkv, alpha_safeguard=0.2)),
        ("keydiff", {}, press("KeyDiffPress", compression_ratio=ratio)),
        # Of KVzip's rows the part that goes is truncated, not the part that stays.
        (
            "kvzip",
            {},
            press("KVzipPress", compression_ratio=1 - (budget - 0.25) / tokens, layerwise=True),
        ),
        (
            "chunkkv",
            {"window": tail, "chunk": 10, "reuse": 1, "aggregate": "mean"},
            press("ChunkKVPress", press=chunks, chunk_length=10),
        ),
        ("tova", {}, press("TOVAPress", compression_ratio=ratio)),
        ("knorm", {}, press("KnormPress", compression_ratio=ratio)),
    ]
    return [
        {"method": m, "settings": s, "press": p, "input": index, "budget": budget}
        for m, s, p in compared
    ]


def press(name: str, **arguments: Any) -> dict[str, Any]:
    """A press as `dump_kvpress.build` reads it."""
    return {"name": name, "arguments": arguments}


def write(fixture: dict[str, Any]) -> None:
    """A line per input and case, so that a change can be read."""
    FIXTURE.parent.mkdir(parents=True, exist_ok=True)
    lines = [f'"versions": {json.dumps(fixture["versions"])}', listed("inputs", fixture["inputs"])]
    FIXTURE.write_text("{" + ",\n".join([*lines, listed("cases", fixture["cases"])]) + "}\n")
    print(f"{FIXTURE.stat().st_size // 1000} kB in {FIXTURE}", file=sys.stderr)


def listed(name: str, items: Sequence[Any]) -> str:
    """A list in JSON, an item a line."""
    return (
        f'"{name}": [\n'
        + ",\n".join(json.dumps(item, separators=(",", ":")) for item in items)
        + "\n]"
    )


if __name__ == "__main__":
    main()
