"""Which turns may run now: slots and a queue that is fair to tenants, and turns that kill workers."""
