"""What the SQLite catalog may take: of what each tenant may have, and of the disk."""
