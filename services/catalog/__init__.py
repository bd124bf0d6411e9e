"""The catalog of sessions and turns: small protocols, on SQLite and on Redis."""
