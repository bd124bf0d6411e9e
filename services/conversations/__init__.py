"""Sessions behind requests that repeat the whole conversation: histories, and how they are found."""
