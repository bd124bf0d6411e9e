"""Migrations of the SQLite schema, one file per version; `NNNN_name.sql` leads to version NNNN."""
