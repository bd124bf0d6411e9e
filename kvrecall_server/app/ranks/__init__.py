"""A worker of several processes: their start, and what each of them is."""
