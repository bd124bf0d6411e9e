"""Commands about this machine: its settings, its models, and what is wrong with it."""
