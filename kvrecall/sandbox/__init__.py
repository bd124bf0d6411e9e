"""Grammars that clients choose, compiled in child processes with limits of CPU time and memory."""
