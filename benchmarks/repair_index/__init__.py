"""Repairs through a session's index beside exact scans: what they choose, and in which time."""
