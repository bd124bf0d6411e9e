"""REST API: router, routes and schemas."""
