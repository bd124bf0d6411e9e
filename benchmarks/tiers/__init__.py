"""Bandwidth of the row store's tiers beside its limits."""
