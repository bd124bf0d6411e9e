"""Memories: what sessions of one name have said, brought back in the turns of the others."""
