"""Settings of methods, repairs, prefill, re-selection and retrieval: what a session may set, checked at the door."""
