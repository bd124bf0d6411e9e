"""Faults under load: real processes are killed, stopped, cut off, starved of disk and lied to, by a seed.

`python -m benchmarks.faults --faults 500 --seed 1` runs it in full; tests/faults runs it in short.
"""
