"""What all APIs need of HTTP: bodies, errors, keys, tenants, streams."""
