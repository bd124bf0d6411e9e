"""HTTP API: REST routes, error responses, event streams and metrics around the service."""
