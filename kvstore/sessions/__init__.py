"""One session's rows: open, read, append, gather, delete."""
