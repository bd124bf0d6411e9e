"""The reference model: a small causal language model trained on generated agent conversations.

It is a test instrument and a demo: attention, eviction and repair act on trained heads, and right
and wrong answers can be counted. It is not an assistant.
"""

from pathlib import Path

# Folder of the shipped weights, tokenizer and configuration, for transformers' Auto classes.
MODEL_PATH = Path(__file__).parent / "model"
