"""Suite longconv: questions about facts of long conversations on several topics."""
