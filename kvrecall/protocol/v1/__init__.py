"""The wire between services and workers, generated from proto/kvrecall/v1."""

REFUSAL_CODE = "kvrecall-code"
"""Key in the trailing metadata of a call that a worker refused; its value is the error's code."""
TOKEN_KEY = "kvrecall-token"
"""Key in the metadata of every call; its value is the secret that gateways and workers share."""
WORKER_RECORD_SECONDS = 3.0
"""Lifetime of a worker's record in the registry; it is renewed each second."""


def workers_key(namespace: str) -> str:
    """The set of the workers' names. All keys of a registry lie on one server of a cluster."""
    return f"{{{namespace}:workers}}"


def worker_key(namespace: str, name: str) -> str:
    """A worker's own record, a serialised WorkerRecord."""
    return f"{{{namespace}:workers}}:{name}"
