"""The reference model before training."""

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from reference import MODEL_PATH
from reference.architecture import FIRST_DISTANCES, build_model


def test_heads_of_the_first_layer_begin_with_the_token_at_their_distance() -> None:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(MODEL_PATH)
    model = build_model(tokenizer)
    attention = model.model.layers[0].self_attn
    positions = torch.arange(5000, 5040)[None]
    nothing = torch.zeros(1, 40, model.config.hidden_size)
    queries, keys = (
        projection(nothing).view(1, 40, -1, attention.head_dim).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj)
    )
    queries, keys = apply_rotary_pos_emb(
        queries, keys, *model.model.rotary_emb(nothing, position_ids=positions)
    )
    group = queries.shape[1] // keys.shape[1]
    logits = queries @ keys.repeat_interleave(group, 1).mT * attention.scaling
    weights = logits[0, :, -1].softmax(-1)
    assert weights.argmax(-1).tolist() == [39 - distance for distance in FIRST_DISTANCES]
    assert (weights.amax(-1) > 1 / 3).all()
