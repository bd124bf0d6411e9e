"""Who may do what: keys, principals, rates. Knows no HTTP and no gRPC."""
