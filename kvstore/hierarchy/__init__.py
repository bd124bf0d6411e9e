"""The tiers as one: placement, write-through, epochs, metering."""
