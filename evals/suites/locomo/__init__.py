"""Suite locomo: real conversations."""
