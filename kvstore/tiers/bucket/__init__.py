"""Tier in object storage: a bucket of S3, or of a server that speaks it."""
