"""Models with a part for images around a language model, which is what is served."""

from typing import Any

from tests.workers.model.architectures.architecture import Architecture
from tests.workers.model.architectures.full_attention import DENSE
from tests.workers.model.architectures.recurrent import RECURRENT
from tests.workers.model.architectures.shapes import HEAD
from tests.workers.model.architectures.windows import WINDOWED

_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_DEEP_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [],
}
_LLAMA4_TOWER = {
    **_TOWER,
    "vision_output_dim": 64,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
}
_MROPE = {
    "rope_type": "default",
    "rope_theta": 1e6,
    "mrope_section": [2, 3, 3],
    "mrope_interleaved": True,
}
_QWEN3_VL_TEXT = Architecture("qwen3_vl_text", settings={"rope_parameters": _MROPE, **HEAD})


def _around(kind: str, text: Architecture, tower: dict[str, Any] | None) -> Architecture:
    settings: dict[str, Any] = {"tie_word_embeddings": False}
    if tower:
        settings["vision_config"] = tower
    return Architecture(kind, text.layers, settings, text=text)


WRAPPERS = {
    "gemma3-wrapper": _around("gemma3", WINDOWED["gemma3_text"], _TOWER),
    "gemma4-wrapper": _around("gemma4", WINDOWED["gemma4_text"], None),
    "mistral3-wrapper": _around("mistral3", DENSE["ministral3"], {**_TOWER, **HEAD}),
    "qwen3_vl-wrapper": _around("qwen3_vl", _QWEN3_VL_TEXT, _DEEP_TOWER),
    "llama4-wrapper": _around("llama4", WINDOWED["llama4_text"], _LLAMA4_TOWER),
    "qwen3_5-wrapper": _around("qwen3_5", RECURRENT["qwen3_5_text"], _DEEP_TOWER),
}
