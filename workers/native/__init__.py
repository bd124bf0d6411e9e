"""Native code: a decode step's attention over active and drawn rows, where it was built."""
