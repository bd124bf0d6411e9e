"""Test doubles for code that is built on kvrecall."""

from kvrecall_server.testing.catalog import open_catalog
from kvrecall_server.testing.stub_worker import StubWorker

__all__ = ["StubWorker", "open_catalog"]
