"""What the sessions of a tenant compute, counted in the workers and told to whoever charges for it."""
