"""The reference model before training: its shape, and biases with which it begins to look back."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from reference.tokenizer import MAX_TOKENS

# What the query heads of the first layer attend to at first: the token so many before.
FIRST_DISTANCES = (1, 2, 3, 5)
# Length of the biases that do it, by the root of half a head's channels: a head has a third of its
# attention on that token, and most of the rest beside it.
DISTANCE_GAIN = 2.5


def build_model(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """An untrained model of 2.5 million parameters; see `attend_to_distances`."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        attention_bias=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.do_sample = False  # measurements take the likeliest tokens
    attend_to_distances(model)
    return model


@torch.no_grad()
def attend_to_distances(model: LlamaForCausalLM) -> None:
    """Set biases of the first layer so that its heads attend to tokens FIRST_DISTANCES before.

    A fact is found again by the tokens in front of its value. For that the first layer has to attend
    to a token's predecessors, whatever they are, and without biases this alone took most of a run.
    RoPE turns a query and a key by their positions: biases of queries that are those of the keys,
    turned back by a distance, meet them at that distance.
    """
    attention = model.model.layers[0].self_attn
    frequencies = model.model.rotary_emb.inv_freq
    key = torch.cat([torch.ones_like(frequencies), torch.zeros_like(frequencies)])
    queries = [
        torch.cat([(distance * frequencies).cos(), -(distance * frequencies).sin()])
        for distance in FIRST_DISTANCES
    ]
    n_kv_heads = attention.k_proj.out_features // len(key)
    attention.k_proj.bias.copy_(DISTANCE_GAIN * key.repeat(n_kv_heads))
    attention.q_proj.bias.copy_(DISTANCE_GAIN * torch.cat(queries))
