"""Migrations of catalogs from one schema version to the next: none yet, as no version was released before."""
