"""Tokenizers of the tests: any text, any chat template, marks of one's own."""

from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

from tests.workers.byte_level import make_byte_level


@pytest.fixture(scope="session")
def byte_level() -> Callable[..., PreTrainedTokenizerFast]:
    """byte_level(template, end, special, added): `make_byte_level`."""
    return make_byte_level
