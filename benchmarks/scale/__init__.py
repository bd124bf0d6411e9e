"""Costs of the service by the number of its sessions; see `__main__`."""
