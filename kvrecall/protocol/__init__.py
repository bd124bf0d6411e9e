"""The wire between gateway and workers: generated messages, the table of calls, conversion to domain values."""

PROTOCOL_VERSION = 2
"""Version of the calls and messages. A worker states it in its WorkerInfo and WorkerRecord; one that
states none speaks version 1. A gateway refuses workers of another version."""
