"""One process per GPU: observe, score, select, move."""
