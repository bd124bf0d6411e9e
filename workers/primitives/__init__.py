"""Pure tensor functions that methods are built from: observe, score, select, split a budget."""
