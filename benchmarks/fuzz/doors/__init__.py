"""How requests are sent: HTTP, the gRPC API, and the workers' own port."""
