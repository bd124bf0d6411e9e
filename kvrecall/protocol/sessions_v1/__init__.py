"""The public gRPC API, generated from proto/kvrecall/sessions/v1. Imports grpcio and protobuf only."""

TENANT_KEY = "x-kvrecall-tenant"
"""Key in a call's metadata; its value is the tenant that a trusted proxy has authenticated."""
REQUEST_ID_KEY = "x-request-id"
"""Key in the metadata of calls and of their answers, by which log lines are found."""
ERROR_DOMAIN = "kvrecall"
"""Domain of `google.rpc.ErrorInfo`; its reason is an error code in capitals."""
