"""Memories: what sessions of one name have said, brought back in their turns."""
