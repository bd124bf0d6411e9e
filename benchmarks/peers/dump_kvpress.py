"""Rows that kvpress keeps; runs in an environment with kvpress, apart from kvrecall's own.

`python dump_kvpress.py MODEL < request.json > kept.json`; `make_fixtures.py` makes the environment,
runs this and stores the answer.
"""

import json
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

# Relative distance from the threshold within which a score may fall on either side: releases of
# transformers round differently.
NEAR = 1e-5


def main() -> None:
    """Answer the request on standard input."""
    request = json.load(sys.stdin)
    torch.set_num_threads(1)
    import_module("transformers.utils.logging").disable_progress_bar()
    answers = [dump(sys.argv[1], request["inputs"], case) for case in request["cases"]]
    versions = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    json.dump({"versions": versions, "kept": answers}, sys.stdout)


def dump(
    model_path: str, inputs: list[list[int]], case: dict[str, Any]
) -> list[list[dict[str, str]]]:
    """Rows that the case's press keeps, and rows near the threshold, per layer and head."""
    press = build(case["press"])
    attention = "eager" if case["press"]["name"] == "ObservedAttentionPress" else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation=attention
    )
    token_ids = torch.tensor([inputs[case["input"]]])
    scores = record_scores(press)
    full: Any = DynamicCache()
    kept: Any = DynamicCache()
    with torch.no_grad():
        model.model(input_ids=token_ids, past_key_values=full)
        with press(model):
            model.model(input_ids=token_ids, past_key_values=kept)
    layers = []
    for layer, module in enumerate(model.model.layers):
        mask = get_kept_mask(
            full.layers[layer].keys[0], kept.layers[layer].keys[0], module.self_attn
        )
        pooled = getattr(module.self_attn, "masked_key_indices", None) is not None
        near = near_threshold(per_chunk(scores[layer], case["press"]), mask, pooled)
        layers.append(
            [
                {"kept": ranges(row), "near": ranges(close)}
                for row, close in zip(mask, near, strict=True)
            ]
        )
    return layers


def build(described: dict[str, Any]) -> Any:
    """Build a press from its class name and arguments, one of which may be a press."""
    arguments = {
        name: build(value) if isinstance(value, dict) else value
        for name, value in described["arguments"].items()
    }
    return getattr(import_module("kvpress"), described["name"])(**arguments)


def record_scores(press: Any) -> dict[int, Tensor]:
    """Record the scores of the press, or of the one inside it: float32 `[n_kv_heads, n]` by layer.

    The result is filled when the press has run.
    """
    found: dict[int, Tensor] = {}
    if hasattr(press, "compress_post"):
        after = press.compress_post

        def record_all(model: Any) -> None:
            after(model)
            found.update({layer: scores[0].clone() for layer, scores in enumerate(press.score_val)})

        press.compress_post = record_all
        return found
    inner = getattr(press, "press", press)
    score = inner.score

    def record(module: Any, *arguments: Any) -> Tensor:
        scores: Tensor = score(module, *arguments)
        found[module.layer_idx] = scores[0].clone()
        return scores

    inner.score = record
    return found


def get_kept_mask(full: Tensor, kept: Tensor, module: Any) -> Tensor:
    """Mask of the rows that are kept, bool `[n_kv_heads, n]`.

    Rows of uneven heads are masked in the module; of other heads they are removed from the cache.
    """
    if (masked := getattr(module, "masked_key_indices", None)) is not None:
        mask = torch.ones(full.shape[:2], dtype=torch.bool)
        mask[masked[1].cpu(), masked[2].cpu()] = False
        return mask
    same = (full[:, :, None] == kept[:, None]).all(-1)
    assert bool((same.sum(1) == 1).all()), "every kept key is the key of exactly one token"
    return same.any(2)


def per_chunk(scores: Tensor, press: dict[str, Any]) -> Tensor:
    """Score of each row's chunk if the press keeps chunks, else the row's own score."""
    if press["name"] != "ChunkKVPress":
        return scores
    chunks = torch.split(scores.sum(0, keepdim=True), press["arguments"]["chunk_length"], dim=1)
    return torch.cat([chunk.mean().expand_as(chunk) for chunk in chunks], dim=1).expand_as(scores)


def near_threshold(scores: Tensor, kept: Tensor, pooled: bool) -> Tensor:
    """Mask of rows near both the lowest kept score and the highest other, bool `[heads, n]`."""
    dims = (0, 1) if pooled else (1,)
    lowest = scores.masked_fill(~kept, torch.inf).amin(dims, keepdim=True)
    highest = scores.masked_fill(kept, -torch.inf).amax(dims, keepdim=True)
    room = NEAR * highest.abs()
    return ((scores - lowest).abs() <= room) & ((scores - highest).abs() <= room)


def ranges(mask: Tensor) -> str:
    """Indices of true values as text such as "0-3,7"."""
    return ",".join(
        str(a) if a == b else f"{a}-{b}" for a, b in runs(mask.nonzero().flatten().tolist())
    )


def runs(indices: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending numbers as (first, last) of each run."""
    found: list[tuple[int, int]] = []
    for index in indices:
        if found and found[-1][1] == index - 1:
            found[-1] = (found[-1][0], index)
        else:
            found.append((index, index))
    return found


if __name__ == "__main__":
    main()
