"""The values and rules that gateway, services and workers share.

No I/O, no wire format, no torch.
"""
