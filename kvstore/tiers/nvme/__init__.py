"""Tier of append-only segment files on a local file system."""
