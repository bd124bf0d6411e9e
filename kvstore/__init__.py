"""Rows outside the GPU: pages of keys and values in tiers, written once, gathered by position (see store.py)."""
