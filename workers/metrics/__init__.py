"""Prometheus metrics of a worker: its families, its meter, and the server that shows them."""
