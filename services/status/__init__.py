"""What the service does now, for metrics."""
