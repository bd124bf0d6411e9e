"""The shipped tokenizer and model."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from reference import MODEL_PATH


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL_PATH)


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32).eval()
