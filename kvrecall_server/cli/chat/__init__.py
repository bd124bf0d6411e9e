"""The terminal chat: the command, and the lines that it prints about a session."""
