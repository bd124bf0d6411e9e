"""Suite multiturn: dialogues whose questions stand before, within or behind their context."""
