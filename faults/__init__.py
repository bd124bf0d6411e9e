"""Fault injection under load: a seeded schedule of faults against real processes, then checks.

Faults are kills, stops, losses of power, partitions, failing and full disks, flipped bits and clock
jumps; drills are faults with expectations of their own. `python -m faults --faults 2000
--seed 11` is the full run; tests/faults is a short one.
"""
