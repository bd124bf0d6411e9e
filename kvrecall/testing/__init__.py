"""Parts for tests of what is built on kvrecall."""

from kvrecall.testing.in_memory_catalog import InMemoryCatalog

__all__ = ["InMemoryCatalog"]
