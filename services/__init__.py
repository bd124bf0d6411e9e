"""The domain: sessions, turns and pauses. No HTTP, no torch."""
