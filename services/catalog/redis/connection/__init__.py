"""The connection to Redis: commands with retries, and the names of the keys."""
