"""Pure tensor functions that methods are made of: observe, score, select, split a budget."""
