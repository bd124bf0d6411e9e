"""The catalog of sessions and turns: one protocol, two implementations."""
