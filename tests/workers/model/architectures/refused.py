"""Models that are refused, with a pattern of the text that says why."""

from tests.workers.model.architectures.architecture import Architecture
from tests.workers.model.architectures.shapes import (
    DELTA_NET,
    EXPERTS,
    HEAD,
    LATENT_EXPERTS,
    LINEAR,
    LOCAL_EXPERTS,
    WINDOW,
)

_INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 64}

REFUSED = {
    "mistral-windows": Architecture(
        "mistral", 2, {"sliding_window": WINDOW, **HEAD}, refused=r"only sliding_attention"
    ),
    "minimax": Architecture(
        "minimax",
        4,
        {"block_size": 32, **LINEAR, **LOCAL_EXPERTS, **HEAD},
        refused=r"\(layers with a recurrent state, full attention\) does not run .* cache of its own",
    ),
    "deepseek_v32": Architecture(
        "deepseek_v32", 2, {**LATENT_EXPERTS, **_INDEXER}, refused=r"indexed_attention"
    ),
    "glm_moe_dsa": Architecture(
        "glm_moe_dsa", 2, {**LATENT_EXPERTS, **_INDEXER}, refused=r"indexed_attention"
    ),
    "deepseek_v4": Architecture(
        "deepseek_v4",
        4,
        {
            "sliding_window": WINDOW,
            "head_dim": 16,
            "q_lora_rank": 24,
            "o_groups": 2,
            "o_lora_rank": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_key_value_heads": 1,
            **_INDEXER,
        },
        refused=r"compressed_sparse_attention, heavily_compressed_attention",
    ),
    "qwen4_exp_text": Architecture(
        "qwen4_exp_text",
        4,
        {
            "layer_types": ["linear_attention", "indexed_attention"] * 2,
            "shared_expert_intermediate_size": 32,
            "hc_count": 2,
            "hc_lowrank": 8,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 64,
            "indexer_compress_ratio": 4,
            **DELTA_NET,
            **EXPERTS,
            **HEAD,
        },
        refused=r"indexed_attention",
    ),
    "jamba": Architecture(
        "jamba",
        4,
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 16,
            "use_mamba_kernels": False,
        },
        refused=r"the first layer that differs is 0, with a recurrent state",
    ),
}
