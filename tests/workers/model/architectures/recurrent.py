"""Models some of whose layers keep a state instead of rows: delta nets, Mamba-2, short convolutions."""

from tests.workers.model.architectures.architecture import Architecture
from tests.workers.model.architectures.shapes import (
    CONV,
    DELTA_NET,
    EXPERTS,
    HEAD,
    LATENT_EXPERTS,
    LINEAR,
    LOCAL_EXPERTS,
    MAMBA2,
    WINDOW,
)

_SHARED_EXPERT = {"shared_expert_intermediate_size": 32}

RECURRENT = {
    "qwen3_next": Architecture(
        "qwen3_next",
        4,
        {"partial_rotary_factor": 0.25, **LINEAR, **_SHARED_EXPERT, **DELTA_NET, **EXPERTS, **HEAD},
    ),
    "qwen3_5_text": Architecture("qwen3_5_text", 4, {**LINEAR, **DELTA_NET, **HEAD}),
    "qwen3_5_moe_text": Architecture(
        "qwen3_5_moe_text", 4, {**LINEAR, **_SHARED_EXPERT, **DELTA_NET, **EXPERTS, **HEAD}
    ),
    "olmo_hybrid": Architecture("olmo_hybrid", 4, {**LINEAR, **DELTA_NET}),
    "granitemoehybrid": Architecture(
        "granitemoehybrid",
        4,
        {
            "shared_intermediate_size": 32,
            "attention_multiplier": 0.2,
            "position_embedding_type": "nope",
            **LINEAR,
            **LOCAL_EXPERTS,
            **MAMBA2,
        },
    ),
    "nemotron_h": Architecture(
        "nemotron_h",
        4,
        {
            "layer_types": ["linear_attention", "full_attention", "mlp", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "conv_kernel": 4,
            "chunk_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            **HEAD,
        },
    ),
    "bamba": Architecture("bamba", 4, {"attn_layer_indices": [1, 3], **MAMBA2}),
    "falcon_h1": Architecture("falcon_h1", 2, {"mamba_d_ssm": 128, **MAMBA2, **HEAD}),
    "kimi_linear": Architecture(
        "kimi_linear",
        4,
        {
            "linear_attn_config": {
                "short_conv_kernel_size": 4,
                "head_dim": 16,
                "num_heads": 4,
                "kda_layers": [1, 3],
                "full_attn_layers": [2, 4],
            },
            **LINEAR,
            **LATENT_EXPERTS,
            "num_experts": 4,
            **HEAD,
        },
    ),
    "lfm2": Architecture(
        "lfm2", 4, {"block_ff_dim": 96, "block_auto_adjust_ff_dim": False, **CONV}
    ),
    "lfm2_moe": Architecture("lfm2_moe", 4, {"num_dense_layers": 1, **CONV, **EXPERTS}),
    "lfm3": Architecture(
        "lfm3",
        4,
        {
            "layer_types": ["conv", "full_attention", "sliding_attention", "full_attention"],
            "sliding_window": WINDOW,
            **HEAD,
        },
    ),
}
