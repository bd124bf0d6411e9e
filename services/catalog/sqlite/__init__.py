"""The catalog in one SQLite file."""
