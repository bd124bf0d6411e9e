"""Benchmarks of speed and memory, each comparing its subjects in one run."""
