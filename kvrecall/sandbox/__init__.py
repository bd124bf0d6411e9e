"""Work that clients choose, where it can hurt nobody else: in child processes, in turns of tenants."""
