"""Suite locomo: evidence in the matched episode and F1 of answers on real conversations."""
