"""Drills: one fault each that breaks a promise on purpose, with expectations of its own."""
