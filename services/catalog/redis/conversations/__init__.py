"""Sessions behind stateless requests in the Redis catalog."""
