"""Episodes: one selection of rows per topic."""
