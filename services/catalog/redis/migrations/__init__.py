"""Migrations of the Redis catalog, one module per step from one version to the next."""
