"""Drills: one fault each on a set-up of its own, with expectations of its own.

They are faults that take something away for good, such as a restored backup, or that need a set-up
that is made for them, such as a worker of another version.
"""
