"""The wire between gateway and workers: generated messages and their conversion to domain values."""
