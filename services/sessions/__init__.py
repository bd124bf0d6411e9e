"""Sessions in this process: what it knows of them beyond the catalog."""
