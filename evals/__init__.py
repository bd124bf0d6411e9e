"""Quality suites: what is still known, and how true the model stays, under every method and budget."""
