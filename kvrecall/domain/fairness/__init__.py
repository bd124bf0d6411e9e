"""Fair shares of tenants: of a worker's steps, of running turns, and of whatever else is bounded."""
