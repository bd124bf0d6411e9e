"""The workers as the services see them: client protocol, registry, placement."""
