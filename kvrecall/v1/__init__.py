"""The wire between services and workers, generated from proto/kvrecall/v1."""
