"""The wire between services and workers, generated from proto/kvrecall/v1."""

REFUSAL_CODE = "kvrecall-code"
"""Key in the trailing metadata of a call that a worker refused; its value is the error's code."""
