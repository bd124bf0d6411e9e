"""Suite longconv: questions about long conversations of several topics."""
