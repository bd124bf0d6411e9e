"""A sandbox for work that clients choose: child processes and threads, in turns of tenants."""
