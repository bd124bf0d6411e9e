"""Models all of whose layers attend to all tokens, one key and one value each."""

from tests.workers.model.architectures.architecture import Architecture
from tests.workers.model.architectures.shapes import EXPERTS, HEAD, LOCAL_EXPERTS, ROUTED_EXPERTS

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 128,
    "max_position_embeddings": 2048,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_GRANITE = {
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 2.0,
}
_PHI4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "crop_size": 28,
}
_PHI4_AUDIO = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_blocks": 2,
    "num_attention_heads": 2,
    "nemo_conv_channels": 16,
    "ext_pw_out_channel": 32,
    "depthwise_separable_out_channel": 32,
}

DENSE = {
    "llama": Architecture("llama", settings=HEAD),
    "mistral": Architecture("mistral", settings={"sliding_window": None, **HEAD}),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", settings=HEAD),
    "glm": Architecture("glm", settings={"partial_rotary_factor": 0.5, **HEAD}),
    "glm4": Architecture("glm4", settings={"partial_rotary_factor": 0.5, **HEAD}),
    "phi3": Architecture("phi3", settings={"sliding_window": None, "partial_rotary_factor": 0.75}),
    "phi4_multimodal": Architecture(
        "phi4_multimodal",
        settings={
            "sliding_window": None,
            "vision_config": _PHI4_VISION,
            "audio_config": _PHI4_AUDIO,
        },
    ),
    "olmo2": Architecture("olmo2", seed=12),
    "smollm3": Architecture(
        "smollm3", 4, {"no_rope_layers": [1, 1, 1, 0], "use_sliding_window": False}
    ),
    "granite": Architecture("granite", settings=_GRANITE),
    "nemotron": Architecture("nemotron", settings={"partial_rotary_factor": 0.5, **HEAD}),
    "seed_oss": Architecture("seed_oss", settings=HEAD),
    "ernie4_5": Architecture("ernie4_5", settings=HEAD),
    "hunyuan_v1_dense": Architecture("hunyuan_v1_dense", settings=HEAD),
    "apertus": Architecture("apertus"),
    "arcee": Architecture("arcee", settings=HEAD),
    "starcoder2": Architecture("starcoder2", settings={"sliding_window": None}),
    "ministral3": Architecture(
        "ministral3", settings={"sliding_window": None, "rope_parameters": _YARN, **HEAD}
    ),
}

MIXTURES = {
    "qwen2_moe": Architecture(
        "qwen2_moe", settings={"shared_expert_intermediate_size": 32, **EXPERTS}
    ),
    "qwen3_moe": Architecture("qwen3_moe", settings={**EXPERTS, **HEAD}, seed=12),
    "mixtral": Architecture("mixtral", settings={"sliding_window": None, **LOCAL_EXPERTS}),
    "olmoe": Architecture("olmoe", settings={"num_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": Architecture(
        "glm4_moe", settings={"use_qk_norm": True, **ROUTED_EXPERTS, **HEAD}, seed=8
    ),
    "minimax_m2": Architecture("minimax_m2", settings={"rotary_dim": 8, **LOCAL_EXPERTS, **HEAD}),
    "granitemoe": Architecture(
        "granitemoe", settings={"attention_multiplier": 0.2, **LOCAL_EXPERTS}
    ),
    "hunyuan_v1_moe": Architecture(
        "hunyuan_v1_moe", settings={"num_experts": 4, "moe_topk": 2, **HEAD}
    ),
    "ernie4_5_moe": Architecture(
        "ernie4_5_moe",
        settings={
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    "phimoe": Architecture("phimoe", settings={"sliding_window": None, **LOCAL_EXPERTS}),
    "dots1": Architecture("dots1", settings={"sliding_window": None, **ROUTED_EXPERTS, **HEAD}),
}
