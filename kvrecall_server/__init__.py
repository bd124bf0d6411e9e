"""The server of kvrecall: commands, wiring, administration, demo."""
