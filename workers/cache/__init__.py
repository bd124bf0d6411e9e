"""Active rows on the device: slots, each the working set of one session."""
