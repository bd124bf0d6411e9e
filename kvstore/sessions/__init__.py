"""Sessions of the row store: open, read, append, gather and delete."""
