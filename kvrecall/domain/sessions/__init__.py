"""Sessions: asked for, in their states, and as they are committed."""
