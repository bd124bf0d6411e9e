"""Routes of the REST API, by subject."""
