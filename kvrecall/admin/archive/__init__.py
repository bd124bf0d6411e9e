"""A session as one file: its format, its pages and its catalog records."""
