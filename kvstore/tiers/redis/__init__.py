"""Pages in Redis."""
