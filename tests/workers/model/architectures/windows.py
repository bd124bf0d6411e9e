"""Models some of whose layers attend to a window or a chunk of the newest tokens."""

from tests.workers.model.architectures.architecture import Architecture
from tests.workers.model.architectures.shapes import (
    EXPERTS,
    HEAD,
    LOCAL_EXPERTS,
    WINDOW,
    WINDOWS,
)

WINDOWED = {
    "ministral-windows": Architecture("ministral", 4, {**WINDOWS, **HEAD}),
    "qwen2-windows": Architecture(
        "qwen2",
        4,
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "gemma2": Architecture(
        "gemma2",
        4,
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            **HEAD,
        },
    ),
    "gemma3_text": Architecture("gemma3_text", 4, {"query_pre_attn_scalar": 16, **WINDOWS, **HEAD}),
    "gemma3n_text": Architecture(
        "gemma3n_text",
        4,
        {
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 1280,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [96] * 4,
            **WINDOWS,
            **HEAD,
        },
    ),
    "gemma4_text": Architecture(
        "gemma4_text",
        4,
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 1280,
            **WINDOWS,
        },
    ),
    "gpt_oss": Architecture("gpt_oss", 4, {**WINDOWS, **LOCAL_EXPERTS, **HEAD}),
    "olmo3": Architecture("olmo3", 4, WINDOWS),
    "cohere2": Architecture("cohere2", 4, {**WINDOWS, **HEAD}),
    "exaone4": Architecture("exaone4", 4, {"sliding_window_pattern": 2, **WINDOWS, **HEAD}),
    "granite_swa": Architecture("granite_swa", 4, WINDOWS),
    "afmoe": Architecture(
        "afmoe",
        4,
        {"num_dense_layers": 1, "num_shared_experts": 1, **WINDOWS, **EXPERTS, **HEAD},
        seed=8,
    ),
    "mimo_v2_flash": Architecture(
        "mimo_v2_flash",
        4,
        {
            "head_dim": 24,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            **WINDOWS,
        },
    ),
    "llama4_text": Architecture(
        "llama4_text",
        4,
        {
            "attention_chunk_size": 64,
            "no_rope_layers": [1, 1, 1, 0],
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            **HEAD,
        },
    ),
}
