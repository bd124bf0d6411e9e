"""Addresses that processes listen on."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches `host`. A name other than localhost may be any."""
    host = host.strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
