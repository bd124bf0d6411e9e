"""Recorded conversations: file formats, playback and results."""
