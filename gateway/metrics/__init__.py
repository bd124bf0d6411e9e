"""Prometheus metrics of the service and its workers."""
