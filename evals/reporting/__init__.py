"""Tables and plots of the evals' results."""
