"""Request bodies: received under limits, inflated, and parsed as strict JSON."""
