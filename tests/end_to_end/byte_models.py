"""Folders of tiny models whose tokens are single bytes, with a chat template of the test's own."""

from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from tests.workers.model.architectures.architecture import Architecture
from tests.workers.model.architectures.building import build


def save_byte_model(
    architecture: Architecture, inner: PreTrainedTokenizerFast, folder: Path, *ends: str
) -> Path:
    """Save a model with the tokenizer's vocabulary, whose answers end with its end of turn, or any of `ends`."""
    sized = {**architecture.settings, "vocab_size": len(inner)}
    model = build(replace(architecture, settings=sized))
    for config in (model.config, model.generation_config):
        config.eos_token_id = inner.convert_tokens_to_ids([str(inner.eos_token), *ends])
    model.save_pretrained(folder)
    inner.save_pretrained(folder)
    return folder
