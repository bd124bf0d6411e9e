"""Tiny models of four kinds of layers, as folders that `kvrecall serve` takes."""

import shutil
from dataclasses import replace
from pathlib import Path

from reference import MODEL_PATH
from tests.workers.model.architectures.architecture import Architecture
from tests.workers.model.architectures.building import build
from tests.workers.model.architectures.latent import LATENTS
from tests.workers.model.architectures.recurrent import RECURRENT
from tests.workers.model.architectures.windows import WINDOWED

STATE_EVERY = 384
"""Tokens at most between two stored states of the recurrent model: more than a state weighs in rows."""
_HYBRID = RECURRENT["qwen3_5_text"]
# As in real models a state weighs more than a page.
_LARGER_STATES = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
KINDS = {
    "qwen3_5": replace(_HYBRID, settings={**_HYBRID.settings, **_LARGER_STATES}),
    "gpt_oss": WINDOWED["gpt_oss"],
    "gemma3": WINDOWED["gemma3_text"],
    "deepseek_v3": LATENTS["deepseek_v3"],
}
"""Recurrent states, windows with sinks, windows, latent rows."""
RECURRENT_KIND = "qwen3_5"


def save(architecture: Architecture, folder: Path) -> Path:
    """Save a model with the reference model's tokenizer.

    It has no end of turn, so that answers are as long as max_tokens.
    """
    model = build(architecture)
    for config in (model.config, model.generation_config):
        config.eos_token_id = model.config.pad_token_id
    model.save_pretrained(folder)
    for path in MODEL_PATH.iterdir():
        if path.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(path, folder / path.name)
    return folder
