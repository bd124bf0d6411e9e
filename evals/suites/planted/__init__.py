"""Suite planted: facts in real text, asked for after they were evicted and repaired."""
