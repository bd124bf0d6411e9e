"""A short question of one tenant beside the flood of another."""
