"""Suite repository: names removed from call sites."""
