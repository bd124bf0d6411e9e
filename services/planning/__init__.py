"""A turn before it runs: the check of its constraint, and its request to the worker."""
