"""Answers and fidelity of kvpress's presses; runs in an environment with kvpress, apart from ours.

`python press_cases.py MODEL < request.json > records.json`; `compare_methods.py` makes the
environment, runs this for every case and stores the records.
"""

import copy
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

# The press that needs the attention weights themselves.
_NEEDS_WEIGHTS = "ObservedAttentionPress"


def main() -> None:
    """Answer the request on standard input."""
    request = json.load(sys.stdin)
    torch.set_num_threads(1)
    import_module("transformers.utils.logging").disable_progress_bar()
    records = list(run_case(sys.argv[1], request["case"], request["presses"], request["budgets"]))
    versions = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    json.dump({"versions": versions, "records": records}, sys.stdout)


def run_case(
    path: str, case: dict[str, Any], presses: dict[str, Any], budgets: dict[str, int]
) -> Iterator[dict[str, Any]]:
    """Records of every press at every budget (rows per head), beside the full cache."""
    models = {
        attention: AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, case["dtype"]), attn_implementation=attention
        )
        for attention in ("sdpa", "eager")
    }
    context = torch.tensor([case["context"]])
    with torch.no_grad():
        full: Any = DynamicCache()
        models["sdpa"].model(input_ids=context, past_key_values=full)
        reference = continuation_log_probs(models["sdpa"], full, case)
        for name, described in presses.items():
            model = models["eager" if described["name"] == _NEEDS_WEIGHTS else "sdpa"]
            for budget, rows in budgets.items():
                cache = compress(model, described, context, rows)
                measured = continuation_log_probs(model, cache, case)
                yield {
                    "arm": name,
                    "budget": budget,
                    "rows": rows,
                    "length": context.shape[1],
                    "active_rows": active_rows(model, cache),
                    "replies": [answer(model, cache, case, each) for each in case["questions"]],
                    **distance(reference, measured),
                }


def compress(model: Any, described: dict[str, Any], context: torch.Tensor, rows: int) -> Any:
    """The cache of a context that a press has compressed to `rows` rows per head."""
    press = build(described, 1 - rows / context.shape[1])
    cache: Any = DynamicCache()
    with press(model):
        model.model(input_ids=context, past_key_values=cache)
    return cache


def build(described: dict[str, Any], ratio: float) -> Any:
    """Build a press from its class name and arguments; the innermost gets the ratio."""
    arguments = {
        name: build(value, ratio) if isinstance(value, dict) else value
        for name, value in described["arguments"].items()
    }
    if "press" not in arguments:
        arguments["compression_ratio"] = ratio
    return getattr(import_module("kvpress"), described["name"])(**arguments)


def active_rows(model: Any, cache: Any) -> float:
    """Rows per KV head, a mean over layers and heads, without those that a press has masked."""
    rows = 0
    heads = 0
    for layer, module in enumerate(model.model.layers):
        keys = cache.layers[layer].keys
        masked = getattr(module.self_attn, "masked_key_indices", None)
        rows += keys.shape[1] * keys.shape[2] - (0 if masked is None else len(masked[0]))
        heads += keys.shape[1]
    return rows / heads


def answer(model: Any, cache: Any, case: dict[str, Any], question: list[int]) -> list[int]:
    """Greedy token ids of an answer; the cache stays as it is."""
    own = copy.deepcopy(cache)
    position = len(case["context"])
    token_ids = question
    reply = list[int]()
    while len(reply) < case["max_tokens"]:
        logits = forward(model, own, token_ids, position)
        position += len(token_ids)
        token = int(logits[-1].argmax())
        if token in case["ends"]:
            break
        reply.append(token)
        token_ids = [token]
    return reply


def continuation_log_probs(model: Any, cache: Any, case: dict[str, Any]) -> torch.Tensor:
    """Next-token log-probabilities at the recorded reply tokens, float32 `[n, vocabulary]`."""
    own = copy.deepcopy(cache)
    logits = forward(model, own, case["continuation"], len(case["context"]))
    before = torch.tensor([index - 1 for index in case["recorded"] if index])
    return logits[before].float().log_softmax(-1)


def forward(model: Any, cache: Any, token_ids: list[int], position: int) -> torch.Tensor:
    """Logits `[n, vocabulary]` of tokens at true positions, which a compressed cache has not.

    One token at a time where layers have kept unlike many rows: transformers makes one mask, as
    long as the first layer's rows.
    """
    lengths = {layer.keys.shape[2] for layer in cache.layers}
    size = len(token_ids) if len(lengths) == 1 else 1
    parts = []
    for start in range(0, len(token_ids), size):
        part = token_ids[start : start + size]
        positions = torch.arange(position + start, position + start + len(part))[None]
        inputs = torch.tensor([part])
        out = model(input_ids=inputs, past_key_values=cache, position_ids=positions)
        parts.append(out.logits[0])
    return torch.cat(parts)


def distance(reference: torch.Tensor, measured: torch.Tensor) -> dict[str, float]:
    """Mean KL (nats, reference || measured) and top-1 agreement."""
    divergence = (reference.exp() * (reference - measured)).sum(-1)
    agree = reference.argmax(-1) == measured.argmax(-1)
    return {
        "heard": len(measured),
        "kl": max(0.0, float(divergence.mean())),
        "top1": float(agree.float().mean()),
    }


if __name__ == "__main__":
    main()
