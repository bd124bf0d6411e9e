"""Sessions behind stateless requests in the SQLite catalog."""
