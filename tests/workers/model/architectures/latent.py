"""Models whose layers keep one latent row per token, for all heads."""

from tests.workers.model.architectures.architecture import Architecture
from tests.workers.model.architectures.shapes import LATENT, LATENT_EXPERTS

LATENTS = {
    "deepseek_v2": Architecture(
        "deepseek_v2",
        settings={**LATENT_EXPERTS, "topk_method": "greedy", "topk_group": None, "n_group": None},
    ),
    "deepseek_v3": Architecture("deepseek_v3", settings=LATENT_EXPERTS),
    "glm4_moe_lite": Architecture("glm4_moe_lite", settings=LATENT_EXPERTS),
    "longcat_flash": Architecture(
        "longcat_flash",
        settings={
            **LATENT,
            "head_dim": 8,
            "num_layers": 1,
            "n_routed_experts": 4,
            "moe_topk": 2,
            "zero_expert_num": 1,
            "expert_ffn_hidden_size": 32,
            "ffn_hidden_size": 96,
        },
    ),
}
