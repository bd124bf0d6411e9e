"""Host memory of a worker: how much there is for rows, and which pages sessions hold in it."""
