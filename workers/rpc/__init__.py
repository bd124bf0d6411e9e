"""A worker's calls, and the gRPC server in front of them."""
