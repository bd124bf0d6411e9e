"""Who may do what: keys, principals, rates, quotas. Knows no HTTP and no gRPC."""
