"""The HTTP API's own cost: reads, turns and bad connections."""
