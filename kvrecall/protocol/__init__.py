"""The wire between gateway and workers: messages, table of calls, conversion to the domain."""

PROTOCOL_VERSION = 6
"""Version of the calls and messages, which a worker states in its WorkerInfo and WorkerRecord.

A gateway refuses workers of another version.
"""
