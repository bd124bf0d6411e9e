"""Settings of methods, repairs, prefill and retrieval: what a session may set, checked at the door."""
