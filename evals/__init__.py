"""Quality suites: answer accuracy and fidelity of the model under every method and budget."""
