"""The file of a SQLite catalog: its lock, and its identity."""
