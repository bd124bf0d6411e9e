"""The scheduler: slots, jobs, and one decoding batch for all sessions that decode."""
