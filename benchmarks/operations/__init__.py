"""Costs of what operators see: traces and scrapes."""
