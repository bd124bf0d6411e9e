"""Keys of the reference model, and queries of the tokens behind them."""

import pytest

from tests.kvstore.index.key_sets import KeySet, reference_keys


@pytest.fixture(scope="session")
def real_keys() -> KeySet:
    """4,000 rows of the reference model, and queries of eight tokens."""
    return reference_keys(4000, tokens=8, seed=5)
