"""What the layers of a model keep: read, probed, tested, and reported."""
