"""Row store: keeps the KV rows of every session in memory, files and Redis."""
