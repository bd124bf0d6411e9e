"""Encryption of what a catalog stores: the operator's keys, a data key for each tenant, ciphers of values."""
