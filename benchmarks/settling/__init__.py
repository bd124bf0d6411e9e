"""What settling answers costs: `python -m benchmarks.settling`."""
