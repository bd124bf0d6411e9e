"""Suite earlier: questions in a new session about sessions before it."""
