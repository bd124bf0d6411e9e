"""Metering: tokens that sessions compute, counted in the workers and published to be charged."""
