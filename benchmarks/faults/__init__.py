"""Fault injection under load: a seeded schedule of faults against real processes, then checks.

Faults are kills, stops, broken connections, full disks, flipped bits and clock jumps.
`python -m benchmarks.faults --faults 500 --seed 1` is the full run; tests/faults is a short one.
"""
