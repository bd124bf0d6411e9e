"""A service of this process or of one that it starts: for commands, tests and one-process servers."""
