"""Test doubles for code that is built on kvrecall."""

from kvrecall.testing.in_memory_catalog import InMemoryCatalog
from kvrecall.testing.stub_worker import StubWorker

__all__ = ["InMemoryCatalog", "StubWorker"]
