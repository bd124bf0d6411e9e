"""A worker of several ranks beside one of one process."""
