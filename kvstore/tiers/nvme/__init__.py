"""Pages in append-only segment files."""
