"""The SQLite catalog's file: connections, transactions, schema, and the room that is left on its disk."""
