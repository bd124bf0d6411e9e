"""Storage tiers: host memory, local files and Redis."""
