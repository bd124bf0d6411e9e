"""Fixtures: the end-to-end tests' model and clusters of real processes on Redis."""

from tests.end_to_end.conftest import model, new_cluster

__all__ = ["model", "new_cluster"]
