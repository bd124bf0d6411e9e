"""The values and rules that gateway, services and workers share: no I/O, no wire format, no torch."""
