"""The front door: HTTP in, services behind."""
