"""The public gRPC API, beside HTTP: the calls of sessions.proto over the REST API's schemas."""
