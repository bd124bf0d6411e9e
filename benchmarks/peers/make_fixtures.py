"""Fixtures of the rows that kvpress keeps: `python -m benchmarks.peers.make_fixtures`.

It makes an environment of its own with kvpress (which needs another transformers than kvrecall),
runs `dump_kvpress.py` in it on the packaged model, and writes
`tests/benchmarks/fixtures/kvpress.json`.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.peers.environments import kvpress_python
from reference import MODEL_PATH
from reference.conversation import generate

HERE = Path(__file__).parent
FIXTURE = HERE.parents[1] / "tests" / "benchmarks" / "fixtures" / "kvpress.json"
# Seed of a held-out conversation, number of its tokens, and rows per head that are kept.
INPUTS = ((7001, 256, 96), (7002, 400, 128), (7003, 597, 192))


def main() -> None:
    """Make the environment if it does not exist, run kvpress, write the fixture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environment", type=Path, default=HERE / ".venv")
    arguments = parser.parse_args()
    python = kvpress_python(arguments.environment)
    inputs = [token_ids(seed, tokens) for seed, tokens, _ in INPUTS]
    cases = [
        case
        for index, (_, tokens, budget) in enumerate(INPUTS)
        for case in build_cases(index, tokens, budget)
    ]
    command = [str(python), str(HERE / "dump_kvpress.py"), str(MODEL_PATH)]
    request = json.dumps({"inputs": inputs, "cases": cases})
    answer = json.loads(
        subprocess.run(command, input=request, stdout=subprocess.PIPE, text=True, check=True).stdout
    )
    for case, layers in zip(cases, answer["kept"], strict=True):
        case["layers"] = layers
    write({"versions": answer["versions"], "inputs": inputs, "cases": cases})


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


def build_cases(index: int, tokens: int, budget: int) -> list[dict[str, Any]]:
    """Settings of each method and the equivalent press, for one input and budget.

    `index` is the number of the input, `tokens` its length, `budget` the rows per head.
    """
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
        # KVzip truncates the number of rows that it removes, not of those that it keeps.
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
    """Description of a press for `dump_kvpress.build`."""
    return {"name": name, "arguments": arguments}


def write(fixture: dict[str, Any]) -> None:
    """Write the fixture with a line per input and case, for readable diffs."""
    FIXTURE.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        f'"versions": {json.dumps(fixture["versions"])}',
        to_json_lines("inputs", fixture["inputs"]),
    ]
    FIXTURE.write_text("{" + ",\n".join([*lines, to_json_lines("cases", fixture["cases"])]) + "}\n")
    print(f"{FIXTURE.stat().st_size // 1000} kB in {FIXTURE}", file=sys.stderr)


def to_json_lines(name: str, items: Sequence[Any]) -> str:
    """A list in JSON with one item a line."""
    return (
        f'"{name}": [\n'
        + ",\n".join(json.dumps(item, separators=(",", ":")) for item in items)
        + "\n]"
    )


if __name__ == "__main__":
    main()
