"""Stored pages of sessions: what is shared, orphaned, or unknown to the catalog."""
