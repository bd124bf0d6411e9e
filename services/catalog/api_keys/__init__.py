"""API keys in each kind of catalog."""
