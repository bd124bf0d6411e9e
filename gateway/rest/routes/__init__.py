"""REST endpoints."""
