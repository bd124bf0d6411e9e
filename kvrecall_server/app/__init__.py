"""The composition root: settings, and how the processes are put together."""
