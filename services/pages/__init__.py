"""Stored pages: dead ones, which no session has any more, and those that no session ever had."""
