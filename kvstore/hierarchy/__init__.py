"""The tiers of a store as one hierarchy: placement, write-through and counters."""
