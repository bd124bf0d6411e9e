"""Prometheus metrics of all processes: families as data, and the page that shows them."""
