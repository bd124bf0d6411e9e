"""Metered tokens against computed ones."""
