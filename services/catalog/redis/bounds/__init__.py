"""What tenants may take of the Redis catalog."""
