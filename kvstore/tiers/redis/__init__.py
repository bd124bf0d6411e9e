"""Tier in a Redis that several workers share."""
